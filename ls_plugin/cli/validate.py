"""``lightseq-validate``: fairseq-validate with the plugin loaded."""

import fairseq_cli.validate as stock
from fairseq import options

from ls_plugin.cli._fairseq_command import check_and_run, run, set_up_logging
from ls_plugin.loading import split_path

_stock_main = stock.main


def worker_main(cfg, **kwargs):
    """Runs in every process. It is pickled by name, so unpickling it in a spawned worker imports the plugin there."""
    check_and_run("lightseq-validate", _validate_each, cfg, kwargs)


def _validate_each(cfg, **kwargs):
    """Validates every file of ``--path``, one after the other: a loss is one model's, and stock's takes all names for one file."""
    for path in split_path(cfg.common_eval.path or ""):
        cfg.common_eval.path = path
        _stock_main(cfg, **kwargs)


def main() -> None:
    stock.main = worker_main
    stock.reset_logging = set_up_logging  # fairseq's has every rank print its results
    required = {"--task": "translation", "--path": "checkpoints/checkpoint_best.pt", "--max-tokens": "4096"}
    run("lightseq-validate", stock.cli_main, required, options.get_validation_parser)


if __name__ == "__main__":
    main()
