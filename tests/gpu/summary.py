"""The short table of a run: python tests/gpu/summary.py OUT. Counts of the tests, then a line for each measured case."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def test_lines(path: Path) -> list[str]:
    if not path.exists():
        return ["tests: no record (cut before their end)"]
    suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    counts = {
        key: sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    }
    failed = [
        f"  {case.get('classname')}.{case.get('name')}"
        for suite in suites
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return [", ".join(f"{key} {n}" for key, n in counts.items()), *failed[:20]]


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
    records = sorted(out.glob("benchmark_*.json"))
    print("\n".join(test_lines(out / "tests.xml")))
    print("ms of ls forward, backward; speed-up over eager, compiled; share of the copy bandwidth forward, backward")
    for path in records:
        print("\n".join(benchmark_lines(path)))
    if not records:
        print("no benchmark was measured")
    return int(not records)


if __name__ == "__main__":
    sys.exit(main())
