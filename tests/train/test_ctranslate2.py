"""What ctranslate2's own fairseq converter makes of a checkpoint of ours translates as fairseq-generate does, token for token."""

import io
import json
import math
import shlex
from pathlib import Path

import pytest
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import generate

PLUGIN = Path(__file__).resolve().parents[2] / "ls_plugin"
MAX_LENGTH = 30  # and no minimal one: to keep the end from coming first, ctranslate2 takes it out before the softmax, fairseq after
# In a process of its own, which has one OpenMP runtime: prints, for each beam size, hypotheses and their mean log-probabilities.
TRANSLATE = """
import json
import sys

import ctranslate2

translator = ctranslate2.Translator(sys.argv[1], device="cpu", compute_type="float32", inter_threads=1, intra_threads=1)
sentences = [line.split() for line in open(sys.argv[2])]
for beam in map(int, sys.argv[4:]):
    lengths = {"min_decoding_length": 0, "max_decoding_length": int(sys.argv[3])}
    results = translator.translate_batch(sentences, beam_size=beam, return_scores=True, **lengths)
    print("RESULTS", json.dumps([(" ".join(r.hypotheses[0]), r.scores[0]) for r in results]))
"""


@pytest.fixture(scope="module")
def checkpoint(commands, training_flags, tmp_path_factory) -> Path:
    """Enough updates that translations differ from sentence to sentence."""
    folder = tmp_path_factory.mktemp("to_convert")
    flags = [*training_flags["ours"], *shlex.split("--encoder-normalize-before --decoder-normalize-before")]
    flags += ["--max-update", 60, "--save-interval-updates", 0, "--save-dir", folder]
    commands.run("ls_plugin.cli.train", commands.data, *flags)
    return folder / "checkpoint_last.pt"


def generated(commands, checkpoint, beam: int) -> list[tuple[str, float]]:
    """Hypotheses of fairseq-generate and their mean log-probabilities, in the sentences' order."""
    flags = [
        commands.data,
        "--path",
        checkpoint,
        "--beam",
        beam,
        "--max-len-b",
        MAX_LENGTH,
        "--cpu",
        "--no-progress-bar",
    ]
    flags += ["--required-batch-size-multiple", 1, "--min-len", 0]
    args = options.parse_args_and_arch(options.get_generation_parser(), list(map(str, flags)))
    output = io.StringIO()
    generate._main(convert_namespace_to_omegaconf(args), output)
    lines = (line[2:].split("\t") for line in output.getvalue().splitlines() if line.startswith("H-"))
    return [(tokens, float(log2) * math.log(2)) for _, log2, tokens in sorted(lines, key=lambda fields: int(fields[0]))]


def test_translations_equal_those_of_generate(commands, checkpoint, tmp_path):
    converted = tmp_path / "converted"
    flags = ["--model_path", checkpoint, "--data_dir", commands.data, "--source_lang", "de", "--target_lang", "en"]
    # The plugin makes the classes in a checkpoint known to torch, whose protection stays on.
    commands.run("ctranslate2.converters.fairseq", *flags, "--user_dir", PLUGIN, "--output_dir", converted)

    (commands.data.parent / "translate.py").write_text(TRANSLATE)  # where the commands run
    log = commands.run("translate", converted, commands.data.parent / "test.de", MAX_LENGTH, 1, 4)
    translated = [json.loads(line.split(" ", 1)[1]) for line in log.splitlines() if line.startswith("RESULTS")]
    for beam, results in zip((1, 4), translated, strict=True):
        expected = generated(commands, checkpoint, beam)
        assert len({tokens for tokens, _ in expected}) > 10
        assert [tokens for tokens, _ in results] == [tokens for tokens, _ in expected], f"beam {beam}"
        # What reaches the limit, ctranslate2 scores without an end.
        scores = [(r[1], e[1]) for r, e in zip(results, expected, strict=True) if len(e[0].split()) < MAX_LENGTH]
        assert len(scores) > 10
        assert [score for score, _ in scores] == pytest.approx([score for _, score in scores], abs=1e-4)
