"""Folders of `torch.distributed.checkpoint` that are damaged, or made to take memory or time."""

import io
import os
import pickle
import random
import time
import zipfile
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from terrace.base.errors import ModelError
from terrace.model.dcp.metadata import read_metadata
from terrace.model.dcp.reading import read_tensor
from terrace.model.hf.folder import METADATA
from tests.support.dcp_folders import Runs, a_folder, read_as
from tests.support.tiny_runs import MODEL

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.timeout(60)
def test_a_small_metadata_takes_no_large_memory_and_no_long_text(tmp_path: Path) -> None:
    """An object numbered 2^27, for which pickle's reader in C clears 2 GiB; a tuple of 2^40 parts, all of them one."""
    folder = a_folder(tmp_path / "dcp")
    found: Any = FileSystemReader(folder).read_metadata()
    parts: Any = 1
    for _ in range(40):
        parts = (parts, parts)
    found.state_dict_metadata["model.norm.weight"].size = Runs(torch.Size, parts)
    before = getrusage(RUSAGE_SELF).ru_maxrss
    numbered = b"\x80\x02K\x01r" + (1 << 27).to_bytes(4, "little") + b"."
    for content, said in ((numbered, "a Metadata is missing"), (pickle.dumps(found), "a size has other parts")):
        (folder / METADATA).write_bytes(content)
        with pytest.raises(ModelError, match=said) as caught:
            read_metadata(folder)
        assert len(str(caught.value)) < 400
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("zipped", [True, False])
def test_damage_of_a_chunk_is_named(zipped: bool, tmp_path: Path) -> None:
    content = io.BytesIO()
    torch.save(torch.ones(4), content, _use_new_zipfile_serialization=zipped)
    folder = a_folder(tmp_path / "dcp")
    found: Any = FileSystemReader(folder).read_metadata()
    for info in found.storage_data.values():
        info.offset, info.length = 0, len(content.getvalue())
    (folder / METADATA).write_bytes(pickle.dumps(found))
    (path,) = folder.glob("*.distcp")
    draw, refused = random.Random(1), list[str]()
    for _ in range(300):
        raw = bytearray(content.getvalue())
        raw[draw.randrange(len(raw))] = draw.randrange(256)
        path.write_bytes(raw)
        try:
            read_as(MODEL, folder).value("head", "norm.weight")
        except ModelError as error:  # any other fails the test; some bits are of no use
            refused.append(str(error))
    assert len(refused) > 30
    assert not any("\n" in said for said in refused)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ModelError, match="it is a pipe, not a regular file"):
        read_as(MODEL, folder)


# A dict with one key, a tuple of two tuples of two tuples ...: 60 objects, 2^60 parts. The memo keeps the last one.
DEEP_KEY = b"\x80\x02}" + b")q\x00" + b"0h\x00h\x00\x86q\x00" * 60 + b"K\x01s."


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["key", "numbers", "dims", "chunks", "name", "arguments", "bytearray"])
def test_a_small_metadata_takes_no_long_time(kind: str, tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "dcp")
    found: Any = FileSystemReader(folder).read_metadata()
    norm = found.state_dict_metadata["model.norm.weight"]
    said, content = "", b""
    if kind == "key":
        content, said = DEEP_KEY, "keys that are neither names nor records"
    elif kind == "numbers":  # that all have the hash 0
        content, said = pickle.dumps({number * (2**61 - 1): 0 for number in range(5_000)}), "neither names nor records"
    elif kind == "dims":
        norm.size, said = torch.Size([0] * 400_000), "a size has 400000 dims"
    elif kind == "chunks":
        empty = ChunkStorageMetadata(torch.Size([4]), torch.Size([0]))
        norm.chunks, said = [*norm.chunks, *[empty] * 1_000_000], "more chunks than the file"
    elif kind == "name":
        found.state_dict_metadata["x" * 1_000_000], said = norm, "is no name"
    elif kind == "arguments":
        call = b"ctorch\nSize\n(" + b"K\x01" * 1000 + b"tR"
        content, said = b"\x80\x02" + call + b".", "with 1000 arguments"
    else:  # a buffer of 2^40 bytes, which is cleared
        content, said = b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".", "which no checkpoint needs"
    (folder / METADATA).write_bytes(content or pickle.dumps(found))
    begin_s = time.process_time()
    with pytest.raises(ModelError, match=said) as caught:
        read_metadata(folder)
    assert time.process_time() - begin_s < 10
    assert len(str(caught.value)) < 400


def test_empty_chunks_of_ranks_without_a_share_are_read(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "dcp")
    found: Any = FileSystemReader(folder).read_metadata()
    norm = found.state_dict_metadata["model.norm.weight"]
    place = found.storage_data[MetadataIndex("model.norm.weight", (0,))]
    for _ in range(20):
        norm.chunks.append(ChunkStorageMetadata(torch.Size([4]), torch.Size([0])))
        found.storage_data[MetadataIndex("model.norm.weight", (4,))] = place
    (folder / METADATA).write_bytes(pickle.dumps(found))
    assert len(read_metadata(folder)["model.norm.weight"].chunks) == 1
    assert read_as(MODEL, folder).value("head", "norm.weight").tolist() == [1.0] * 4


@pytest.mark.timeout(60)
def test_a_small_chunk_takes_neither_time_nor_memory(tmp_path: Path) -> None:
    folder = a_folder(tmp_path / "dcp")
    (path,) = folder.glob("*.distcp")
    found: Any = FileSystemReader(folder).read_metadata()
    wide = io.BytesIO()
    torch.save(torch.ones(1).expand(4), wide)  # one number in the file
    deep = io.BytesIO()
    with zipfile.ZipFile(deep, "w") as made:
        made.writestr("archive/data.pkl", DEEP_KEY)
    for content, said in ((wide, "larger than its file"), (deep, "keys that are neither names nor records")):
        for info in found.storage_data.values():
            info.offset, info.length = 0, len(content.getvalue())
        (folder / METADATA).write_bytes(pickle.dumps(found))
        path.write_bytes(content.getvalue())
        with pytest.raises(ModelError, match=said):
            read_as(MODEL, folder).value("head", "norm.weight")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_is_read_as_torch_reads_it(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.randn(5, 7).to(dtype)
    for tensor in (values, values.t(), values[1:3, 2:], values[:, 0], values[0, 0], values[:0]):
        content = io.BytesIO()
        torch.save(tensor, content)
        found = read_tensor(tmp_path, bytearray(content.getvalue()))
        assert found.dtype == dtype
        assert torch.equal(found, torch.load(io.BytesIO(content.getvalue()), weights_only=True))
