"""``lightseq-train``: fairseq-train with the plugin loaded."""

import fairseq_cli.train as stock

from ls_plugin.cli._fairseq_command import check_and_run, run

_stock_main = stock.main


def worker_main(cfg, **kwargs):
    """Runs in every process. It is pickled by name, so unpickling it in a spawned worker imports the plugin there."""
    check_and_run("lightseq-train", _stock_main, cfg, kwargs)


def main() -> None:
    stock.main = worker_main
    run("lightseq-train", stock.cli_main, required={"--arch": "ls_transformer"})


if __name__ == "__main__":
    main()
