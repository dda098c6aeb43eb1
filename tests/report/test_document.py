"""The pages of reports: one content in Markdown and HTML, charts that are whole SVG."""

import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree as xml

import pytest

from ls_plugin.report import charts
from ls_plugin.report.document import Charts, Code, Heading, Items, Lead, Paragraph, Table, markdown, page
from tests.limits import LIMIT_S

BLOCKS = [
    Lead([("Gained", "**2x** <of> stock")], good=False),
    Heading("A & B"),
    Paragraph("see `--tolerance`"),
    Items(["first", "second"]),
    Table(["", "stock"], [["  clip", "1.0"], ["a|b", "x" * 50]]),
    Code("fairseq-train <data>"),
    Charts([("time", "<svg></svg>")]),
]


def test_the_same_content_in_markdown():
    text = markdown("Report", BLOCKS)
    assert text.startswith("# Report\n\n- **Gained**: **2x** <of> stock\n\n## A & B\n")
    assert "|  | stock |\n| --- | ---: |\n| &nbsp;&nbsp;clip | 1.0 |\n| a\\|b |" in text
    assert "```\nfairseq-train <data>\n```" in text and "Charts in [report.html](report.html): time." in text


def test_one_page_that_needs_nothing_beside_it():
    text = page("Report <1>", BLOCKS)
    assert "<title>Report &lt;1&gt;</title>" in text and '<meta name="viewport"' in text and "@media print" in text
    assert '<div class="lead bad"><p><strong>Gained:</strong> <strong>2x</strong> &lt;of&gt; stock</p>' in text
    assert (
        "<h2>A &amp; B</h2>" in text
        and "<code>--tolerance</code>" in text
        and "<pre>fairseq-train &lt;data&gt;" in text
    )
    assert '<div class="scroll" tabindex="0"><table>' in text and '<td class="long">xxx' in text
    assert not any(word in text for word in ("<script", "<link", "src=", "@import", "url("))
    body = text[text.index("<body>") : text.index("</html>")]
    assert xml.fromstring(body).tag == "body"  # every tag is closed


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE = """<iframe id=frame src=report.html style="width:390px;height:2000px;border:0"></iframe><pre id=out></pre><script>
frame.onload = () => {
  const page = frame.contentDocument, box = page.querySelector(".scroll"), cells = box.querySelector("table").rows[1].cells;
  const seen = cell => { const at = cell.getBoundingClientRect(); return at.left >= 0 && at.right <= 390; };
  const before = [seen(cells[0]), seen(cells[cells.length - 1])];
  box.scrollLeft = 1e6;
  out.textContent = JSON.stringify({page: page.documentElement.scrollWidth, before, after: [seen(cells[0]), seen(cells[cells.length - 1])]});
};</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="chromium was not found")
def test_a_wide_table_scrolls_on_a_phone_and_keeps_the_names_of_its_rows(tmp_path):
    table = Table(["", *(f"stock+contender {i}" for i in range(8))], [["ms per step", *["1,234.5"] * 8]])
    (tmp_path / "report.html").write_text(page("Report", [*BLOCKS[:4], table, *BLOCKS[5:]]))
    (tmp_path / "phone.html").write_text(PHONE)
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--virtual-time-budget=3000",
    ]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", (tmp_path / "phone.html").as_uri()]
    done = subprocess.run([CHROMIUM, *flags], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    found = json.loads(re.search(r'<pre id="out">(.*?)</pre>', done.stdout)[1])
    assert found == {"page": 390, "before": [True, False], "after": [True, True]}


def parts(svg: str, tag: str) -> list[xml.Element]:
    return list(xml.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{tag}"))


def test_bars_are_as_long_as_their_values():
    rows = {"stock": {"forward": 3.0, "sync": 0.0, "update": 1.0}, "ls": {"forward": 1.0, "sync": 0.0, "update": 1.0}}
    svg = charts.bars(rows, charts.PARTS, "title", "ms")
    widths = [float(bar.get("width")) for bar in parts(svg, "rect") if len(bar)]  # a legend's squares tell nothing
    assert len(widths) == 4  # sync is nowhere
    assert abs(widths[0] - 3 * widths[1]) < 0.3 and widths[1] == widths[2] == widths[3]
    assert [text.text for text in parts(svg, "text")] == ["stock", "4 ms", "ls", "2 ms", "forward", "update"]


def test_lines_leave_gaps_where_a_value_is_none():
    series = {"stock": ([1, 2, 3, 4], [5.0, math.nan, 3.0, 2.0]), "a<b": ([1, 4], [1.0, 9.0])}
    svg = charts.lines(series, {"stock": "red", "a<b": "blue"}, "title", "updates")
    first, second = parts(svg, "path")
    assert first.get("d").count("M") == 2 and second.get("d").count("L") == 1
    assert "updates" in {text.text for text in parts(svg, "text")}
    assert "no finite values" in charts.lines({"x": ([1], [math.nan])}, {"x": "red"}, "t", "u")


def test_ticks_are_round_numbers_within_the_range():
    assert charts.ticks(0.0, 10.0) == [0, 2, 4, 6, 8, 10]
    assert [round(x, 6) for x in charts.ticks(8.93, 9.27)] == [9.0, 9.1, 9.2]
    assert charts.ticks(3.0, 3.0) == [3.0]
