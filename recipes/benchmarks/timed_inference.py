"""fairseq-generate or fairseq-validate, or their lightseq- twins, with a stop-watch: the same one for both.

    python timed_inference.py RECORD {stock,ls} {generate,validate} -- ARGUMENTS OF THE COMMAND

Runs the real command in this process and writes to RECORD, as JSON, the milliseconds of each batch in the task's inference_step or valid_step.
"""

import json
import sys
import time
from pathlib import Path

STEPS = {"generate": "inference_step", "validate": "valid_step"}


def main() -> None:
    split = sys.argv.index("--")
    record, kind, command = sys.argv[1:split]
    prefix = "lightseq" if kind == "ls" else "fairseq"
    sys.argv = [f"{prefix}-{command}", *sys.argv[split + 1 :]]
    if kind == "ls":
        from ls_plugin.cli import generate, validate

        run = {"generate": generate.main, "validate": validate.main}[command]
    else:
        from fairseq_cli import generate, validate

        run = {"generate": generate.cli_main, "validate": validate.cli_main}[command]
    from fairseq.tasks.fairseq_task import FairseqTask

    batches_ms = []
    step = getattr(FairseqTask, STEPS[command])

    def timed(*args, **kwargs):
        begin = time.perf_counter()
        result = step(*args, **kwargs)
        batches_ms.append(round((time.perf_counter() - begin) * 1e3, 3))
        return result

    setattr(FairseqTask, STEPS[command], timed)
    try:
        run()
    except SystemExit as exit_:  # lightseq- commands always end so
        if exit_.code:
            raise
    Path(record).write_text(json.dumps(batches_ms), encoding="utf-8")


if __name__ == "__main__":
    main()
