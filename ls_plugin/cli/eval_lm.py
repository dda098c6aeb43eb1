"""``lightseq-eval-lm``: fairseq-eval-lm with the plugin loaded."""

import fairseq_cli.eval_lm as stock
from fairseq import options

from ls_plugin.cli._fairseq_command import check_and_run, run
from ls_plugin.errors import DataError

_stock_main = stock.main


def worker_main(cfg, **kwargs):
    """Runs in every process. It is pickled by name, so unpickling it in a spawned worker imports the plugin there."""
    check_and_run("lightseq-eval-lm", _evaluate, cfg, kwargs)


def _evaluate(cfg, **kwargs):
    """Stock's, which leaves out blocks that the model is too short for, and calls a perplexity of nothing 1."""
    n_tokens = cfg.task.tokens_per_sample
    results = _stock_main(cfg, **kwargs)
    if results["loss"] == 0:
        raise DataError(
            f"--gen-subset {cfg.dataset.gen_subset}: no token was scored: either it is empty, or its blocks of --tokens-per-sample {n_tokens} are "
            "longer than the model's positions; give the --tokens-per-sample of its training"
        )


def main() -> None:
    stock.main = worker_main
    run("lightseq-eval-lm", stock.cli_main, {"--path": "checkpoints/checkpoint_best.pt"}, options.get_eval_lm_parser)


if __name__ == "__main__":
    main()
