"""What a command line of fairseq-train says, read before fairseq's own parser does."""

import os
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
