"""Faults of fairseq itself: each through fairseq's own functions or the real command, with the right value beside it."""

import argparse
import itertools
import re
import shlex
import shutil

import fairseq_cli.generate
import fairseq_cli.interactive
import fairseq_cli.train
import numpy as np
import pytest
import sentencepiece
import torch
from fairseq import checkpoint_utils, options, tasks
from fairseq.data import Dictionary, data_utils
from fairseq.dataclass import utils as dataclass_utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.bart import BARTModel
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.translation import TranslationTask
from fairseq.tasks.translation_from_pretrained_bart import TranslationFromPretrainedBARTTask
from fairseq_cli import preprocess
from fairseq_cli.train import should_stop_early
from omegaconf import OmegaConf

from ls_plugin import criterions, faults
from ls_plugin.errors import UnsupportedError

stock_batch_by_size = data_utils.batch_by_size.__wrapped__


def test_installing_again_changes_nothing():
    before = (data_utils.batch_by_size, NGramRepeatBlock._no_repeat_ngram)
    faults.install()
    assert (data_utils.batch_by_size, NGramRepeatBlock._no_repeat_ngram) == before


# --- batches

LENGTHS = np.sort(np.random.default_rng(5).integers(1, 40, 1003))
LIMITS = {
    "sentences and tokens": {"max_sentences": 24, "max_tokens": 400},
    "sentences": {"max_sentences": 5},
    "tokens": {"max_tokens": 300},
    "no limit": {},
}


def batches(n, batch_by_size=data_utils.batch_by_size, vector=True, **flags):
    lengths = LENGTHS[:n]
    return batch_by_size(
        np.arange(n), lambda index: LENGTHS[index], num_tokens_vec=lengths if vector else None, **flags
    )


@pytest.mark.parametrize("vector", [True, False])
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("multiple", [1, 2, 8])
def test_every_sentence_is_in_a_batch(limits, multiple, vector):
    for n in [*range(1, 60), 104, 105, 1000, 1003]:
        ours = batches(n, vector=vector, required_batch_size_multiple=multiple, **limits)
        stock = batches(n, stock_batch_by_size, vector, required_batch_size_multiple=multiple, **limits)
        assert np.array_equal(np.concatenate(ours), np.arange(n))
        assert len(ours) - len(stock) in (0, 1)
        assert all(np.array_equal(a, b) for a, b in zip(ours, stock, strict=False))  # the others are stock's
        for batch in ours:
            assert len(batch) < multiple or len(batch) % multiple == 0
            assert len(batch) <= limits.get("max_sentences", n)
            assert len(batch) * LENGTHS[batch].max() <= limits.get("max_tokens", n * LENGTHS.max())


def test_the_sizes_of_the_last_batches():
    def sizes(n, **flags):
        return list(map(len, batches(n, required_batch_size_multiple=8, **flags)))

    assert sizes(21) == [16, 5]
    assert sizes(105) == [104, 1]
    assert sizes(5) == [5]
    assert sizes(16) == [16]
    assert sizes(0) == []
    assert list(map(len, data_utils.batch_by_size(iter(range(21)), lambda i: 3, required_batch_size_multiple=8))) == [
        16,
        5,
    ]


def test_batches_of_fixed_shapes_are_those_of_stock():
    flags = {"fixed_shapes": [[8, 10], [4, 20], [2, 40]], "required_batch_size_multiple": 8}
    ours, stock = batches(203, **flags), batches(203, stock_batch_by_size, **flags)
    assert ours == stock
    assert sum(map(len, ours)) == 203


@pytest.mark.parametrize("flags", [[], ["--num-batch-buckets", "3"]], ids=["", "buckets"])
def test_an_epoch_and_a_validation_have_every_sentence(make_trainer, flags):
    """fairseq's default: any number below 8, or a multiple of it."""
    trainer = make_trainer("ours", "--required-batch-size-multiple", "8", *flags)
    trainer.task.load_dataset("valid")
    validation = trainer.get_valid_iterator("valid").next_epoch_itr(shuffle=False)
    for batches, n_sentences in ((trainer.batches, 600), (validation, 40)):
        ids = torch.cat([batch["id"] for batch in batches])
        assert ids.sort()[0].tolist() == list(range(n_sentences))


# --- n-grams


def banned(tokens, size, padding=3):
    """Tokens that may not come next, for each row."""
    tokens = torch.tensor(tokens)
    written = tokens.size(1)
    buffer = torch.cat([tokens, torch.full((len(tokens), padding), 1)], dim=1)
    lprobs = torch.zeros(len(tokens), 12)
    result = NGramRepeatBlock(size)(buffer, lprobs, 1, len(tokens), written - 1)
    assert result is lprobs  # fairseq writes in place
    return [row.isinf().nonzero().flatten().tolist() for row in result]


def test_the_token_that_would_repeat_an_n_gram_is_banned():
    assert banned([[2, 5, 6, 5, 6]], 3) == [[5]]  # stock bans 6
    assert banned([[2, 5, 6, 5, 6]], 2) == [[5]]
    assert banned([[2, 5, 6, 7, 5], [2, 5, 5, 5, 5]], 2) == [[6], [5]]
    assert banned([[2, 5, 6, 5, 7, 5]], 2) == [[6, 7]]
    assert banned([[2, 5, 6, 5, 6]], 1) == [[5, 6]]  # and not 2, by which the sentence could not end
    assert banned([[2, 5, 6]], 4) == [[]]
    assert banned([[2]], 1) == [[]]
    assert banned([[2]], 2) == [[]]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("scripted", [False, True])
def test_no_output_repeats_an_n_gram(make_trainer, size, scripted):
    """Stock's generator over a model that has learned nothing, and so repeats itself."""
    trainer = make_trainer("stock")
    model, dictionary = trainer.model.eval(), trainer.task.target_dictionary

    def repeats(n):
        generator = SequenceGenerator([model], dictionary, beam_size=3, max_len_b=15, min_len=9, no_repeat_ngram_size=n)
        generator = torch.jit.script(generator) if scripted else generator
        found = 0
        for hypothesis in itertools.chain.from_iterable(
            generator.forward({"net_input": trainer.batches[0]["net_input"]})
        ):
            tokens = hypothesis["tokens"].tolist()[:-1]
            ngrams = list(zip(*(tokens[i:] for i in range(size)), strict=False))
            found += len(ngrams) - len(set(ngrams))
        return found

    if not scripted:
        assert repeats(0) > 0
    assert repeats(size) == 0


# --- Hydra


def test_a_configuration_takes_the_place_of_the_one_that_it_extends():
    """As in the second job of a sweep with criterion=cross_entropy criterion._name=ls_cross_entropy, when Hydra knows stock's alone."""
    ours = criterions.cross_entropy.CrossEntropyCriterionConfig
    stock = ours.__mro__[2]
    parent = OmegaConf.create(
        {"optimization": {"sentence_avg": True}, "criterion": stock(), "other": OmegaConf.structured(stock)}
    )
    parent.criterion._name = "ls_cross_entropy"
    merged = dataclass_utils.merge_with_parent(ours, parent.criterion)
    assert OmegaConf.get_type(merged) is ours
    assert (merged._name, merged.sentence_avg, str(merged.fused_projection)) == ("ls_cross_entropy", True, "auto")
    assert OmegaConf.get_type(dataclass_utils.merge_with_parent(stock, parent.other)) is stock


def test_a_trainer_remembers_nothing_of_the_run_before(make_trainer):
    checkpoint_utils.save_checkpoint.best = 1.5
    should_stop_early.best, should_stop_early.num_runs = 1.5, 3
    make_trainer("ours")
    for function in (checkpoint_utils.save_checkpoint, should_stop_early):
        assert not hasattr(function, "best") and not hasattr(function, "num_runs")


# --- tasks


def load(task_flags, split="train"):
    """A task and one of its datasets, from the flags of fairseq-train."""
    args = options.parse_args_and_arch(options.get_training_parser(), [str(flag) for flag in task_flags])
    task = tasks.setup_task(convert_namespace_to_omegaconf(args).task)
    task.load_dataset(split)
    return task, task.dataset(split)


@pytest.fixture(scope="module")
def pieces(commands, tmp_path_factory):
    """The English text in pieces of words: (binary data, sentencepiece's model)."""
    folder = tmp_path_factory.mktemp("pieces")
    text, model = commands.data.parent / "train.en", folder / "pieces.model"
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "pieces"), vocab_size=44, model_type="bpe", minloglevel=2
    )
    encode = sentencepiece.SentencePieceProcessor(model_file=str(model)).encode
    lines = (" ".join(encode(line, out_type=str)) for line in text.read_text().splitlines())
    (folder / "train.en").write_text("\n".join(lines) + "\n")
    flags = ["--only-source", "--trainpref", str(folder / "train.en"), "--destdir", str(folder / "bin")]
    preprocess.main(options.get_preprocessing_parser().parse_args(flags))
    return folder / "bin", model


MASKED = shlex.split("--task masked_lm --arch roberta_base --criterion masked_lm --tokens-per-sample 64")
MASKED += shlex.split("--mask-whole-words --mask-prob 0.4 --leave-unmasked-prob 0 --random-token-prob 0 --cpu")
DENOISING = shlex.split("--task denoising --arch bart_base --criterion cross_entropy --tokens-per-sample 64 --mask 0.4")
DENOISING += shlex.split("--mask-length word --replace-length 1 --cpu")


def test_whole_words_are_masked(pieces):
    task, dataset = load([pieces[0], *MASKED, "--bpe", "sentencepiece", "--sentencepiece-model", pieces[1]])
    n_masked_words = n_longer = 0
    for i in range(100):
        source, target = dataset[i]["net_input.src_tokens"], dataset[i]["target"]
        masked = source.eq(task.mask_idx)
        tokens = torch.where(masked, target, source)[1:-1]
        words = []  # for each, whether its pieces are masked
        for token, is_masked in zip(tokens.tolist(), masked[1:-1].tolist(), strict=True):
            if task.source_dictionary[token].startswith("\u2581") or not words or token < 4:
                words.append([])
            words[-1].append(is_masked)
        assert all(all(word) or not any(word) for word in words)
        n_masked_words += sum(map(all, words))
        n_longer += sum(len(word) > 1 and all(word) for word in words)
    assert n_masked_words > n_longer > 20


def test_denoising_gets_the_flags_of_bpe(pieces):
    """fairseq hands its task the name "sentencepiece" alone: "file ??? not found"."""
    task, dataset = load([pieces[0], *DENOISING, "--bpe", "sentencepiece", "--sentencepiece-model", pieces[1]])
    starts = dataset.mask_whole_word
    inside = {symbol for symbol, i in task.dictionary.indices.items() if not starts[i]}
    assert inside - {"<mask>"} == {symbol for symbol in task.dictionary.indices if re.fullmatch("[a-z]+", symbol)}
    assert 0 < starts.sum() < len(starts)
    assert load([pieces[0], *DENOISING])[1].mask_whole_word is None


@pytest.mark.parametrize("flags", [MASKED, DENOISING], ids=["masked_lm", "denoising"])
def test_pieces_that_show_no_word_are_refused(pieces, tmp_path, flags):
    (tmp_path / "codes").write_text("#version: 0.2\na b\n")
    with pytest.raises(UnsupportedError, match=r"--bpe byte_bpe: unsupported with --mask-whole-words"):
        load([pieces[0], *flags, "--bpe", "byte_bpe", "--sentencepiece-model-path", pieces[1]])


def test_a_task_has_its_arguments_under_both_names():
    args = argparse.Namespace(langs="de,en", left_pad_source=True, left_pad_target=False)
    for cls in (TranslationFromPretrainedBARTTask, TranslationTask):
        task = cls(args, Dictionary(), Dictionary())
        assert task.args is task.cfg is args


# --- generation


@pytest.fixture(scope="module")
def raw_text(commands, tmp_path_factory):
    """The test split as raw text, with words that the dictionary does not know, pieces of longer ones among them."""
    folder = tmp_path_factory.mktemp("raw")
    for language in ("de", "en"):
        shutil.copy(commands.data / f"dict.{language}.txt", folder)
        lines = (commands.data.parent / f"test.{language}").read_text().splitlines()
        endings = itertools.cycle(["chen", "@@"])
        lines = [" ".join(word + next(endings) for word in line.split()) for line in lines]
        (folder / f"test.de-en.{language}").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def generate(trained, raw_text, capsys):
    """fairseq-generate in this process, or fairseq-interactive on some lines: its output by kind of line and number of sentence."""

    faults.install_interactive()

    def run(*flags, lines=None, beam=2):
        checkpoint = trained["ours"][0] / "checkpoint_last.pt"
        # The penalty makes a model that knows all words write unknown ones.
        flags = [raw_text, "--path", checkpoint, "--beam", beam, "--max-len-b", 12, "--unkpen", -4, "--cpu", *flags]
        if lines is None:
            parser, main = options.get_generation_parser(), fairseq_cli.generate.main
            flags += ["--dataset-impl", "raw", "-s", "de", "-t", "en"]
        else:
            parser, main = options.get_interactive_generation_parser(), fairseq_cli.interactive.main
            (checkpoint.parent / "lines").write_text(lines)
            flags += ["--input", checkpoint.parent / "lines", "-s", "de", "-t", "en"]
        capsys.readouterr()
        main(options.parse_args_and_arch(parser, [str(flag) for flag in flags]))
        found: dict = {}
        for line in capsys.readouterr().out.splitlines():
            if re.match(r"[A-Z]-\d+\t", line):
                kind, number = line.split("\t")[0].split("-")
                found.setdefault(kind, {})[int(number)] = line.split("\t")[-1]
        return found

    return run


def expected_words(hypothesis, source, alignment, dictionary=None):
    pairs = dict(reversed(list(map(int, pair.split("-")))) for pair in alignment.split())
    source = source.split()
    words = (source[pairs[i]] if word == "<unk>" else word for i, word in enumerate(hypothesis.split()))
    return " ".join((dictionary or {}).get(word, word) for word in words)


def test_unknown_words_are_replaced(generate, raw_text, tmp_path):
    """Each by the word of the source that it attends to most, as --print-alignment has it; which is a word that no dictionary knows, too."""
    sources = dict(enumerate((raw_text / "test.de-en.de").read_text().splitlines()))
    plain = generate("--print-alignment")
    assert sum(text.split().count("<unk>") for text in plain["H"].values()) > 20
    expected = {i: expected_words(plain["H"][i], sources[i], plain["A"][i]) for i in sources}
    assert sum(text.count("chen") for text in expected.values()) > 5
    assert generate("--replace-unk")["H"] == expected
    both = generate("--replace-unk", "--print-alignment")
    assert (both["H"], both["A"]) == (expected, plain["A"])
    soft = generate("--replace-unk", "--print-alignment", "soft")["H"]
    assert (
        sum(soft[i] == expected[i] for i in expected) >= len(expected) - 2
    )  # where two weights are equal to six digits
    (tmp_path / "words").write_text("der the\nhundchen puppy\n")
    translated = generate("--replace-unk", tmp_path / "words")["H"]
    words = {"der": "the", "hundchen": "puppy"}
    assert translated == {i: expected_words(plain["H"][i], sources[i], plain["A"][i], words) for i in sources}


def test_pieces_are_merged_after_unknown_ones_are_replaced(generate, raw_text):
    sources = dict(enumerate((raw_text / "test.de-en.de").read_text().splitlines()))
    plain = generate("--print-alignment")
    merged = generate("--replace-unk", "--post-process")["H"]
    expected = {i: expected_words(plain["H"][i], sources[i], plain["A"][i]) for i in sources}
    assert merged == {i: (text + " ").replace("@@ ", "").rstrip() for i, text in expected.items()}
    assert any("@@ " in text for text in expected.values())


def test_unknown_words_of_lines_are_replaced(generate):
    """fairseq-interactive shows an unknown word of the source as <unk>, and would copy that."""
    lines = "der hundchen liebt hundchen\nhundchen\nder wald\n"
    flags = ["--buffer-size", 3, "--batch-size", 3]
    plain = generate("--print-alignment", *flags, lines=lines)
    expected = {i: expected_words(plain["H"][i], line, plain["A"][i]) for i, line in enumerate(lines.splitlines())}
    replaced = generate("--replace-unk", *flags, lines=lines)["H"]
    assert replaced == expected
    assert any("hundchen" in text for text in replaced.values())
    with pytest.raises(UnsupportedError, match="--print-alignment soft"):
        generate("--print-alignment", "soft", lines=lines)


def test_constraints(generate):
    """In the output where lines have them; refused where nothing is read."""
    found = generate("--constraints", lines="der hund\tcat\ttree\n")["H"]
    assert re.search(r"cat.*tree", found[0])
    with pytest.raises(UnsupportedError, match="--constraints: must come with constraints, got none"):
        generate("--constraints")


# --- sentences for BART


@pytest.fixture(scope="module")
def sentences(commands, tmp_path_factory):
    """Whether a sentence has the word house: one part, and with its translation two."""
    folder = tmp_path_factory.mktemp("sentences")
    for split in ("train", "valid"):
        lines = (commands.data.parent / f"{split}.en").read_text().splitlines()
        (folder / f"{split}.label").write_text("\n".join("yes" if "house" in line else "no" for line in lines) + "\n")
    corpus = commands.data.parent
    parts = (("input0", corpus, "en"), ("input1", corpus, "de"), ("label", folder, "label"))
    for name, source, suffix in parts:
        flags = ["--only-source", *(f"--{split}pref={source / split}.{suffix}" for split in ("train", "valid"))]
        preprocess.main(options.get_preprocessing_parser().parse_args([*flags, "--destdir", str(folder / name)]))
    shutil.copytree(folder, folder / "one", ignore=shutil.ignore_patterns("one", "input1"))
    return folder


@pytest.mark.parametrize(
    "parts, method, arch",
    [("one", "truncate", "ls_bart_base"), (".", "random_crop", "ls_bart_base"), (".", "truncate", "bart_base")],
)
def test_bart_classifies_sentences_that_were_cut(sentences, tmp_path, parts, method, arch):
    flags = shlex.split(
        f"--task sentence_prediction --num-classes 2 --arch {arch} --criterion sentence_prediction --optimizer adam --lr 1e-3 "
        "--encoder-embed-dim 32 --encoder-ffn-embed-dim 32 --encoder-layers 1 --decoder-layers 1 --encoder-attention-heads 2 "
        "--decoder-attention-heads 2 --batch-size 8 --max-update 3 --cpu --no-save --num-workers 0 --add-prev-output-tokens "
        f"--max-positions 6 --max-source-positions 6 --max-target-positions 6 --shorten-method {method} --no-progress-bar"
    )
    flags = [str(sentences / parts), *flags, "--save-dir", str(tmp_path)]
    args = options.parse_args_and_arch(options.get_training_parser(), flags)
    fairseq_cli.train.main(convert_namespace_to_omegaconf(args))
    task, dataset = load(flags)
    assert all(dataset[i]["net_input.src_tokens"][-1] == task.dictionary.eos() for i in range(100))
    assert max(len(dataset[i]["net_input.src_tokens"]) for i in range(100)) == 6
    batch = dataset.collater([dataset[i] for i in range(8)])["net_input"]
    assert batch["prev_output_tokens"][:, 0].eq(task.dictionary.eos()).all()


def test_bart_reads_the_features_of_the_last_end(commands):
    """As fairseq does where all sentences have the same number of ends."""
    dictionary = Dictionary()
    for i in range(20):
        dictionary.add_symbol(f"word{i}")
    args = argparse.Namespace(encoder_layers=1, decoder_layers=1, encoder_embed_dim=32, encoder_attention_heads=2)
    args.decoder_attention_heads, args.max_source_positions, args.max_target_positions = 2, 9, 9
    ARCH_CONFIG_REGISTRY["bart_base"](args)
    task = argparse.Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    model = BARTModel.build_model(args, task).eval()
    model.register_classification_head("head", 2)
    tokens = torch.tensor([[0, 5, 2, 7, 2, 1], [0, 5, 2, 7, 8, 2]])
    ours, _ = model(tokens, None, tokens, classification_head_name="head")
    features, _ = model(tokens, None, tokens, features_only=True)
    stock = features[tokens.eq(2), :].view(2, -1, 32)[:, -1, :]
    torch.testing.assert_close(ours, model.classification_heads["head"](stock))
    unequal, _ = model(
        torch.tensor([[0, 5, 6, 7, 2, 1], [0, 5, 2, 7, 8, 2]]), None, tokens, classification_head_name="head"
    )
    assert torch.equal(unequal[1], ours[1])
