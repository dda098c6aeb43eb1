"""Models from checkpoints, with the file named where its weights do not fit or are not numbers.

:func:`install` wraps fairseq's two ways from a checkpoint to a model: ``load_model_ensemble_and_task`` (generate, validate, eval-lm,
``from_pretrained``) and ``Trainer.load_checkpoint``.

- Parameters that a checkpoint lacks, or has beside those of the model, are an error of one line.
- Weights that are NaN or infinite are refused: translations fail in the search, and training stops as if the learning rate were at fault.
- ``--path a.pt:b.pt`` names two files for every command, as its help says; stock's validate and eval-lm take it for one.
"""

import re
from collections.abc import Iterable

import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager
from fairseq.trainer import Trainer
from torch import Tensor

from ls_plugin.errors import CheckpointError
from ls_plugin.rebinding import wrap

_STRICT = "Error(s) in loading state_dict for"  # how torch's RuntimeError about parameters begins
_N_NAMED = 3  # parameters in a message


def install() -> None:
    """Wraps the two.  Calling it again changes nothing."""
    wrap(checkpoint_utils, "load_model_ensemble_and_task", _load_models)
    wrap(Trainer, "load_checkpoint", _load_checkpoint)


def split_path(path: str) -> list[str]:
    """The files of a ``--path``, joined by colons; a file whose own name has a colon stays one, and so does an address like ``s3://``."""
    if PathManager.exists(path):
        return [path]
    return [part for part in re.split(r":(?!//)", path) if part]


def _load_models(stock, filenames, arg_overrides=None, task=None, strict=True, suffix="", num_shards=1, state=None):
    """Stock's, one file after the other, so that an error can name its file.

    Raises:
        CheckpointError: a file lacks parameters, has unknown ones, or some that are not finite.
    """
    ensemble, cfg = [], None
    for path in [part for name in filenames for part in split_path(name)]:
        try:
            models, cfg, task = stock([path], arg_overrides, task, strict, suffix, num_shards, state)
        except RuntimeError as error:
            if not str(error).startswith(_STRICT):
                raise
            raise CheckpointError(
                f"checkpoint {path}: must hold the parameters that its configuration describes, got {parameters_at_fault(error)}; take the "
                "file as it was saved, or drop --model-overrides that change the model"
            ) from error
        check_finite(path, (item for model in models for item in model.named_parameters()))
        ensemble += models
    return ensemble, cfg, task


def _load_checkpoint(stock, self, filename, *args, **kwargs):
    extra_state = stock(self, filename, *args, **kwargs)
    if extra_state is not None:  # None: there was no such file
        check_finite(filename, self.get_model().named_parameters())
    return extra_state


def parameters_at_fault(error: BaseException | None) -> str:
    """What torch's error about a state dict lists, the first few parameters of each kind: "missing a, b and 4 more; unexpected c"."""
    faults = []
    for line in str(error).splitlines()[1:]:
        kind, _, names = line.strip().partition(": ")
        quoted = re.findall(r'"([^"]+)"', names)
        if kind.endswith("key(s) in state_dict") and quoted:
            more = f" and {len(quoted) - _N_NAMED} more" if len(quoted) > _N_NAMED else ""
            faults.append(f"{kind.split()[0].lower()} {', '.join(quoted[:_N_NAMED])}{more}")
        elif line.strip():
            faults.append(line.strip().rstrip("."))
    more = f"; and {len(faults) - _N_NAMED} more" if len(faults) > _N_NAMED else ""
    return "; ".join(faults[:_N_NAMED]) + more


def check_finite(path: str, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raises CheckpointError that names the first of ``weights`` with a value that is NaN or infinite.  One pass over them."""
    bad = [(name, x.detach()) for name, x in weights if not _is_finite(x.detach())]
    if bad:
        name, x = bad[0]
        more = f" and in {len(bad) - 1} more parameters" if len(bad) > 1 else ""
        raise CheckpointError(
            f"checkpoint {path}: weights must be finite, got {'NaN' if x.isnan().any() else 'infinity'} in {name}{more}; the run diverged before "
            "it was saved, or the file was made with an error. Take an earlier checkpoint"
        )


def _is_finite(x: Tensor) -> bool:
    if not x.is_floating_point() or x.device.type == "meta":
        return True
    # The sum allocates nothing, and is finite only if all are; a sum of large numbers may overflow by itself.
    return bool(x.sum(dtype=torch.float64 if x.dtype == torch.float64 else torch.float32).isfinite()) or bool(
        x.isfinite().all()
    )
