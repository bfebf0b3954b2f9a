"""Tables, data sets and indexed files: what is read, what is refused and how."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrace.base.errors import ConfigError, DataError
from terrace.data import text as text_module
from terrace.data.config import DataConfig
from terrace.data.corpus import read_documents, read_pieces
from terrace.data.token_file import TokenFile
from terrace.data.tokenizer import ByteTokenizer
from terrace.data.tokens import prepare_tokens
from tests.support.indexed import indexed

TEXTS = ["one", "", "zwei ä", "three\nlines"]


def parquet(path: Path, **columns: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


def arrow(path: Path, texts: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"text": list(texts), "id": list(range(len(texts)))})
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=2)


def saved(folder: Path, *shards: Sequence[str]) -> Path:
    """A folder as `save_to_disk` writes it."""
    names = [f"data-{index:05}-of-{len(shards):05}.arrow" for index in range(len(shards))]
    for name, texts in zip(names, shards, strict=True):
        arrow(folder / name, texts)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_every_form_of_a_corpus_makes_the_same_tokens(tmp_path: Path) -> None:
    parquet(tmp_path / "p" / "a.parquet", text=TEXTS, id=[1, 2, 3, 4])
    saved(tmp_path / "saved", TEXTS[:1], TEXTS[1:])
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    digests = set()
    for source in ("p", "p/a.parquet", "saved", "a.jsonl"):
        assert list(read_documents(tmp_path / source)) == [text for text in TEXTS if text], source
        made = prepare_tokens(tmp_path / source, ByteTokenizer(), tmp_path / "cache")
        assert made.num_documents == 3
        digests.add(made.digest)
    assert len(digests) == 1


def test_another_column_is_another_corpus(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", text=["a"], body=["b"])
    assert list(read_documents(file, "body")) == ["b"]
    made = [prepare_tokens(file, ByteTokenizer(), tmp_path / "cache", column) for column in ("text", "body")]
    assert made[0].digest != made[1].digest


def test_splits_of_data_sets(tmp_path: Path) -> None:
    for split in ("train", "test"):
        saved(tmp_path / "saved" / split, [split])
        parquet(tmp_path / "hub" / "data" / f"{split}-00000-of-00001.parquet", text=[split])
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for source in ("saved", "hub"):
        folder = tmp_path / source
        assert list(read_documents(folder)) == ["train"]
        assert list(read_documents(folder, split="test")) == ["test"]
        with pytest.raises(DataError, match=r"has the splits .*, not 'tset'.*did you mean 'test'"):
            list(read_documents(folder, split="tset"))
    with pytest.raises(DataError, match=r"data.split = 'test' has no effect"):
        list(read_documents(tmp_path / "saved" / "train", split="test"))


def test_what_is_wrong_with_a_table_is_named(tmp_path: Path) -> None:
    def refused(path: Path, message: str) -> None:
        with pytest.raises(DataError, match=message) as error:
            prepare_tokens(path, ByteTokenizer(), tmp_path / "cache")
        assert "\n" not in str(error.value)
        assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())

    refused(
        parquet(tmp_path / "a.parquet", body=["x"]), r"a.parquet has no key 'text' \(keys: 'body'\); .*--data.column"
    )
    refused(parquet(tmp_path / "b.parquet", text=[1]), "column 'text' is of type int64, not string")
    refused(
        parquet(tmp_path / "c.parquet", text=["x", "y", None]), "c.parquet row 2: 'text' must be a string, not null"
    )
    whole = parquet(tmp_path / "d.parquet", text=["x" * 100]).read_bytes()
    (tmp_path / "d.parquet").write_bytes(whole[:-20])
    refused(tmp_path / "d.parquet", "d.parquet is damaged or cannot be read")
    arrow(tmp_path / "e.arrow", TEXTS)
    (tmp_path / "e.arrow").write_bytes((tmp_path / "e.arrow").read_bytes()[:-8])
    refused(tmp_path / "e.arrow", "e.arrow is damaged or no Arrow file: its end is missing")
    folder = saved(tmp_path / "f", TEXTS)
    next(folder.glob("*.arrow")).unlink()
    refused(folder, r"state.json names data-00000-of-00001.arrow, which is missing")


def test_a_line_that_is_too_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "MAX_LINE_BYTES", 1_000_000)
    long = json.dumps({"text": "x" * 1_000_000})
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + long + "\n")
    with pytest.raises(DataError, match=r"a.jsonl:2 is longer than 1 MB"):
        list(read_documents(tmp_path / "a.jsonl"))


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=30), min_size=1, max_size=12), st.integers(1, 60))
def test_where_a_file_is_cut_changes_no_document(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], unit_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    lines = folder / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, "end"]))
    (folder / "b.txt").write_bytes("".join([*texts, "end"]).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("terrace.data.corpus.UNIT_BYTES", unit_bytes)
        assert list(read_documents(lines)) == [text for text in [*texts, "end"] if text]
        whole = "".join([*texts, "end"]).removeprefix("\ufeff")
        assert list(read_documents(folder / "b.txt")) == [whole]
        assert sum(piece.ends_document for piece in read_pieces(folder / "b.txt")) == 1


@pytest.mark.parametrize("dtype", ["<u1", "<i2", "<u2", "<i4", "<i8"])
def test_indexed_files_are_used_as_they_are(tmp_path: Path, dtype: str) -> None:
    prefix = indexed(tmp_path / "data", [[1, 2, 3], [4], [5, 6], []], [0, 2, 3, 3, 4], dtype)
    opened: list[TokenFile] = [
        prepare_tokens(prefix.with_name(name), ByteTokenizer(), tmp_path / "cache")
        for name in ("data", "data.bin", "data.idx")
    ]
    made = opened[0]
    assert all(each == made for each in opened)
    assert made.path == prefix.with_suffix(".bin")
    assert made.open().tolist() == [1, 2, 3, 4, 5, 6]
    assert made.open_starts().tolist() == [0, 4]  # the others are empty
    assert (made.max_token, made.num_documents) == (6, 2)
    before = made.digest
    indexed(tmp_path / "data", [[1, 2, 3], [4], [5, 7]], [0, 2, 3], dtype)
    assert prepare_tokens(prefix, ByteTokenizer(), tmp_path / "cache").digest != before


def test_what_is_wrong_with_indexed_files_is_named(tmp_path: Path) -> None:
    def refused(message: str, index: bytes | None = None, ids: bytes | None = None) -> None:
        prefix = indexed(tmp_path / "data", [[1, 2, 3], [4]], [0, 1, 2])
        if index is not None:
            prefix.with_suffix(".idx").write_bytes(index)
        if ids is not None:
            prefix.with_suffix(".bin").write_bytes(ids)
        with pytest.raises(DataError, match=message) as error:
            prepare_tokens(prefix, ByteTokenizer(), tmp_path / "cache")
        assert "\n" not in str(error.value)

    good = indexed(tmp_path / "data", [[1, 2, 3], [4]], [0, 1, 2]).with_suffix(".idx").read_bytes()
    refused("does not begin with MMIDIDX", b"TNTIDX\x00\x00" + good[8:])
    refused("has version 2, and only version 1", good[:9] + struct.pack("<Q", 2) + good[17:])
    refused("has dtype code 7", good[:17] + b"\x07" + good[18:])
    refused("is damaged .* take 82 bytes, and it has 78", good[:-4])
    refused("modes of sequences, as of images", good + b"\x00\x00")
    refused("the 4 tokens of data.idx take 8; the two do not belong together", ids=b"\x00" * 10)
    refused("its sequences do not follow one another", good[:34] + struct.pack("<i", 2) + good[38:])
    refused("its documents do not cover its sequences", good[:-8] + struct.pack("<q", 1))
    tmp_path.joinpath("data.bin").unlink()
    with pytest.raises(DataError, match=r"cannot read data .*data.bin: No such file"):
        prepare_tokens(tmp_path / "data.idx", ByteTokenizer(), tmp_path / "cache")


def test_a_column_or_a_split_without_effect_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"data.column = 'body' has no effect"):
        list(read_documents(tmp_path / "a.txt", "body"))
    prefix = indexed(tmp_path / "data", [[1, 2]], [0, 1])
    for column, split in (("body", ""), ("text", "test")):
        with pytest.raises(DataError, match="has no effect on the indexed data set"):
            prepare_tokens(prefix, ByteTokenizer(), tmp_path / "cache", column, split)
    with pytest.raises(ConfigError, match="has no effect on 'chats', whose format is"):
        DataConfig(path="chats", format="chat", column="body")
