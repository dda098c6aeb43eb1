"""``lightseq-generate``: fairseq-generate with the plugin loaded."""

import fairseq_cli.generate as stock
from fairseq import options

from ls_plugin.cli._fairseq_command import check_and_run, run

_stock_main = stock.main


def worker_main(cfg, **kwargs):
    """Runs in every process. It is pickled by name, so unpickling it in a spawned worker imports the plugin there."""
    check_and_run("lightseq-generate", _stock_main, cfg, kwargs)


def main() -> None:
    stock.main = worker_main
    required = {"--path": "checkpoints/checkpoint_best.pt"}
    run("lightseq-generate", stock.cli_main, required, options.get_generation_parser)


if __name__ == "__main__":
    main()
