"""``lightseq-report``: what the plugin gains, and what it would gain on other machines.

Each subcommand is a module of ``ls_plugin/report`` with ``add_arguments(parser)`` and ``run(args)``, which returns the exit status. A module
imports torch, fairseq and the like inside of its functions, so that ``--help`` and refused flags cost nothing.
"""

import argparse
import importlib
import logging
import sys

COMMAND = "lightseq-report"
SUBCOMMANDS = {
    "run": "trains one command in turn as stock, as stock with what PyTorch offers, and as ls: speed, memory, losses",
    "kernels": "times every fused op on this machine against PyTorch eager, torch.compile, apex and Liger-Kernel",
    "estimate": "the time of a training step on GPUs that are not there, stock beside ls: a model, no measurement",
}


def parser(arguments: list[str]) -> argparse.ArgumentParser:
    """Knows the flags of the subcommand that ``arguments`` name; of the others the names alone."""
    made = argparse.ArgumentParser(prog=COMMAND, description="What ls_plugin gains over stock fairseq.")
    subparsers = made.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    for name, summary in SUBCOMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        if name in arguments:
            module = _module(name)
            subparser.description = module.__doc__
            module.add_arguments(subparser)
    return made


def _module(subcommand: str):
    return importlib.import_module(f"ls_plugin.report.{subcommand}")


def main() -> None:
    args = parser(sys.argv[1:]).parse_args()
    import ls_plugin

    logging.disable(logging.INFO)  # fairseq's remarks about optional packages
    ls_plugin.register()
    logging.disable(logging.NOTSET)
    from ls_plugin.cli._fairseq_command import run_own

    run_own(COMMAND, lambda: sys.exit(_module(args.subcommand).run(args)))


if __name__ == "__main__":
    main()
