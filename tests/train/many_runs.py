"""Several runs of lightseq-train in one process, one after another: importing fairseq takes longer than training these models.

``python -m tests.train.many_runs FILE``, where FILE holds [name, arguments] of each in JSON. A line "=== name" begins each log, and a line
"=== status N" ends that of a run that failed.
"""

import json
import sys
from pathlib import Path

from ls_plugin.cli import _fairseq_command, train

if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # in order with what goes to standard error
    _fairseq_command.leave = sys.exit  # the real one would end them all
    for name, arguments in json.loads(Path(sys.argv[1]).read_text()):
        print(f"=== {name}")
        sys.argv = ["lightseq-train", *arguments]
        try:
            train.main()
        except SystemExit as end:
            print(f"=== status {end.code}")
