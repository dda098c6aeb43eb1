"""``lightseq-interactive``: fairseq-interactive with the plugin loaded."""

import fairseq_cli.interactive as stock
from fairseq import options

from ls_plugin.cli._fairseq_command import check_and_run, run
from ls_plugin.faults import install_interactive

_stock_main = stock.main


def worker_main(cfg, **kwargs):
    """Runs in every process. It is pickled by name, so unpickling it in a spawned worker imports the plugin there."""
    check_and_run("lightseq-interactive", _stock_main, cfg, kwargs)


def main() -> None:
    stock.main = worker_main
    install_interactive()
    required = {"--path": "checkpoints/checkpoint_best.pt"}
    run("lightseq-interactive", stock.cli_main, required, options.get_interactive_generation_parser)


if __name__ == "__main__":
    main()
