"""A token cache is believed by its contents: damage is found when it is read, other sources make another cache."""

import json
import os
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from terrace.base.errors import DataError
from terrace.data import originals as originals_module
from terrace.data import tokens as tokens_module
from terrace.data.batches import Batches, Source
from terrace.data.block_sums import BLOCK_TOKENS, BlockSums
from terrace.data.chat_tokens import prepare_chat
from terrace.data.documents import open_documents
from terrace.data.tokenizer import ByteTokenizer
from terrace.data.tokens import prepare_tokens
from tests.support.chats import CHATML, write_lines
from tests.support.indexed import indexed

NUM_DOCUMENTS = 40


def prepared(folder: Path, documents: str = "join") -> Source:
    lines = [{"text": f"document {number} " + "abcdefgh" * 60} for number in range(NUM_DOCUMENTS)]
    if not (folder / "a.jsonl").exists():
        write_lines(folder / "a.jsonl", lines)
    tokens = prepare_tokens(folder / "a.jsonl", ByteTokenizer(), folder / "cache")
    return Source(tokens=tokens, documents=documents, too_long="split")  # type: ignore[arg-type]


def flip(path: Path, place: int) -> None:
    """Other bits in the same file, of the same size and times."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        (old,) = file.read(1)
        file.seek(place)
        file.write(bytes([old ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def errors_of(batches: Batches) -> list[str]:
    """What is said of the rows of an epoch, each read alone, that cannot be."""
    found = []
    for step in range(-(-batches.num_samples // 8)):
        for row in range(8):
            try:
                batches.rows(step, np.array([row]))
            except DataError as error:
                found.append(str(error))
    return found


def read_all(source: Source) -> None:
    batches = Batches([source], 64, 8, seed=0)
    for step in range(-(-batches.num_samples // 8)):
        batches.rows(step, np.arange(8))


@pytest.mark.parametrize("documents", ["join", "separate", "whole"])
def test_a_changed_token_is_found_when_it_is_read(tmp_path: Path, documents: str) -> None:
    source = prepared(tmp_path, documents)
    assert source.tokens.num_tokens > 4 * BLOCK_TOKENS
    read_all(source)
    flip(source.tokens.path, 2 * (BLOCK_TOKENS + 5))
    batches = Batches([prepared(tmp_path, documents)], 64, 8, seed=0)
    found = errors_of(batches)
    block = f"tokens {BLOCK_TOKENS} to {2 * BLOCK_TOKENS - 1}"
    fix = "delete it, and it will be made again"
    assert set(found) == {f"{source.tokens.path} is damaged: {block} are not those that were written; {fix}"}
    assert len(found) < batches.num_samples / 2  # rows of other blocks are read


@pytest.mark.parametrize("suffix", [".starts", ".sums", ".json", ".packing.npy"])
def test_other_files_of_the_cache_are_believed_by_their_checksums(tmp_path: Path, suffix: str) -> None:
    source = prepared(tmp_path, "whole")
    read_all(source)
    (path,) = (file for file in (tmp_path / "cache").iterdir() if file.name.endswith(suffix))
    whole = path.read_bytes()
    for place in range(len(whole) // 3 if suffix == ".packing.npy" else 0, len(whole), max(1, len(whole) // 20)):
        flip(path, place)
        with pytest.raises(DataError, match="damaged") as error:
            read_all(prepared(tmp_path, "whole"))
        assert "\n" not in str(error.value)
        path.write_bytes(whole)
    read_all(prepared(tmp_path, "whole"))
    path.unlink()
    read_all(prepared(tmp_path, "whole"))


def test_a_description_says_nothing_but_what_was_written(tmp_path: Path) -> None:
    described = prepared(tmp_path).tokens.path.with_suffix(".json")
    table = json.loads(described.read_text())
    for key, value in (("digest", "0" * 32), ("max_token", 5), ("num_tokens", 4096), ("sums", "0" * 32)):
        described.write_text(json.dumps({**table, key: value}))
        with pytest.raises(DataError, match=r"\.json is damaged \(its own checksum differs\); delete it"):
            prepared(tmp_path)


def test_a_mask_is_checked_with_its_tokens(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(CHATML)
    turns = [{"role": "user", "content": "what " * 30}, {"role": "assistant", "content": "that " * 30}]
    data = write_lines(tmp_path / "chats.jsonl", [{"messages": turns}] * 40)
    template = tmp_path / "chat.jinja"
    made = prepare_chat(data, ByteTokenizer(), "bytes", template, tmp_path / "cache")
    assert made.mask is not None
    flip(made.mask, 100)
    with pytest.raises(DataError, match=f"tokens 0 to {BLOCK_TOKENS - 1} are not those that were written"):
        read_all(Source(tokens=made, documents="whole", too_long="split"))


def test_an_indexed_data_set_is_checked_too(tmp_path: Path) -> None:
    prefix = indexed(tmp_path / "data", [[1, 2, 3] * 40, [4] * 50], [0, 1, 2])
    made = prepare_tokens(prefix, ByteTokenizer(), tmp_path / "cache")
    flip(made.path, 10)
    with pytest.raises(DataError, match=r"data\.bin is damaged: tokens 0 to 169 .* restore it, or start anew"):
        read_all(Source(tokens=made))
    # Started anew, it is another data set of the same name, size and time.
    again = prepare_tokens(prefix, ByteTokenizer(), tmp_path / "cache")
    assert again.digest != made.digest
    read_all(Source(tokens=again))


def test_ids_beyond_the_vocabulary_are_found_in_every_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = prepared(tmp_path)
    ids = np.fromfile(source.tokens.path, dtype="<u2")
    ids[5000] = 65535
    ids.tofile(source.tokens.path)
    monkeypatch.setattr(BlockSums, "check", lambda self, first, end: None)  # bits that a checksum did not find
    found = errors_of(Batches([source], 64, 8, seed=0, vocab_size=257))
    assert found
    told = f"sample {5000 // 64} of {source.tokens.path} has token id 65535, but the model's vocab_size is 257"
    assert all(each.startswith(told) for each in found)


def rewrite(file: Path, content: bytes) -> None:
    """As `cp -p` or `rsync -t` of another version: size and modification time are those of before."""
    status = file.stat()
    assert len(content) == status.st_size
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("is_settled", [True, False])
def test_a_text_that_changed_under_its_size_and_time_is_prepared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_settled: bool
) -> None:
    monkeypatch.setattr(originals_module, "_SETTLED_S", -1.0 if is_settled else 1e9)
    source, said = tmp_path / "a.txt", list[str]()
    source.write_bytes(b"first")
    first = prepare_tokens(source, ByteTokenizer(), tmp_path / "cache")
    hashed: list[Path] = []
    digest = originals_module._digest

    def noted(file: Path) -> bytes:
        hashed.append(file)
        return digest(file)

    monkeypatch.setattr(originals_module, "_digest", noted)
    assert prepare_tokens(source, ByteTokenizer(), tmp_path / "cache") == first
    assert bool(hashed) != is_settled  # change times that have settled are proof enough
    rewrite(source, b"other")
    second = prepare_tokens(source, ByteTokenizer(), tmp_path / "cache", progress=said.append)
    assert bytes(np.asarray(second.open()[:-1]).astype(np.uint8)) == b"other"
    assert second.digest != first.digest
    assert said == [f"{source} has other contents than before: it is prepared again"]


def test_a_copy_with_the_same_contents_keeps_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(originals_module, "_SETTLED_S", -1.0)
    source = tmp_path / "a.txt"
    source.write_bytes(b"first")
    first = prepare_tokens(source, ByteTokenizer(), tmp_path / "cache")
    shutil.copy2(source, tmp_path / "copy")
    os.replace(tmp_path / "copy", source)
    with monkeypatch.context() as patch:
        patch.setattr(tokens_module, "_write_tokens", lambda *given: pytest.fail("tokenised again"))
        assert prepare_tokens(source, ByteTokenizer(), tmp_path / "cache") == first
        patch.setattr(originals_module, "_digest", lambda file: pytest.fail("the new stamp was not kept"))
        assert prepare_tokens(source, ByteTokenizer(), tmp_path / "cache") == first


def test_equal_checksums_are_equal_tokens(tmp_path: Path) -> None:
    """What machines compare is made of what they read, block by block."""
    first = prepared(tmp_path / "one").tokens
    second = prepared(tmp_path / "two").tokens
    assert (first.digest, first.sums_digest) == (second.digest, second.sums_digest)
    sums = np.fromfile(first.sums, dtype="<u4").tolist()
    ids = np.fromfile(first.path, dtype="<u2")
    blocks = [ids[place : place + BLOCK_TOKENS].tobytes() for place in range(0, len(ids), BLOCK_TOKENS)]
    assert sums == [*map(zlib.crc32, blocks), zlib.crc32(first.starts.read_bytes())]
    flip(second.path, 9)
    with pytest.raises(DataError, match="is damaged: tokens 0 to"):
        open_documents(replace(second, sums_digest=first.sums_digest)).check(0, 10)
