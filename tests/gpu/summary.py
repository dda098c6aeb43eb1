"""The short table of a run: python tests/gpu/summary.py OUT. Counts of the tests, a line for each measured op and for each training."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

MOST_NAMES = 20
GOALS = {("fp16", 512): 3.1, ("fp16", 4096): 1.8, ("fp16", 8192): 1.6}  # over stock


def test_lines(out: Path) -> tuple[list[str], bool]:
    """Counts of all files, then what failed; and whether any test ran and passed at all."""
    suites, lines = [], []
    for log in sorted(out.glob("tests_*.log")):
        path = log.with_suffix(".xml")
        if path.exists():
            suites += ElementTree.parse(path).getroot().iter("testsuite")
        else:
            lines.append(f"  {log.stem.removeprefix('tests_')}: no record (ended before its end), see {log.name}")
    counts = {
        key: sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    }
    failed = [
        f"  {case.get('classname')}.{case.get('name')}"
        for suite in suites
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    more = [f"  and {len(failed) - MOST_NAMES} more"] if len(failed) > MOST_NAMES else []
    return [", ".join(f"{key} {n}" for key, n in counts.items()), *lines, *failed[:MOST_NAMES], *more], passed > 0


def cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def benchmark_lines(path: Path) -> list[str]:
    content = json.loads(path.read_text())
    lines = [
        ", ".join(f"{key} {value}" for key, value in content["machine"].items()),
        f"bandwidth, GB/s: copy {content['bandwidth']['copy_']:.0f}, in place {content['bandwidth']['in_place']:.0f}",
    ]
    for r in content["results"]:
        ours, gains = r["times"]["ls"], r["speedup"]
        lines.append(
            f"{r['op'][:22]:<23}{r['shape'][:25]:<26}{r['dtype']}"
            f"{cell(ours['forward_ms'], '8.3f')}{cell(ours['backward_ms'], '8.3f')}"
            f"{cell(gains['eager']['total'], '6.1f'):>6}{cell(gains['compiled']['total'], '6.1f'):>6}"
            f"{cell(r['share'][0], '6.0%'):>6}{cell(r['share'][1], '6.0%'):>6}"
        )
    return lines


def training_line(path: Path) -> str:
    """Of a report of lightseq-report run, in a folder training_PRECISION_TOKENS."""
    _, precision, tokens = path.parent.name.split("_")
    report = json.loads(path.read_text())
    known, gain = report["contenders"], report["over_stock"].get("ls")
    line = f"{precision} {int(tokens):>6,} tokens"
    for kind in ("stock", "ls"):
        if kind in known:
            peak = known[kind]["peak_gpu_mib"] or known[kind]["peak_rss_mib"]
            line += f"   {kind} {known[kind]['step_ms']:8.1f} ms, {peak:7,.0f} MiB"
    if gain is None:
        return line + "   not both were measured"
    if gain["ratio"] is None:
        return f"{line}   no speed-up: {gain['why_not']}"
    goal = GOALS.get((precision, int(tokens)))
    met = "" if goal is None else f" (goal {goal}x {'met' if gain['ratio'] >= goal else 'missed'})"
    return f"{line}   {gain['ratio']:.2f}x{met}"


def main() -> int:
    out = Path(sys.argv[1])
    records = sorted(out.glob("benchmark_*/kernels.json"))
    lines, any_passed = test_lines(out)
    print("\n".join(lines))
    if not any_passed:
        print("no test ran and passed")
    print("ms of ls forward, backward; speed-up over eager, compiled; share of the copy bandwidth forward, backward")
    for path in records:
        print("\n".join(benchmark_lines(path)))
    if not records:
        print("no benchmark was measured")
    trainings = sorted(out.glob("training_*/report.json"), key=lambda path: path.stat().st_mtime)
    print("a step of whole trainings, stock and ls in turn")
    print("\n".join(training_line(path) for path in trainings) or "no training was measured")
    return int(not records or not any_passed or not trainings)


if __name__ == "__main__":
    sys.exit(main())
