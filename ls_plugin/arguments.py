"""What a command line of fairseq-train says, read before fairseq's own parser does; and lists on the command lines of our own."""

import argparse
import os
from collections.abc import Callable, Iterable
from pathlib import Path

_PLUGIN_DIR = Path(__file__).parent


def values(arguments: list[str], *flags: str) -> list[str]:
    """What a command line gives to a flag, as ``--flag value`` or ``--flag=value``."""
    found = []
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, equals, attached = argument.partition("=")
        if name in flags:
            found.append(attached if equals else following)
    return found


def is_plugin(user_dir: str) -> bool:
    """Whether ``--user-dir`` names this plugin: by any path, or as ``ls_plugin``, which fairseq also looks for beside itself.

    fairseq would compare paths letter by letter and refuse the plugin that is already imported under another spelling.
    """
    if os.path.exists(user_dir):
        return os.path.samefile(user_dir, _PLUGIN_DIR)
    return user_dir == _PLUGIN_DIR.name


class Listed(argparse.Action):
    """An option, or positional argument, of several values: separated by blanks, commas, or both.

    ``type`` and ``choices`` are those of one value.
    """

    def __init__(
        self, *args, nargs: str = "+", type: Callable = str, choices: Iterable | None = None, metavar=None, **kwargs
    ):
        self.of_one, self.among = type, None if choices is None else list(choices)
        if metavar is None and self.among is not None:
            metavar = f"{{{','.join(map(str, self.among))}}}"
        super().__init__(*args, nargs=nargs, metavar=metavar, **kwargs)

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        words = [word for value in values for word in map(str.strip, str(value).split(",")) if word]
        if not words and self.nargs == "+":
            raise argparse.ArgumentError(self, f"must name one or more, got {' '.join(values)!r}")
        setattr(namespace, self.dest, [self._read(word) for word in words])

    def _read(self, word: str):
        try:
            value = self.of_one(word)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        except (TypeError, ValueError):
            raise argparse.ArgumentError(self, f"invalid {self.of_one.__name__} value: {word!r}") from None
        if self.among is not None and value not in self.among:
            raise argparse.ArgumentError(
                self, f"invalid choice: {word!r} (choose from {', '.join(map(str, self.among))})"
            )
        return value
