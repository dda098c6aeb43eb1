"""ls_plugin: a Fairseq plugin that makes Transformer training fast.

Importing it, as ``fairseq-train --user-dir ls_plugin`` and the ``lightseq-*`` commands do, registers the ``ls_`` models,
criterion and optimizer with fairseq.
"""

import contextlib
import functools
import logging
import os.path
import sys

from ls_plugin import _versions
from ls_plugin.cli.doctor import shut_out_unrelated_apex

__version__ = _versions.VERSION


@contextlib.contextmanager
def _without_remarks():
    """fairseq's import remarks on tensorboardX, which one task of speech would use; lightseq-doctor has a line for it."""
    remarks = logging.getLogger("fairseq.tasks.text_to_speech")
    remarks.disabled = True
    try:
        yield
    finally:
        remarks.disabled = False


@functools.cache
def register() -> None:
    """Registers the ``ls_`` names and gives fairseq what it lacks on this Python; once in a process."""
    _versions.check()
    from ls_plugin import _library

    _library.warn_if_not_loaded()
    # fairseq is imported from here on, which needs the checks first, and imports whatever is called apex or deepspeed.
    shut_out_unrelated_apex()
    from ls_plugin import deepspeed, safe_eval

    safe_eval.install()
    with deepspeed.left_out(), _without_remarks():
        from ls_plugin import (  # noqa: F401
            checkpoint,
            compat,
            criterions,
            data_files,
            distributed,
            faults,
            limits,
            loading,
            memory,
            models,
            newest,
            ops,
            optim,
        )

    checkpoint.install()
    compat.install()
    data_files.install()
    distributed.install()
    faults.install()
    limits.install()
    loading.install()
    memory.install()
    newest.install()


# The doctor must run where the checks fail: it is what tells why. The report's --help should not wait for torch; it registers itself.
if os.path.basename(sys.argv[0] if sys.argv else "") not in ("lightseq-doctor", "lightseq-report"):
    register()
