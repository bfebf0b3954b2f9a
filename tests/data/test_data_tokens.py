"""The token file: what it holds, when it is made again, and what is left when making it fails."""

import errno
import json
import multiprocessing
import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from terrace.base.errors import DataError
from terrace.data import pieces as pieces_module
from terrace.data import tokens as tokens_module
from terrace.data.text_tokens import TextTokens
from terrace.data.token_file import TokenFile
from terrace.data.tokenizer import ByteTokenizer
from terrace.data.tokens import prepare_tokens
from tests.support.folders import tree


class WideTokenizer:
    """Every character is an id of its own: needs uint32, has no end of text."""

    vocab_size: int = 0x110000
    text_tokens = TextTokens()
    fingerprint: str = "characters"

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        return np.array([ord(character) for character in text], dtype=np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        return [self.encode(text) for text in texts]

    def encode_prompt(self, text: str, *, begins_text: bool = True) -> npt.NDArray[np.int64]:
        return self.encode(text)

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        return "".join(map(chr, ids))


def test_tokens_hold_documents_and_their_ends(tmp_path: Path) -> None:
    tree(tmp_path, {"in/a.txt": "é".encode(), "in/b.txt": b"b"})
    made = prepare_tokens(tmp_path / "in", ByteTokenizer(), tmp_path / "deep" / "cache")
    assert (made.dtype, made.num_tokens, made.max_token) == ("uint16", 5, 256)
    mapped = made.open()
    assert isinstance(mapped, np.memmap)
    assert mapped.tolist() == [0xC3, 0xA9, 256, ord("b"), 256]
    made.check_vocab(257)
    with pytest.raises(DataError, match=r"token id 256, but the model's vocab_size is 256; .* at least 257"):
        made.check_vocab(256)
    wide = prepare_tokens(tmp_path / "in", WideTokenizer(), tmp_path / "deep" / "cache")
    assert (wide.dtype, wide.open().tolist()) == ("uint32", [0xE9, ord("b")])
    with pytest.raises(ValueError, match="read-only"):
        wide.open()[0] = 1


def test_a_cut_document_has_one_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "PIECE_CHARACTERS", 4)
    tree(tmp_path, {"a.txt": b"0123456789"})
    made = prepare_tokens(tmp_path / "a.txt", ByteTokenizer(), tmp_path / "cache")
    assert made.open().tolist() == [*b"0123456789", 256]


def test_documents_begin_where_the_file_says(tmp_path: Path) -> None:
    lines = [b'{"text": "ab"}\n', b'{"text": "c"}\n{"text": ""}\n{"text": "def"}\n']
    tree(tmp_path, {"in/a.jsonl": lines[0], "in/b.jsonl": lines[1]})
    made = prepare_tokens(tmp_path / "in", ByteTokenizer(), tmp_path / "cache")
    assert made.open().tolist() == [*b"ab", 256, *b"c", 256, *b"def", 256]
    assert made.open_starts().tolist() == [0, 3, 5]
    assert made.num_documents == 3
    assert made.open_starts().dtype == np.int64
    assert made.open_mask() is None


def test_cache_is_reused_until_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = tmp_path / "a.txt", tmp_path / "cache"
    source.write_text("first")
    first = prepare_tokens(source, ByteTokenizer(), cache)
    with monkeypatch.context() as patch:
        patch.setattr(ByteTokenizer, "encode", lambda self, text: pytest.fail("tokenised again"))
        assert prepare_tokens(source, ByteTokenizer(), str(cache)) == first
    source.write_text("other")  # the same size
    os.utime(source, ns=(0, 123_456_789))
    second = prepare_tokens(source, ByteTokenizer(), cache)
    assert bytes(second.open()[:-1].astype(np.uint8)) == b"other"
    assert second.digest != first.digest
    assert bytes(first.open()[:-1].astype(np.uint8)) == b"first"  # whoever has it open keeps it
    assert prepare_tokens(source, WideTokenizer(), cache).path not in (first.path, second.path)
    assert not list(cache.glob(".*"))


def test_damaged_caches(tmp_path: Path) -> None:
    source, cache = tree(tmp_path, {"a.txt": b"some text"}) / "a.txt", tmp_path / "cache"
    made = prepare_tokens(source, ByteTokenizer(), cache)
    whole = made.path.read_bytes()
    made.path.write_bytes(whole[:-2])
    for reopen in (made.open, lambda: prepare_tokens(source, ByteTokenizer(), cache)):
        with pytest.raises(DataError, match=r"\.tokens is damaged: it has 18 bytes, .* take 20; delete"):
            reopen()
    made.path.unlink()
    with pytest.raises(DataError, match=r"cannot read the token file .*: No such file"):
        made.open()
    assert prepare_tokens(source, ByteTokenizer(), cache).path.read_bytes() == whole
    made.path.with_suffix(".json").write_text('{"format": 1}')
    with pytest.raises(DataError, match=r"\.json is damaged \(.*\); delete it"):
        prepare_tokens(source, ByteTokenizer(), cache)
    made.path.with_suffix(".json").unlink()
    assert prepare_tokens(source, ByteTokenizer(), cache) == made


def fail_with(code: int) -> Callable[..., None]:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        ("_write_tokens", errno.ENOSPC, "No space left on device; stopped after 0 bytes; free some space"),
        ("partial.os.fsync", errno.ENOSPC, "No space left on device; stopped after 10 bytes"),
        ("partial.os.replace", errno.EACCES, "Permission denied; choose a cache folder that you may write to"),
        ("cache.write_atomic", errno.ENOSPC, "No space left on device"),
        ("Partial", errno.EROFS, "Read-only file system; choose a cache folder"),
    ],
)
def test_failed_writes_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, code: int, message: str
) -> None:
    tree(tmp_path, {"a.txt": b"text"})
    module = "terrace.data" if "." in target else tokens_module.__name__
    monkeypatch.setattr(f"{module}.{target}", fail_with(code))
    with pytest.raises(DataError, match=f"cannot write the token file .*: {message}") as error:
        prepare_tokens(tmp_path / "a.txt", ByteTokenizer(), tmp_path / "cache")
    assert "\n" not in str(error.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_write_that_really_fails(tmp_path: Path) -> None:
    """The limit on the size of a file stands in for a full disk: the write itself fails, part way."""
    tree(tmp_path, {"a.txt": b"text" * 1_000_000})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(DataError, match=r"cannot write the token file .*: File too large; stopped after"):
            prepare_tokens(tmp_path / "a.txt", ByteTokenizer(), tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "cache").iterdir()) == []


def test_cache_folder_that_is_a_file(tmp_path: Path) -> None:
    tree(tmp_path, {"a.txt": b"text", "cache": b""})
    with pytest.raises(DataError, match=r"cannot write the token file .*: (File exists|Not a directory)"):
        prepare_tokens(tmp_path / "a.txt", ByteTokenizer(), tmp_path / "cache")


def test_tokenizers_that_lie_are_caught(tmp_path: Path) -> None:
    tree(tmp_path, {"a.txt": b"text"})
    tokenizer = WideTokenizer()
    tokenizer.vocab_size = 100
    with pytest.raises(DataError, match="ids from 101 to 120, outside its vocabulary of 100"):
        prepare_tokens(tmp_path / "a.txt", tokenizer, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_data_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    source = tree(tmp_path, {"a.txt": b"text"}) / "a.txt"

    class Meddler(WideTokenizer):
        def encode(self, text: str) -> npt.NDArray[np.int64]:
            source.write_text("longer text")
            return super().encode(text)

    with pytest.raises(DataError, match="changed while it was read"):
        prepare_tokens(source, Meddler(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def prepare_in_process(folder: Path) -> TokenFile:
    return prepare_tokens(folder / "a.txt", ByteTokenizer(), folder / "cache")


def test_processes_may_prepare_at_once(tmp_path: Path) -> None:
    tree(tmp_path, {"a.txt": b"text " * 100_000})
    with multiprocessing.get_context("fork").Pool(4) as pool:
        made = pool.map(prepare_in_process, [tmp_path] * 8, chunksize=1)
        pool.close()
        pool.join()
    assert len(set(made)) == 1
    assert made[0].open().size == 500_001
    assert len(list((tmp_path / "cache").iterdir())) == 4


class Interrupted(WideTokenizer):
    """Is killed, as by Ctrl-C, while it encodes some text; counts what it has encoded."""

    def __init__(self, end: str = "") -> None:
        self.end, self.num_encoded = end, 0

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        if self.end and self.end in text:
            raise KeyboardInterrupt
        self.num_encoded += len(text)
        return super().encode(text)


@pytest.mark.parametrize("damage", ["", "ids", "beyond", "journal"])
def test_what_a_killed_process_has_left_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setattr("terrace.data.corpus.UNIT_BYTES", 1000)
    monkeypatch.setattr(tokens_module, "_NOTE_BYTES", 2000)
    lines = [{"text": f"document {number} " + "x" * 80} for number in range(100)]
    lines[70]["text"] += " here"
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(KeyboardInterrupt):
        prepare_tokens(source, Interrupted("here"), tmp_path / "cache")
    (ids,) = (tmp_path / "cache").glob(".*.tokens.partial")
    (journal,) = (tmp_path / "cache").glob(".*.journal.json")
    if damage == "ids":
        ids.write_bytes(b"\xff" + ids.read_bytes()[1:])
    if damage == "beyond":
        ids.write_bytes(ids.read_bytes() + b"half a tok")
    if damage == "journal":
        journal.write_text(journal.read_text()[:20])
    again, said = Interrupted(), list[str]()
    made = prepare_tokens(source, again, tmp_path / "cache", progress=said.append)
    fresh = prepare_tokens(source, WideTokenizer(), tmp_path / "fresh")
    assert made.path.read_bytes() == fresh.path.read_bytes()
    assert made.starts.read_bytes() == fresh.starts.read_bytes()
    assert made.digest == fresh.digest
    assert len(list((tmp_path / "cache").iterdir())) == 4
    total = sum(len(line["text"]) for line in lines)
    if damage in ("", "beyond"):
        assert any(text.startswith("going on after ") for text in said)
        assert again.num_encoded < 0.6 * total
    else:
        assert again.num_encoded == total


def test_a_tokenizer_without_an_end_of_text_tells_boundaries_apart(tmp_path: Path) -> None:
    tree(tmp_path, {"a.jsonl": b'{"text": "ab"}\n{"text": "c"}', "b.jsonl": b'{"text": "a"}\n{"text": "bc"}'})
    made = [prepare_tokens(tmp_path / name, WideTokenizer(), tmp_path / "cache") for name in ("a.jsonl", "b.jsonl")]
    assert made[0].path.read_bytes() == made[1].path.read_bytes()
    assert made[0].digest != made[1].digest
