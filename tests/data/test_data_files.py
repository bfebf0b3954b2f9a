"""Tokenizers, and the text of files: what is read, what is refused and how."""

import errno
import json
import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrace.base.errors import DataError
from terrace.base.extras import install
from terrace.data import pieces as pieces_module
from terrace.data import text as text_module
from terrace.data.corpus import read_documents, read_pieces
from terrace.data.files import find_documents
from terrace.data.tokenizer import ByteTokenizer, load_tokenizer
from terrace.data.tokens import prepare_tokens
from tests.support.folders import tree


def one_line(error: pytest.ExceptionInfo[DataError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids.tolist()) == text


def test_bytes_decode_what_a_model_may_say() -> None:
    assert ByteTokenizer().decode([104, 0xC3, 256, 105, 999]) == "h\ufffdi"


def test_load_tokenizer_bytes_and_missing(tmp_path: Path) -> None:
    assert load_tokenizer("bytes").vocab_size == 257
    with pytest.raises(DataError, match=r"cannot read tokenizer .*gpt9: No such file") as error:
        load_tokenizer(tmp_path / "gpt9")
    one_line(error)
    with pytest.raises(DataError, match=r"tokenizer\.json: No such file"):
        load_tokenizer(tmp_path)


def test_load_tokenizer_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=re.escape(install("jinja2"))):
        load_tokenizer(tmp_path)


def test_load_tokenizer_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "hello": 1, "world": 2, "</s>": 9}  # ids with a hole
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["</s>"])
    made.enable_truncation(2)
    made.enable_padding(length=8)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.text_tokens.end) == (10, 9)
    # Neither cut off nor padded, and the special token in the text stays text.
    assert tokenizer.encode("hello world hello </s>").tolist()[:3] == [1, 2, 1]
    assert 9 not in tokenizer.encode("hello </s>world").tolist()
    assert tokenizer.decode([1, 2, 9]) == "hello world"
    assert tokenizer.fingerprint == load_tokenizer(tmp_path / "tokenizer.json").fingerprint
    (tmp_path / "tokenizer.json").write_text('{"broken": true}')
    with pytest.raises(DataError, match=r"is not a tokenizer\.json") as error:
        load_tokenizer(tmp_path)
    one_line(error)


def test_folder_is_read_in_order_without_hidden_or_unknown_files(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "b.txt": "grüße, 世界 🌍\r\n".encode(),
            "a/z.md": b"\xef\xbb\xbfmarked",
            "a/empty.txt": b"",
            "a.txt": b"one",
            ".git/x.txt": b"hidden",
            ".hidden.txt": b"hidden",
            "logo.png": b"\x89PNG",
        },
    )
    os.symlink(root, root / "a" / "loop")
    assert [file.relative_to(root).as_posix() for file in find_documents(root)] == [
        "a.txt",
        "a/z.md",
        "b.txt",
    ]
    assert list(read_documents(root)) == ["one", "marked", "grüße, 世界 🌍\r\n"]
    assert list(read_documents(str(root / "b.txt"))) == ["grüße, 世界 🌍\r\n"]
    lines = b'{"text": "one\\u2028"}\n\n{"text": "", "id": 3}\r\n{"text": "two", "n": 1}'
    assert list(read_documents(tree(tmp_path / "l", {"a.jsonl": lines}))) == ["one\u2028", "two"]


def test_stdlib_is_always_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = [len(document) for document in read_documents("stdlib")]
    assert sum(sizes) > 1_000_000
    files = find_documents("stdlib")
    assert not any({"test", "tests", "site-packages"} & set(file.parts) for file in files)
    tree(tmp_path, {"stdlib/a.txt": b"mine"})
    monkeypatch.chdir(tmp_path)
    assert list(read_documents("./stdlib")) == ["mine"]


@pytest.mark.parametrize("text", ["line of ä text\n" * 40, "x" * 333, "ä 世" * 100, "a" + " " * 200])
def test_large_documents_are_cut_without_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(pieces_module, "PIECE_CHARACTERS", 50)
    monkeypatch.setattr(pieces_module, "LINE_PIECE_CHARACTERS", 20)
    monkeypatch.setattr(text_module, "_BLOCK_BYTES", 7)  # cuts characters in two
    tree(tmp_path, {"a.txt": text.encode(), "b.jsonl": json.dumps({"text": text}).encode()})
    names = ("a.txt", "b.jsonl")
    assert [whole for name in names for whole in read_documents(tmp_path / name)] == [text, text]
    pieces = [piece for name in names for piece in read_pieces(tmp_path / name)]
    assert max(len(piece.text) for piece in pieces) <= 50
    assert sum(piece.ends_document for piece in pieces) == 2
    half = len(pieces) // 2  # from a text file or from JSON, the cuts are the same
    assert pieces[:half] == pieces[half:]


BAD_DATA: list[tuple[dict[str, bytes], str, str]] = [
    ({}, "gone.txt", r"gone.txt does not exist; give a file of text"),
    ({"a.txt": b""}, "a.txt", r"a.txt is empty \(0 bytes\); give a file"),
    ({"d/.hidden.txt": b"x"}, "d", r"folder .*d holds no file of a known suffix \(.*\.txt.*\)"),
    ({"d/a.txt": b""}, "d", r"folder .*d holds only empty files"),
    ({"a.txt": b" \n\t"}, "a.txt", r"a.txt holds no text"),
    ({"a.jsonl": b'{"text": ""}\n'}, "a.jsonl", r"a.jsonl holds no text"),
    (
        {"d/a.txt": b"good", "d/b.txt": b"caf\xe9!"},
        "d",
        r"b.txt is not UTF-8: byte 0xe9 at offset 3.*iconv",
    ),
    ({"a.txt": b"caf\xc3"}, "a.txt", r"byte 0xc3 at offset 3"),
    ({"a.jsonl": b'{"text": "a"}\n{"text": "\xff"}'}, "a.jsonl", r"a.jsonl line 2 is not UTF-8: .* at offset 24"),
    ({"a.jsonl": b'{"text": "a"}\n{"text": '}, "a.jsonl", r"a.jsonl:2 is not valid JSON"),
    ({"a.jsonl": b"[" * 100_000}, "a.jsonl", r"a.jsonl: record 1 is not valid JSON"),
    ({"a.jsonl": b'{"text": "a"}\n["text"]'}, "a.jsonl", r"a.jsonl:2 is a list; each line must be an object"),
    ({"a.jsonl": b"{}" + b"[" * 100_000}, "a.jsonl", r"a.jsonl:1 is not valid JSON"),
    (
        {"a.jsonl": b'{"content": "a", "id": 1}'},
        "a.jsonl",
        r"a.jsonl:1 has no key 'text' \(keys: 'content'",
    ),
    ({"a.jsonl": b'{"text": null}'}, "a.jsonl", r"a.jsonl:1: 'text' must be a string, not null"),
    ({"a.jsonl": b'{"text": "\\ud800"}'}, "a.jsonl", r"a.jsonl:1: 'text' holds half a surrogate pair"),
    ({"a.jsonl.gz": b"\x1f\x8b"}, "a.jsonl.gz", r"a.jsonl.gz is packed or binary \(\.gz\); unpack it"),
    ({"d/a.txt": b"x", "d/b.jsonl.zst": b"x"}, "d", r"b.jsonl.zst is packed; unpack it"),
]


@pytest.mark.parametrize(("files", "name", "message"), BAD_DATA)
def test_bad_data_is_named(tmp_path: Path, files: dict[str, bytes], name: str, message: str) -> None:
    tree(tmp_path / "in", files)
    with pytest.raises(DataError, match=message) as error:
        prepare_tokens(tmp_path / "in" / name, ByteTokenizer(), tmp_path / "cache")
    one_line(error)
    assert not list(tmp_path.glob("cache/*"))
    assert not list(tmp_path.glob("cache/.*"))


def test_byte_offsets_count_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "_BLOCK_BYTES", 7)
    tree(tmp_path, {"a.txt": "ä".encode() * 50 + b"\xe4" + "ä".encode() * 50})
    with pytest.raises(DataError, match="byte 0xe4 at offset 100"):
        list(read_documents(tmp_path / "a.txt"))


def test_unreadable_and_odd_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="data '' is no path"):
        find_documents("")
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe\.txt is not a regular file"):
        find_documents(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe\.txt is not a regular file"):
        find_documents(tmp_path)
    (tmp_path / "pipe.txt").unlink()
    tree(tmp_path, {"a.txt": b"text"})

    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    # Taking the permission away would not do: a test run by root reads the file all the same.
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"cannot read data .*a\.txt: Permission denied"):
        list(read_documents(tmp_path))
