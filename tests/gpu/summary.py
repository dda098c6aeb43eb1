"""The short table of a run: python tests/gpu/summary.py OUT. Counts of the tests, then a line for each measured case."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

MOST_NAMES = 20


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
    return int(not records or not any_passed)


if __name__ == "__main__":
    sys.exit(main())
