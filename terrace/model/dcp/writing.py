"""Writes a DCP folder from one process with whole tensors, as `dcp.save` with one rank would.

`dcp.load` shards tensors for its ranks when it reads them. Equal objects (numbers, None) are written once: several
names may refer to one byte range of a file.
"""

import os
import pickle
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from terrace.base.files import respect_umask, write_atomic
from terrace.model.hf.folder import METADATA

_VERSION = "1.0.0"  # of the format, as torch 2.6 to 2.13 write it; earlier ones ignore it


class DcpWriter:
    """Writes tensors and objects to files in `folder`, each of at most `file_bytes` unless a tensor is larger.

    `finish` writes `.metadata`, which makes it a DCP folder. Raises `OSError`.
    """

    def __init__(self, folder: Path, file_bytes: int) -> None:
        self.folder, self._limit = folder, file_bytes
        self.files: list[str] = []
        self._file: IO[bytes] | None = None
        self._described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._paths: dict[str, tuple[str, ...]] = {}
        self._objects: dict[str, _StorageInfo] = {}

    def tensor(self, path: tuple[str, ...], value: Tensor) -> None:
        """Write a tensor. Its name is `path`, its keys in the state dict, joined by dots."""
        value = value.detach().contiguous()
        start = torch.Size([0] * value.dim())
        self._add(
            path,
            TensorStorageMetadata(
                properties=TensorProperties(dtype=value.dtype),
                size=value.shape,
                chunks=[ChunkStorageMetadata(offsets=start, sizes=value.shape)],
            ),
            start,
            self._write(value, value.nbytes),
        )

    def alias(self, path: tuple[str, ...], of: tuple[str, ...]) -> None:
        """Add a second name for a written tensor, for a tied matrix."""
        first = ".".join(of)
        described = self._described[first]
        assert isinstance(described, TensorStorageMetadata), f"{first} is no tensor"
        start = described.chunks[0].offsets
        self._add(path, described, start, self._places[MetadataIndex(first, start)])

    def object(self, path: tuple[str, ...], value: Any) -> None:
        """Write a number, text, None, or a tuple of these."""
        key = repr((type(value), value))
        if key not in self._objects:
            self._objects[key] = self._write(value, 0)
        self._add(path, BytesStorageMetadata(), None, self._objects[key])

    def finish(self) -> list[str]:
        self._close()
        metadata = Metadata(
            state_dict_metadata=self._described,
            planner_data=self._paths,
            storage_data=self._places,
            storage_meta=StorageMeta(),
        )
        # Releases of torch before 2.6 do not have this field.
        metadata.version = _VERSION
        write_atomic(self.folder / METADATA, pickle.dumps(metadata, protocol=4))
        return [METADATA, *self.files]

    def _add(self, path: tuple[str, ...], described: Any, start: torch.Size | None, place: _StorageInfo) -> None:
        name = ".".join(path)
        assert name not in self._described, f"{name} is written twice"
        self._described[name], self._paths[name] = described, path
        self._places[MetadataIndex(name, start, None if start is None else 0)] = place

    def _write(self, value: Any, num_bytes: int) -> _StorageInfo:
        if self._file is not None and self._file.tell() and self._file.tell() + num_bytes > self._limit:
            self._close()
        if self._file is None:
            # As `dcp.save` names the files of rank 0.
            self.files.append(f"__0_{len(self.files)}.distcp")
            self._file = (self.folder / self.files[-1]).open("wb")
        begin = self._file.tell()
        torch.save(value, self._file)
        return _StorageInfo(self.files[-1], begin, self._file.tell() - begin)

    def _close(self) -> None:
        if self._file is None:
            return
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
        respect_umask(self.folder / self.files[-1])
        self._file = None
