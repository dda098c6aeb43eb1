"""From raw text to fairseq's binary format, for all recipes: cleaning, sentencepiece, filters."""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from common.errors import RecipeError

BATCH_LINES = 10_000
MIN_PIECES, MAX_PIECES, MAX_RATIO = 1, 250, 1.5  # of a training pair, as fairseq's example scripts for WMT14 have them
SENTENCEPIECE_SENTENCES = 5_000_000  # drawn at random from a larger text: more cost memory, and change few pieces

# What a corpus from the web has between its letters: controls, soft hyphens, zero widths, marks of direction, byte order.
_INVISIBLE = re.compile(
    "[\u0000-\u0008\u000e-\u001f\u007f-\u0084\u0086-\u009f\u00ad\u200b-\u200f\u202a-\u202e\u2060\ufeff\ufffe\uffff]"
)


def read_lines(path: Path) -> Iterator[str]:
    """Lines end at a line feed and nowhere else: corpora hold carriage returns and Unicode's separators within a line."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            yield line.rstrip("\n")


def clean(line: str) -> str:
    """Without invisible characters, with single spaces."""
    return " ".join(_INVISIBLE.sub("", line).split())


def count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def train_sentencepiece(
    texts: list[Path], model: Path, vocabulary: int, *, kind: str, coverage: float, threads: int
) -> None:
    """Learns the pieces of all texts together.

    Args:
        kind: "unigram" or "bpe".
        threads: sums are taken per thread, so that their number can change the pieces of "unigram".

    Raises:
        RecipeError: the text is too small for so many pieces.
    """
    import sentencepiece

    large = sum(map(count_lines, texts)) > SENTENCEPIECE_SENTENCES
    sampled = {"input_sentence_size": SENTENCEPIECE_SENTENCES, "shuffle_input_sentence": True} if large else {}
    try:
        sentencepiece.SentencePieceTrainer.train(
            input=[str(text) for text in texts],
            model_prefix=str(model.with_suffix("")),
            vocab_size=vocabulary,
            model_type=kind,
            character_coverage=coverage,
            **sampled,
            num_threads=threads,
            minloglevel=2,
        )
    except RuntimeError as error:
        if "ocabulary size" not in str(error):
            raise
        raise RecipeError(
            f"the text is too small for {vocabulary:,} sentencepiece pieces; take fewer ({error})"
        ) from error


class Pieces:
    """Encodes text with a sentencepiece model."""

    def __init__(self, model: Path):
        import sentencepiece

        self.processor = sentencepiece.SentencePieceProcessor(model_file=str(model))

    def encode(self, lines: list[str]) -> list[list[str]]:
        return self.processor.encode(lines, out_type=str)

    def encode_file(self, text: Path, pieces: Path) -> int:
        """Line by line; returns the number of pieces."""
        n_pieces, lines = 0, read_lines(text)
        with pieces.open("w", encoding="utf-8") as file:
            while batch := list(islice(lines, BATCH_LINES)):
                encoded = self.encode(batch)
                file.writelines(" ".join(line) + "\n" for line in encoded)
                n_pieces += sum(map(len, encoded))
        return n_pieces

    def encode_pairs(self, text: tuple[Path, Path], pieces: tuple[Path, Path], keeps, show) -> tuple[int, int]:
        """Training pairs, those that ``keeps(source pieces, target pieces)``; returns how many were kept and dropped."""
        total, done, kept = count_lines(text[0]), 0, 0
        pairs = zip(*map(read_lines, text), strict=True)
        with pieces[0].open("w", encoding="utf-8") as source_file, pieces[1].open("w", encoding="utf-8") as target_file:
            while batch := list(islice(pairs, BATCH_LINES)):
                for source, target in zip(*(self.encode(list(side)) for side in zip(*batch, strict=True)), strict=True):
                    if keeps(len(source), len(target)):
                        source_file.write(" ".join(source) + "\n")
                        target_file.write(" ".join(target) + "\n")
                        kept += 1
                done += len(batch)
                show(done / total, f"{done:,} of {total:,} pairs")
        return kept, done - kept

    def write_dictionary(self, path: Path) -> None:
        """The pieces as a fairseq dictionary.

        It comes from the model and not, as fairseq-preprocess would have it, from the training text: there, each character too
        rare to be a piece would still get an entry of its own.
        """
        sp = self.processor
        names = [sp.id_to_piece(i) for i in range(sp.get_piece_size()) if not (sp.is_control(i) or sp.is_unknown(i))]
        path.write_text("".join(f"{name} 1\n" for name in names), encoding="utf-8")


def fits(source: int, target: int) -> bool:
    """Whether a training pair with so many pieces is kept."""
    short, long = sorted((source, target))
    return short >= MIN_PIECES and long <= MAX_PIECES and long <= MAX_RATIO * short
