"""The end-to-end benchmark: real commands on a little real text; floors, medians and refusals on made-up figures."""

import importlib
import json
import re
import sys

import pytest

from ls_plugin import _library
from ls_plugin.report import figures, records, timed_train
from tests.recipes.conftest import QUICKSTART, ROOT
from tests.recipes.test_report import update, write_record

pytestmark = pytest.mark.skipif(not _library.status().loaded, reason=f"no compiled library: {_library.status().reason}")
NEIGHBOURS = (
    "training",
    "training_floor",
    "training_pictures",
    "training_runs",
    "training_scaling",
    "trainings",
    "prepare",
)


@pytest.fixture(scope="module")
def training():
    """training.py, with the neighbours that it imports by their bare names, without the silence that it wants for itself."""
    patch = pytest.MonkeyPatch()
    patch.setattr("logging.disable", lambda level: None)
    for folder in (QUICKSTART, ROOT / "recipes" / "benchmarks"):
        patch.syspath_prepend(str(folder))
    yield importlib.import_module("training")
    patch.undo()
    for name in NEIGHBOURS:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def small_work(training, tmp_path_factory):
    """Data of 400 training verses and 1,600 pieces, where the benchmark looks for its 8,000."""
    data, work = training.runs.prepare, tmp_path_factory.mktemp("work")
    books = data.read_verses("ja")
    kept = {book: books[book][:8] for book in data.VALID_BOOKS + data.TEST_BOOKS} | {"Genesis": books["Genesis"][:400]}
    learn, patch = data.train_sentencepiece, pytest.MonkeyPatch()
    patch.setattr(data, "read_verses", lambda source: kept)
    patch.setattr(
        data, "train_sentencepiece", lambda text, model, source, _: learn(text, model, source, vocabulary=1600)
    )
    data.prepare(work / "data-8000", lambda _: None, source="ja")
    patch.undo()
    return work


@pytest.mark.slow
@pytest.mark.parametrize("row_name, baselines", [("tiny", "medium+fused_adam"), ("tinyLM", "")])
def test_from_the_real_commands_to_the_table(training, small_work, tmp_path, capsys, monkeypatch, row_name, baselines):
    monkeypatch.setattr(training.floor, "PRODUCT_SIZE", 256)
    monkeypatch.setitem(training.op_timing.COPY_BYTES, "cpu", 8 << 20)
    out = tmp_path / "training.json"
    flags = ["--rows", row_name, "--precisions", "fp32", "--baselines", baselines, "--rounds", "1", "--threads", "1"]
    assert training.main([*flags, "--work", str(small_work), "--out", str(out)]) == 0
    screen = capsys.readouterr().out
    part = json.loads(out.read_text())["rows"]
    assert part["fma_gflop_per_s"] > 1  # a compiler is there: the kernels are
    assert part["machine"]["threads"] == 1 and list(part["results"]) == [row_name]
    row = part["results"][row_name]
    assert row["why_not"] == {}
    assert list(row["contenders"]) == ["stock", "ls fp32", *([f"stock+{baselines}"] if baselines else [])]
    for measured in row["contenders"].values():
        assert measured["updates"] == 3 and len(measured["losses"]) == 6
        assert measured["step_ms"] > measured["floor_ms"]["all"] > 0 and measured["over_floor"] > 1
        assert all(measured["phase_ms"][phase] > 0 for phase in ("forward", "backward", "clip", "update"))
        assert 100 < measured["peak_rss_mib"] < 4000
    gain = row["speedup"]["ls fp32"]["over_stock"]
    assert gain["ratio"] > 0 and abs(gain["loss_difference"]) < 0.02 and gain["why_not"] == ""
    assert f"{row_name} fp32: " in screen and "over stock" in screen and f"{row_name}: 1" in screen
    assert out.with_suffix(".png").stat().st_size > 1000


def test_floors_by_hand(training):
    floor = training.floor
    # 2 sentences of 3 source and 4 target places, 5 of these no padding; C 2, F 8, V 10
    model, batch = floor.Model(1, 1, c=2, f=8, v=10), {"source": [2, 3], "target": [2, 4], "tokens": 5}
    encoder = 6 * (2 * 4 * 4 + 2 * 2 * 16) + 2 * (2 * 2 * 3 * 3 * 2)  # projections and feed-forward; scores and context
    self_attention = 8 * (2 * 4 * 4 + 2 * 2 * 16) + 2 * (
        2 * 2 * (4 * 5 / 2) * 2
    )  # half of causal scores, the diagonal whole
    cross = 8 * (2 * 2 * 4) + 6 * (2 * 2 * 4) + 2 * (2 * 2 * 4 * 3 * 2)  # q and out, k and v
    assert floor.product_flops(model, batch) == 3 * (encoder + self_attention + cross + 2 * 5 * 2 * 10)
    alone = {"target": [2, 4], "tokens": 5}
    assert floor.product_flops(floor.Model(0, 1, 2, 8, 10), alone) == 3 * (self_attention + 2 * 5 * 2 * 10)

    moved = floor.moved_bytes(model, batch, n_params=100, precision="fp32")
    assert moved["update"] == 100 * (4 + 4 + 4 + 4 + 16)  # norm; gradient, weight in and out, moments in and out
    assert moved["residual"] == 4 * 9 * 2 * (6 * 3 + 8 * 4)  # with each stack's last norm
    assert moved["activation"] == 4 * 5 * 8 * (6 + 8)
    assert moved["attention"] == 4 * 12 * 2 * (6 + 8 + (6 + 8) / 2)
    assert moved["loss"] == 4 * 2 * 5 * 10
    assert floor.moved_bytes(model, batch, 100, "bf16")["loss"] == moved["loss"] / 2

    rates = floor.Rates({"fp32": 1e-6, "bf16": 2e-6}, gb_per_s=1e-6)
    once = floor.floor_ms(model, [batch], 100, "fp32", rates)
    assert once["products"] == floor.product_flops(model, batch) and once["bytes"] == sum(moved.values())
    assert once["all"] == once["products"] + once["bytes"]
    twice = floor.floor_ms(model, [batch, batch], 100, "fp32", rates)  # two batches, one update
    assert twice["bytes"] == 2 * once["bytes"] - moved["update"]


def test_the_fastest_route_sets_the_rate(training):
    slow_bf16 = {"torch.mm fp32": 140.0, "oneDNN fp32": 120.0, "torch.mm bf16": 3.0}
    assert training.floor.rates_of(slow_bf16, 20.0).gflop_per_s == {"fp32": 140.0, "bf16": 140.0}
    fast_bf16 = {"torch.mm fp32": 200.0, "oneDNN fp32": 400.0, "oneDNN bf16": 800.0}
    assert training.floor.rates_of(fast_bf16, 20.0).gflop_per_s == {"fp32": 400.0, "bf16": 800.0}


def made_up(training, folder, kind, speed=1.0, loss=None, slow=(), batches=None):
    """A record of 13 updates at this speed, but ten times as slow at some."""
    entries = [update(n, speed / (10 if n in slow else 1), loss) for n in range(1, 14)]
    for entry in entries:
        entry["phase_ms"] = {phase: entry["step_ms"] / 5 for phase in records.PHASES}
        entry["batches"] = batches or [{"source": [8, 100], "target": [9, 100], "tokens": 900}]
    write_record(folder / "record.jsonl", kind, entries)
    return records.read_run(folder / "record.jsonl", training.runs.WARM_UP_UPDATES)


def test_medians_of_what_is_timed(training, tmp_path):
    stock = [made_up(training, tmp_path / "1", "stock", slow=(1, 2, 3, 5)), made_up(training, tmp_path / "2", "stock")]
    ours = [made_up(training, tmp_path / "3", "ls", speed=2.0, slow=(1, 2, 3, 7))]
    assert figures.medians(stock[:1]).step_ms == 152.0 and figures.medians(stock[:1]).updates == 10
    assert figures.step_ms(stock)[1] == pytest.approx((1520 + 152) / 2) and figures.step_ms(stock)[2] == 152.0
    slower = made_up(training, tmp_path / "4", "stock", speed=0.8)
    assert figures.medians(stock).run_spread == 0 and figures.medians([*stock, slower]).run_spread == pytest.approx(
        0.25
    )
    gain = figures.speedup(stock, ours)
    assert gain.ratio == pytest.approx(2.0) and gain.why_not == ""
    assert (
        figures.best({"stock": stock, "stock+medium": ours, "stock+compile": stock, "ls fp32": ours}) == "stock+medium"
    )


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"loss": 14.0}, r"losses part by \+\d\.\d\d%, tolerance 2%"),
        ({"loss": float("nan")}, "losses part by"),
        ({"batches": [{"source": [8, 90], "target": [9, 100], "tokens": 900}]}, "they had other batches"),
    ],
)
def test_no_speed_up_is_claimed_of_another_training(training, tmp_path, changes, reason):
    stock = made_up(training, tmp_path / "stock", "stock")
    ours = made_up(training, tmp_path / "ls", "ls", speed=2.0, **changes)
    gain = figures.speedup([stock], [ours])
    assert gain.ratio is None
    assert re.match(reason, gain.why_not)
    table = training.Table(training.floor.Rates({"fp32": 100.0, "bf16": 100.0}, 10.0))
    for contender, run in (("stock", stock), ("ls", ours)):
        table.add(training.runs.ROWS["S"], training.runs.Contender(contender), run)
    (line,) = training.verdicts(table.results())
    assert line == f"S fp32: no speed-up is claimed: {gain.why_not}"
    # A variant of stock that trains otherwise is not the best of stock, however fast.
    assert figures.best({"stock": [stock], "stock+compile": [ours]}) == "stock"


def test_contenders_take_turns(training):
    a, b, c = training.runs.STOCK, training.runs.Contender("ls"), training.runs.Contender("stock", "medium")
    turns = [(index, contender.name) for index, contender in training.order([a, b, c], 2)]
    assert turns == [(1, "stock"), (1, "ls fp32"), (1, "stock+medium"), (2, "ls fp32"), (2, "stock")]


def test_compile_is_not_tried_where_a_smaller_row_gained_nothing(training, tmp_path):
    rows, compiled = training.runs.ROWS, training.runs.Contender("stock", "compile")
    table = training.Table(training.floor.Rates({"fp32": 100.0, "bf16": 100.0}, 10.0))
    assert table.why_not_compile(rows["S"]) == ""
    table.add(rows["S"], training.runs.STOCK, made_up(training, tmp_path / "1", "stock"))
    table.add(rows["S"], compiled, made_up(training, tmp_path / "2", "stock", speed=0.8))
    assert table.why_not_compile(rows["B"]) == "not tried: on S 0.80x as fast as stock"
    assert table.why_not_compile(rows["S256"]) == table.why_not_compile(rows["LM"]) == ""  # smaller; another task
    table.runs["S"][compiled.name] = [made_up(training, tmp_path / "3", "stock", speed=1.25)]
    assert table.why_not_compile(rows["B"]) == ""
    del table.runs["S"][compiled.name]
    table.refuse(rows["S"], compiled, "torch.compile: 0 updates in 240 s")
    assert table.why_not_compile(rows["B"]) == "not tried: on S torch.compile: 0 updates in 240 s"


def test_compile_takes_layers_and_loss(training, monkeypatch):
    from fairseq.criterions.cross_entropy import CrossEntropyCriterion
    from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
    from fairseq.tasks.fairseq_task import FairseqTask
    from torch import nn

    model = nn.Module()
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    for layer in model.decoder.layers:
        layer._incremental_state_id = str(id(layer))
    monkeypatch.setattr(FairseqTask, "build_model", lambda task: model)
    before = {}
    for criterion in (CrossEntropyCriterion, LabelSmoothedCrossEntropyCriterion):
        before[criterion] = criterion.compute_loss
        monkeypatch.setattr(criterion, "compute_loss", criterion.compute_loss)  # and back
    timed_train.compiled()
    assert all(layer._compiled_call_impl is not None for layer in FairseqTask.build_model(None).decoder.layers)
    assert len({layer._incremental_state_id for layer in model.decoder.layers}) == 1
    assert all(criterion.compute_loss is not loss for criterion, loss in before.items())


def test_an_interrupt_leaves_what_was_measured(training, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training.floor, "PRODUCT_SIZE", 64)
    monkeypatch.setitem(training.op_timing.COPY_BYTES, "cpu", 1 << 20)
    done = [made_up(training, tmp_path, "stock")]

    def run(*_):
        if not done:
            raise KeyboardInterrupt
        return done.pop()

    monkeypatch.setattr(training.runs.Runner, "run", run)
    monkeypatch.setattr(training.runs.Runner, "data", lambda *_: tmp_path)
    out = tmp_path / "t.json"
    out.write_text('{"inference": {"results": {}}}')
    flags = ["--rows", "S", "--threads", "1", "--work", str(tmp_path / "work"), "--out", str(out)]
    assert training.main(flags) == 130
    content = json.loads(out.read_text())
    assert list(content["rows"]["results"]["S"]["contenders"]) == ["stock"] and "inference" in content
    screen = capsys.readouterr().out
    assert "interrupted" in screen and "S: 3+3 layers" in screen and out.with_suffix(".png").exists()


def test_what_the_rows_train(training, tmp_path):
    runner = training.runs.Runner(tmp_path, threads=2, seed=5)
    runner.made = {(8000, False): tmp_path / "bin", (32_000, True): tmp_path / "english"}
    rows, Contender = training.runs.ROWS, training.runs.Contender
    stock, ours = (
        runner.command(rows["S"], contender, tmp_path / "r", 9)
        for contender in (Contender("stock", "medium+fused_adam"), Contender("ls", precision="bf16"))
    )
    assert stock[stock.index("--stock-with") + 1] == "medium+fused_adam" and "--bf16" in ours
    for command in (stock, ours):
        for flag, value in (("--clip-norm", "1.0"), ("--seed", "5"), ("--max-tokens", "1024"), ("--max-update", "9")):
            assert command[command.index(flag) + 1] == value
        for name in ("dropout", "attention-dropout", "activation-dropout"):
            assert command[command.index(f"--{name}") + 1] == "0.1"
    lm = runner.command(rows["LM"], Contender("ls"), tmp_path / "r", 9)
    assert {"ls_transformer_lm", "ls_cross_entropy", "language_modeling", str(tmp_path / "english")} <= set(lm)


def test_a_failed_run_says_why_and_the_others_go_on(training, small_work, tmp_path, monkeypatch, capsys):
    runner = training.runs.Runner(small_work, threads=1)
    monkeypatch.setattr(runner, "command", lambda *_: [sys.executable, "-c", "raise SystemExit('no such luck')"])
    args = training.parse_arguments(["--rows", "tiny", "--baselines", "", "--rounds", "1"])
    rates = training.floor.Rates({"fp32": 100.0, "bf16": 100.0}, 10.0)
    training.measure_table(args, runner, rates, lambda **_: pytest.fail("nothing has run"))
    screen = capsys.readouterr().out
    assert screen.count("ended with status 1; the end of") == 3 and "| no such luck" in screen


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--precisions", "fp8"], "unknown precision fp8; choose from fp32, bf16"),
        (["--baselines", "medium+apex"], "unknown baseline apex; choose from medium, fused_adam, compile"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--updates", "1"], "--updates must be at least 2, got 1"),
        (["--out", "nowhere/t.json"], "there is no folder nowhere"),
    ],
)
def test_refuses_what_it_cannot_do(training, capsys, flags, words):
    with pytest.raises(SystemExit) as stopped:
        training.parse_arguments(flags)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_growth_is_compared_at_every_step(training, tmp_path):
    scaling = training.scaling
    along = scaling.rows()["tokens per batch"]
    assert [row.max_tokens for row in along] == [256, 512, 1024, 2048, 4096, 8192] and along[2].name == "S"

    def measured(step_ms_of_ls):
        """Stock takes 152 ms a step at the first size and adds 152 at each; memory is equal."""
        return {
            row.name: {
                "stock": [made_up(training, tmp_path / f"s{i}-{id(step_ms_of_ls)}", "stock", speed=1 / (i + 1))],
                "ls fp32": [made_up(training, tmp_path / f"l{i}-{id(step_ms_of_ls)}", "ls", speed=152 / ms)],
            }
            for i, (row, ms) in enumerate(zip(along, step_ms_of_ls, strict=False))
        }

    curves = scaling.curves(measured([100, 200, 300]))
    assert [point["size"] for point in curves["tokens per batch"]] == [256, 512, 1024]
    assert [point["size"] for point in curves["vocabulary"]] == [8000]  # S again
    steps = scaling.growth(curves)
    assert len(steps) == 4 and "no worse than stock's at any of the 4 steps" in scaling.verdict(steps)[0]
    first, *lines = scaling.verdict(scaling.growth(scaling.curves(measured([100, 200, 353]))))
    assert "WORSE than stock's at 1 of 4 steps" in first
    assert lines == ["  time, tokens per batch 512 to 1,024: ls adds 153 ms, stock 152"]
    training.pictures.draw_scaling(curves, "here", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_inference_is_compared_by_batch(training):
    Inference = training.runs.Inference
    stock = [Inference([100.0, 300.0], [["H-0", "a b"], ["H-1", "c"]]), Inference([120.0, 900.0], [])]
    ours = [Inference([50.0, 100.0], [["H-0", "a b"], ["H-1", "d"]]), Inference([50.0, 130.0], [])]
    (result,) = training.inference_results(
        {"generate": {"stock": stock, "ls": ours}, "validate": {"stock": stock, "ls": []}}
    ).values()
    assert result["seconds"] == pytest.approx({"stock": 0.110 + 0.600, "ls": 0.050 + 0.115})
    assert result["speedup"] == pytest.approx(0.710 / 0.165) and (result["differing"], result["results"]) == (1, 2)
