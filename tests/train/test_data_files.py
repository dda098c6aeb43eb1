"""Data that is cut off, mixed up or written with another dictionary: the file is named when it is opened."""

import os
import shutil

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, data_utils, indexed_dataset

from ls_plugin import data_files
from ls_plugin.errors import DataError

FORMATS = ("mmap", "cached", "lazy")
SENTENCES = [[4, 5, 2], [6, 2], [7, 5, 4, 6, 2], [2]]
N_ENTRIES = 8


@pytest.fixture
def dictionary():
    made = Dictionary()
    for word in "abcd":
        made.add_symbol(word)
    return made


def write(path, impl, sentences=SENTENCES):
    builder = indexed_dataset.make_builder(f"{path}.bin", impl, vocab_size=N_ENTRIES)
    for sentence in sentences:
        builder.add_item(torch.tensor(sentence, dtype=torch.int32))
    builder.finalize(f"{path}.idx")
    return str(path)


def refusal(path, dictionary, impl=None):
    with pytest.raises(DataError) as caught:
        data_utils.load_indexed_dataset(path, dictionary, impl)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("impl", FORMATS)
def test_whole_data_is_read_as_before(tmp_path, dictionary, impl):
    path = write(tmp_path / "train", impl)
    for given in (impl, None):
        dataset = data_utils.load_indexed_dataset(path, dictionary, given)
        if dataset.supports_prefetch:
            dataset.prefetch(range(len(SENTENCES)))
        assert [dataset[i].tolist() for i in range(len(dataset))] == SENTENCES
    assert data_utils.load_indexed_dataset(str(tmp_path / "other"), dictionary, impl) is None


@pytest.mark.parametrize("impl", FORMATS)
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("left", ["nothing", "half", "all but one byte", "all but one number"])
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # of fairseq's __del__
def test_a_file_that_is_cut_off_is_named(tmp_path, dictionary, impl, suffix, left):
    path = write(tmp_path / "train", impl)
    n_bytes = os.path.getsize(path + suffix)
    kept = {"nothing": 0, "half": n_bytes // 2, "all but one byte": n_bytes - 1, "all but one number": n_bytes - 8}[
        left
    ]
    os.truncate(path + suffix, kept)
    message = refusal(path, dictionary, impl)
    assert message.startswith(f"data {path}{suffix}: ")
    assert "copy it again, or write it again with fairseq-preprocess" in message


@pytest.mark.parametrize("impl", FORMATS)
def test_an_index_of_other_tokens_is_named(tmp_path, dictionary, impl):
    path, other = write(tmp_path / "train", impl), write(tmp_path / "valid", impl, SENTENCES[:2])
    shutil.copy(f"{other}.idx", f"{path}.idx")
    assert "belongs to another index" in refusal(path, dictionary, impl)


def test_the_format_of_the_flag_and_of_the_files(tmp_path, dictionary):
    path = write(tmp_path / "train", "mmap")
    message = refusal(path, dictionary, "cached")
    assert message.startswith(f"data {path}.idx: ") and "drop --dataset-impl" in message


@pytest.mark.parametrize("impl", FORMATS)
@pytest.mark.parametrize(("sentence", "id_"), [([4, N_ENTRIES, 2], N_ENTRIES), ([65, 2], 65)])
def test_tokens_that_the_dictionary_does_not_have(tmp_path, dictionary, impl, sentence, id_):
    path = write(tmp_path / "train", impl, [*SENTENCES, sentence])
    message = refusal(path, dictionary, impl)
    assert message.startswith(f"data {path}.bin: token ids must lie in [0, {N_ENTRIES})")
    assert f"got {id_};" in message and "another dictionary" in message
    assert len(data_utils.load_indexed_dataset(path, None, impl)) == len(SENTENCES) + 1  # alignments have no dictionary


def test_all_tokens_are_looked_at(tmp_path, dictionary, monkeypatch):
    monkeypatch.setattr(data_files, "_CHUNK", 3)
    assert "got 11;" in refusal(write(tmp_path / "train", "mmap", [*SENTENCES, [11]]), dictionary)


def test_negative_lengths(tmp_path, dictionary):
    path = write(tmp_path / "train", "mmap")
    index = np.fromfile(f"{path}.idx", dtype=np.uint8)
    index[26:30].view(np.int32)[:] = -3
    index.tofile(f"{path}.idx")
    assert "negative" in refusal(path, dictionary)


def test_raw_text(tmp_path, dictionary):
    (tmp_path / "train").write_bytes(b"")
    assert f"data {tmp_path / 'train'}: must hold sentences" in refusal(str(tmp_path / "train"), dictionary, "raw")
    (tmp_path / "train").write_bytes(b"a b\n\xff\xfe\n")
    assert f"data {tmp_path / 'train'}: must be UTF-8" in refusal(str(tmp_path / "train"), dictionary, "raw")


def test_further_folders_are_looked_at_before_the_epoch_that_opens_them(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder, impl in zip(folders, ("mmap", "mmap", "cached"), strict=True):
        folder.mkdir()
        write(folder / "train.de-en.de", impl)
    data = os.pathsep.join(map(str, folders))
    data_files.check_further_folders(data, "train")
    for folder in folders[1:]:
        path = folder / "train.de-en.de.bin"
        whole = path.read_bytes()
        path.write_bytes(whole[:-2])
        with pytest.raises(DataError, match="is cut off") as caught:
            data_files.check_further_folders(data, "train")
        assert str(path) in str(caught.value)
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("a 1\nb 2\na 3\n", "row 3: each word must stand there once, got 'a' twice"),
        ("a 1\n<pad> 2\n", "row 2: each word must stand there once, got '<pad>' twice"),
        ("a 1\nb\nc 1\n", 'row 2: each row must be a word, a blank and its count, got "b'),
        ("a 1\nb 1.5\n", 'row 2: each row must be a word, a blank and its count, got "b'),
        ("a 1\n\nb 1\n", "row 2: each row must be a word, a blank and its count"),
    ],
)
def test_rows_of_a_dictionary(tmp_path, rows, told):
    (tmp_path / "dict.de.txt").write_text(rows)
    with pytest.raises(DataError) as caught:
        Dictionary.load(str(tmp_path / "dict.de.txt"))
    assert str(caught.value).startswith(f"dictionary {tmp_path / 'dict.de.txt'}: {told}")


def test_dictionaries_that_fairseq_reads(tmp_path):
    (tmp_path / "dict.txt").write_text("a 1\nb -2\na 3 #fairseq:overwrite\n")
    assert len(Dictionary.load(str(tmp_path / "dict.txt"))) == 7
    with pytest.raises(FileNotFoundError):
        Dictionary.load(str(tmp_path / "no.txt"))
