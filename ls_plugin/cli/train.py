"""``lightseq-train``: fairseq-train with the plugin loaded, and ``--deepspeed``."""

import functools

import fairseq_cli.train as stock
from fairseq import options

from ls_plugin.cli._fairseq_command import check_and_run, run
from ls_plugin.deepspeed import config as deepspeed_config
from ls_plugin.errors import UsageError
from ls_plugin.rebinding import wrap

_stock_main = stock.main


def worker_main(cfg, deepspeed: dict | None = None, **kwargs):
    """Runs in every process. It is pickled by name, so unpickling it in a spawned worker imports the plugin there.

    Args:
        deepspeed: the configuration of ``--deepspeed``, or None.
    """
    if deepspeed is not None:
        from ls_plugin.deepspeed.trainer import DeepSpeedTrainer

        stock.Trainer = functools.partial(DeepSpeedTrainer, config=deepspeed)  # looked up when it is called
    check_and_run("lightseq-train", _stock_main, cfg, kwargs)


def _parser_with_deepspeed(stock_parser, *args, **kwargs):
    parser = stock_parser(*args, **kwargs)
    help_text = 'train under DeepSpeed, configured by this JSON file; what it leaves to the flags is "auto" there'
    parser.add_argument("--deepspeed", metavar="FILE", help=help_text)
    return parser


def _configure(stock_convert, args):
    """Makes fairseq's configuration of the flags; the JSON's goes to the workers as an argument, since fairseq's knows no such part."""
    path = vars(args).pop("deepspeed", None)
    cfg = stock_convert(args)
    if path is not None:
        config = deepspeed_config.resolve(deepspeed_config.read(path), cfg)
        stock.main = functools.partial(worker_main, deepspeed=config)
    return cfg


def _valid_stats(stock_get_valid_stats, cfg, trainer, stats: dict, *args) -> dict:
    """Stock's, which ends in a KeyError where validation does not log the figure that chooses the best checkpoint."""
    metric = cfg.checkpoint.best_checkpoint_metric
    if metric not in stats:
        raise UsageError(
            f"--best-checkpoint-metric {metric}: must be a figure of the validation, which logs {', '.join(stats)}; choose one of these"
        )
    return stock_get_valid_stats(cfg, trainer, stats, *args)


def main() -> None:
    stock.main = worker_main
    wrap(stock, "get_valid_stats", _valid_stats)
    wrap(options, "get_training_parser", _parser_with_deepspeed)
    wrap(stock, "convert_namespace_to_omegaconf", _configure)
    required = {"--arch": "ls_transformer", "--optimizer": "ls_adam", "--max-tokens": "4096"}
    run("lightseq-train", stock.cli_main, required, options.get_training_parser)


if __name__ == "__main__":
    main()
