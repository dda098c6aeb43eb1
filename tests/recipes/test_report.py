"""The quickstart's report, from records as timed_train.py writes them."""

import json

import pytest

from ls_plugin.report import figures
from ls_plugin.report.records import read_run
from ls_plugin.report.speedup import Comparison, lead, screen

PHASES = {"forward": 40.0, "backward": 80.0, "sync": 0.0, "clip": 10.0, "update": 20.0, "rest": 2.0}


def update(number, speed=1.0, loss=None):
    return {
        "update": number,
        "time_s": number * 0.152 / speed,
        "step_ms": 152.0 / speed,
        "phase_ms": {name: value / speed for name, value in PHASES.items()} if number % 4 == 0 else None,
        "tokens": 900,
        "batches": [{"source": [8, 100], "target": [9, 100], "tokens": 900}],
        "loss": 14 - 0.1 * number if loss is None else loss,
        "nll_loss": 13.0,
        "peak_rss_mib": 900.0,
        "peak_gpu_mib": 0.0,
    }


def write_record(path, kind, updates, end=True, interrupted=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = [{"start": kind, "startup_s": 5.0, "threads": 2, "device": "CPU"}, *updates]
    entries += [{"end": kind, "interrupted": interrupted}] if end else []
    with path.open("a") as record:
        record.write("".join(json.dumps(entry) + "\n" for entry in entries))


@pytest.fixture
def out(tmp_path):
    """A finished comparison: two rounds, ls twice as fast with the same losses."""
    settings = {"device": "cpu", "device_name": "CPU", "precision": "fp32", "threads": 2, "seed": 1, "minutes": 4}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    for kind, speed in (("stock", 1.0), ("ls", 2.0)):
        for index in (1, 2):
            record = tmp_path / "runs" / f"{kind}-{index}" / "record.jsonl"
            write_record(record, kind, [update(n, speed) for n in range(1, 41)])
    return tmp_path


def text_of(report, out):
    told = report.collect(out)
    report.write(told)
    return (out / "report.md").read_text(), "\n".join(report.summary(told).split()).replace("\n", " ")


def test_the_table_and_the_lead(report, out):
    text, screen = text_of(report, out)
    assert "| ms per step | 152.0 | 76.0 | 2.00x |" in text and "| tokens/s | 5,921 | 11,842 | 2.00x |" in text
    assert "clip | 10.0 | 5.0 | 2.00x |" in text and "sync" not in text.split("## How")[0]
    assert "training is **2.00 times as fast** (2.00 to 2.00" in text and "Mind" not in text
    assert "training is 2.00 times as fast" in screen
    assert "same seed, same losses: stock yes (" in screen and ", ls yes (" in screen
    page = (out / "report.html").read_text()
    assert "2.00 times as fast" in page and page.count("<svg") == 5


def test_every_figure_of_speed_follows_from_the_ratio_on_the_same_batch(report, out):
    """The medians of the steps are of different batches, and their ratio is not the median of the ratios."""
    for kind in ("stock", "ls"):
        for index in (1, 2):
            record = out / "runs" / f"{kind}-{index}" / "record.jsonl"
            record.unlink()
            # ls is 1.5 times as fast on two batches of three, and 5 times on the third, which is stock's slowest and ls's fastest.
            speeds = {"stock": (0.5, 1.0, 1.5), "ls": (2.5, 1.5, 2.25)}[kind]
            write_record(record, kind, [update(n, speeds[n % 3]) for n in range(1, 41)])
    told = report.collect(out)
    stock, ls = (figures.medians(told.comparison.runs[kind]) for kind in report.KINDS)
    ratio = told.comparison.gains["ls"].ratio
    assert ratio == pytest.approx(1.5) and abs(stock.step_ms / ls.step_ms - ratio) > 0.1  # what used to be shown
    text, screen = text_of(report, out)
    content = json.loads((out / "report.json").read_text())
    of = content["contenders"]
    assert of["stock"]["step_ms"] == stock.step_ms
    assert of["stock"]["step_ms"] / of["ls"]["step_ms"] == pytest.approx(ratio)
    assert of["ls"]["tokens_per_s"] / of["stock"]["tokens_per_s"] == pytest.approx(ratio)
    steps = f"a step took {stock.step_ms / ratio:,.1f} ms with ls_plugin and {stock.step_ms:,.1f} ms with stock fairseq"
    assert "training is **1.50 times as fast**" in text and steps in text and steps in screen
    assert f"| ms per step | {stock.step_ms:,.1f} | {stock.step_ms / ratio:,.1f} | 1.50x |" in text
    assert text.count("| 1.50x |") >= 2  # tokens/s, too


def test_no_speed_up_is_claimed_where_losses_differ(report, out):
    for index in (1, 2):
        record = out / "runs" / f"ls-{index}" / "record.jsonl"
        record.unlink()
        write_record(record, "ls", [update(n, 2.0, loss=14 - 0.05 * n) for n in range(1, 41)])
    text, screen = text_of(report, out)
    assert not report.collect(out).comparison.alike
    assert "**no speed-up is claimed**, since losses part by +16.99%" in text
    assert "the two do not train alike: training losses, bits per token: 10.450 with stock, 12.225 with ls" in screen
    assert "times as fast" not in text and "2.00x" not in text


def test_a_busy_machine_is_told(report, out):
    record = out / "runs" / "ls-2" / "record.jsonl"
    record.unlink()
    write_record(record, "ls", [update(n, 1.5) for n in range(1, 41)])
    text, _ = text_of(report, out)
    assert "**Mind**: the runs of ls differ by 33.3 % in speed: something else used the machine" in text
    assert report.collect(out).comparison.alike


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_broken_loss_is_never_comparable(report, out, loss):
    for index in (1, 2):
        record = out / "runs" / f"ls-{index}" / "record.jsonl"
        record.unlink()
        write_record(record, "ls", [update(n, 2.0, loss=loss) for n in range(1, 41)])
    text, _ = text_of(report, out)
    assert not report.collect(out).comparison.alike and "no speed-up is claimed" in text


@pytest.mark.parametrize("loss", [float("nan"), 0.0])
def test_a_broken_loss_of_stock_leaves_a_report(out, report, loss):
    """Nothing is as fast as stock that trains as it does; the figures are shown all the same."""
    for index in (1, 2):
        record = out / "runs" / f"stock-{index}" / "record.jsonl"
        record.unlink()
        write_record(record, "stock", [update(n, loss=loss) for n in range(1, 41)])
    comparison = report.collect(out).comparison
    content = comparison.to_json()
    assert not comparison.alike and content["best_stock"] == "stock" and content["over_stock"]["ls"]["ratio"] is None


def test_losses_are_told_of_the_updates_that_both_have(out):
    """An interrupted run beside a whole one: not the early losses of one against the late ones of the other."""
    stock = read_run(out / "runs" / "stock-1" / "record.jsonl")
    ls = read_run(out / "runs" / "ls-1" / "record.jsonl")
    del ls.updates[20:]
    comparison = Comparison({"stock": [stock], "ls": [ls]})
    told = dict(lead(comparison).lines)
    assert "12.200 with stock, 12.200 with ls; they differ by +0.00%" in told["Quality"]
    assert "of the first 20 updates" in told["Compared"] and comparison.to_json()["cut_to_updates"] == 20


def test_a_partial_report_compares_the_same_updates(out):
    """Not the medians of some batches with those of others, nor early losses with late ones; a baseline that has fewer stands beside none."""
    stock = read_run(out / "runs" / "stock-1" / "record.jsonl")
    ls, short = (read_run(out / "runs" / "ls-1" / "record.jsonl") for _ in range(2))
    for late in stock.updates[24:]:
        late["step_ms"], late["peak_rss_mib"] = 9999.0, 9999.0
    stock.valid = [(12, 5.0), (36, 1.0)]
    del ls.updates[24:], short.updates[16:]
    comparison = Comparison({"stock": [stock, stock], "stock+compile": [short], "ls": [ls]})
    assert list(comparison.medians) == ["stock", "ls"]
    of_stock, of_ls = comparison.medians["stock"], comparison.medians["ls"]
    assert of_stock.updates == of_ls.updates and of_stock.step_ms == 152.0 and of_stock.peak_rss_mib < 9999
    assert of_stock.final_loss == of_ls.final_loss and of_stock.valid_loss == 5.0
    why = comparison.why_not["stock+compile"]
    assert (
        why.startswith("it came to 16 updates, stock and ls to more; ")
        and "x (" in why
        and "over stock on these" in why
    )
    assert any("stock+compile was not measured: it came to 16" in line for line in screen(comparison))
    # Complete runs are left as they are, and nothing is said of it.
    whole = Comparison({"stock": [stock], "ls": [stock]})
    assert whole.cut_to == 0 and "Compared" not in dict(lead(whole).lines)


def test_a_slower_ls_is_no_good_news(out):
    runs = {kind: [read_run(out / "runs" / f"{kind}-1" / "record.jsonl")] for kind in ("stock", "ls")}
    assert lead(Comparison(runs)).good
    assert not lead(Comparison({"stock": runs["ls"], "ls": runs["stock"]})).good


def test_a_run_that_does_not_repeat_is_told(report, out):
    record = out / "runs" / "ls-2" / "record.jsonl"
    record.unlink()
    write_record(record, "ls", [update(n, 2.0, loss=14 - 0.1 * n + 1e-7 * (n == 7)) for n in range(1, 41)])
    assert ", ls NO (" in text_of(report, out)[1]


def test_warm_up_is_left_out(report, out):
    run = report.read_run(out / "runs" / "stock-1" / "record.jsonl")
    for slow in run.updates[: report.WARMUP_UPDATES]:
        slow["step_ms"] = 9999.0
    assert figures.medians([run]).step_ms == 152.0


def test_speed_is_taken_from_updates_without_a_stop_watch_inside(report, out):
    run = report.read_run(out / "runs" / "stock-1" / "record.jsonl")
    for split in run.split:
        split["step_ms"] = 9999.0
    medians = figures.medians([run])
    assert medians.step_ms == 152.0 and round(medians.tokens_per_s) == 5921 and medians.phase_ms["clip"] == 10.0


def test_runs_without_timed_updates_are_refused(report, out):
    for kind in ("stock", "ls"):
        for index in (1, 2):
            record = out / "runs" / f"{kind}-{index}" / "record.jsonl"
            record.unlink()
            write_record(record, kind, [update(n) for n in range(1, 12)])
    with pytest.raises(report.RecordError, match=r"12 updates or more to be timed, .* got 11"):
        report.collect(out)


def test_a_killed_run_is_continued_without_doing_updates_twice(report, tmp_path):
    record = tmp_path / "record.jsonl"
    write_record(record, "ls", [update(n) for n in range(41, 61)], end=False)
    with record.open("a") as file:
        file.write('{"update": 61, "time_')  # the kill came while this line was written
    run = report.read_run(record)
    assert [u["update"] for u in run.updates] == list(range(41, 61)) and not run.finished

    record.unlink()
    write_record(record, "ls", [update(n) for n in range(41, 61)], end=False)
    write_record(record, "ls", [update(n) for n in range(51, 71)])
    run = report.read_run(record)
    assert [u["update"] for u in run.updates] == list(range(41, 71)) and run.finished
    times = [u["time_s"] for u in run.updates]
    assert times == sorted(times)


def test_a_damaged_record_is_named_with_its_line(report, tmp_path):
    record = tmp_path / "record.jsonl"
    write_record(record, "ls", [update(1)])
    record.write_text("garbage\n" + record.read_text())
    with pytest.raises(report.RecordError, match=r"line 1: expected a line of .*timed_train\.py, got 'garbage'"):
        report.read_run(record)
    with pytest.raises(report.RecordError, match="must be a record"):
        report.read_run(tmp_path / "none.jsonl")


def test_runs_of_different_length_are_not_compared(report, out):
    record = out / "runs" / "ls-2" / "record.jsonl"
    record.unlink()
    write_record(record, "ls", [update(n) for n in range(1, 31)])
    with pytest.raises(report.RecordError, match="same number of updates in every run"):
        report.collect(out)


def test_report_files_and_the_closing_screen(report, out):
    write_record(out / "runs" / "ls-train" / "record.jsonl", "ls", [update(n, 2.0) for n in range(41, 141)])
    count = 30
    translation = report.Translation(
        sources=["And God"] * count, references=["God"] * count, hypotheses=["God"] * (count - 1) + [""],
        bleu="BLEU = 1.00", bleu_score=1.0, chrf_score=12.0, unchanged_bleu_score=60.0, seconds=30.0,
    )  # fmt: skip
    (out / "translation.json").write_text(json.dumps(vars(translation)))
    told = report.collect(out)
    report.write(told)
    assert (out / "quickstart.png").read_bytes().startswith(b"\x89PNG")
    text = (out / "report.md").read_text()
    assert "2.00x" in text and "BLEU = 1.00" in text and text.count("- kjv: ") == 5
    screen = report.summary(told).splitlines()
    assert len(screen) <= 24
    assert any("100 updates to 140" in line for line in screen)


def test_an_interrupted_quickstart_reports_what_it_has(report, out):
    for index in (1, 2):
        (out / "runs" / f"ls-{index}" / "record.jsonl").unlink()
    told = report.collect(out)
    told.interrupted = "(a) stock and ls in turn"
    report.write(told)
    assert told.comparison is None
    assert "run.sh --continue" in report.summary(told)


def test_a_run_that_was_stopped_gracefully_is_not_compared(report, out):
    """timed_train.py writes its end after Ctrl-C too."""
    record = out / "runs" / "ls-2" / "record.jsonl"
    record.unlink()
    write_record(record, "ls", [update(n, 2.0) for n in range(1, 20)], interrupted=True)
    told = report.collect(out)
    assert [len(told.comparison.runs[kind]) for kind in report.KINDS] == [1, 1]


def test_hypotheses_come_back_in_the_splits_order(run_module):
    text = "S-1\tx\nD-1\t-0.5\tsecond\nH-0\t-1\tx\nD-0\t-0.25\tfirst\n"
    assert run_module.read_hypotheses(text, 2) == ["first", "second"]
    with pytest.raises(run_module.RecipeError, match="got 2 of 3; missing: \\[2\\]"):
        run_module.read_hypotheses(text, 3)
