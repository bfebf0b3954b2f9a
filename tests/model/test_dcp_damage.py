"""Folders of `torch.distributed.checkpoint` that are damaged, or made to take memory or time."""

import io
import os
import pickle
import random
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from terrace.base.errors import ModelError
from terrace.model.dcp.metadata import read_metadata
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
    with pytest.raises(ModelError, match="is no file"):
        read_as(MODEL, folder)
