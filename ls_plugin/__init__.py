"""ls_plugin: a Fairseq plugin that makes Transformer training fast.

Importing it, as ``fairseq-train --user-dir ls_plugin`` and the ``lightseq-*`` commands do, registers the ``ls_`` models,
criterion and optimizer with fairseq.
"""

from ls_plugin import _library, _versions

__version__ = _versions.VERSION

_versions.check()
_library.warn_if_not_loaded()

from ls_plugin import checkpoint, compat, criterions, models, ops, optim  # noqa: E402  (fairseq's import needs the checks first)

checkpoint.install()
compat.install()

__all__ = ["checkpoint", "compat", "criterions", "models", "ops", "optim"]
