"""Reads a DCP folder through the interface of an open safetensors file.

A tensor is assembled from its chunks. `torch.save` has written each as an uncompressed zip file:

    NAME/data.pkl      a call of _rebuild_tensor_v2 with the storage's key, the offset, the size and the strides
    NAME/data/KEY      the storage's bytes
    NAME/byteorder     "little" or "big"

The pickle is read with an allow-list (`terrace.model.dcp.pickled`). The tensor is a view of the bytes that were read,
so that a small file cannot claim much memory.
"""

import os
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from terrace.base.errors import ModelError
from terrace.base.foreign import open_file
from terrace.base.printable import printable
from terrace.model.config import ModelConfig
from terrace.model.dcp.metadata import Chunk, DcpTensor, read_metadata
from terrace.model.dcp.names import TORCHTITAN, check_dense, check_titan, from_titan, heads_of, model_names
from terrace.model.dcp.pickled import OF_PICKLE, DamagedError, Kept, PickleReader
from terrace.model.hf.folder import METADATA

_TORCH = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_UNREADABLE = (*OF_PICKLE, DamagedError, RuntimeError, OverflowError, NotImplementedError, zipfile.BadZipFile)


class DcpWeights:
    """The model in a DCP folder, with tensors under their Hugging Face names and with Hugging Face's order of rows.

    Raises `ModelError` if `.metadata` cannot be read or has no model, or if files are missing or too short.
    """

    def __init__(self, folder: Path, config: Callable[[], ModelConfig]) -> None:
        self.folder, self._config = folder, config
        self._tensors = read_metadata(folder)
        self.naming, self._names = model_names(self._tensors, str(folder / METADATA))
        self._check_files()
        # Cached, since a fused tensor is requested once for each part, such as query, key and value.
        self._last: tuple[str, Tensor] | None = None

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        for name in self._names.values():
            for chunk in self._tensors[name].chunks:
                ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.position + chunk.num_bytes)
        for file, end in sorted(ends.items()):
            path = self.folder / file
            try:
                with open_file(path, self.folder) as opened:
                    size = os.fstat(opened.fileno()).st_size
            except OSError as error:
                raise ModelError(f"cannot read {path}: {error.strerror}; copy the folder again") from error
            if size < end:
                raise ModelError(f"{path} has {size} bytes, and {METADATA} needs {end}: copy the folder again")

    def check(self, config: ModelConfig) -> None:
        """Raise `ModelError` for a model whose parameters have no known names in a DCP folder."""
        check_dense(config)
        if self.naming == TORCHTITAN:
            check_titan(config)

    def keys(self) -> list[str]:
        return list(self._names)

    def metadata(self) -> Mapping[str, str]:
        """Empty: DCP has no counterpart of a safetensors file's metadata."""
        return {}

    def get_slice(self, name: str) -> "_Slice":
        return _Slice(self, name, self._tensors[self._names[name]])

    def get_tensor(self, name: str) -> Tensor:
        """Read a whole tensor to the CPU, in its stored dtype. Raises `ModelError`."""
        if self._last is None or self._last[0] != name:
            self._last = None  # freed before the next one is read
            value = self._read(self._names[name], self._tensors[self._names[name]])
            if self.naming == TORCHTITAN:
                value = from_titan(value, heads_of(self._config(), name))
            self._last = name, value
        return self._last[1]

    def _read(self, name: str, stored: DcpTensor) -> Tensor:
        if stored.dtype not in _TORCH:
            raise ModelError(
                f"{name} in {self.folder} is stored as {stored.dtype}: save it as float64, float32, bfloat16 or float16"
            )
        dtype = _TORCH[stored.dtype]
        if len(stored.chunks) == 1:
            return self._chunk(name, stored.chunks[0], dtype)
        whole, seen = torch.empty(stored.shape, dtype=dtype), torch.zeros(stored.shape, dtype=torch.bool)
        for chunk in stored.chunks:
            box = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.shape, strict=True))
            whole[box] = self._chunk(name, chunk, dtype)
            seen[box] = True
        # The numbers of elements agree (checked in `metadata`), so an overlap implies a gap.
        if not bool(seen.all()):
            raise ModelError(f"the chunks of {name} in {self.folder} overlap: save the model again")
        return whole

    def _chunk(self, name: str, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        path = self.folder / chunk.file
        if not prod(chunk.shape):
            return torch.empty(chunk.shape, dtype=dtype)
        try:
            raw = bytearray(chunk.num_bytes)  # no more than the file has
            with open_file(path, self.folder) as file:
                file.seek(chunk.position)
                file.readinto(raw)
            found = read_tensor(path, raw)
        except OSError as error:
            raise ModelError(f"cannot read {path}: {error.strerror}") from error
        except _UNREADABLE as error:
            reason = printable(str(error).partition("\n")[0])[:80]
            raise ModelError(f"{name} in {path} is damaged ({reason}): copy the folder again") from error
        if found.shape != chunk.shape or found.dtype != dtype:
            raise ModelError(f"{name} in {path} is not the tensor that {METADATA} says: copy the folder again")
        return found


@dataclass(frozen=True)
class _Slice:
    folder: DcpWeights
    name: str
    stored: DcpTensor

    def get_shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def get_dtype(self) -> str:
        return self.stored.dtype

    def __getitem__(self, index: Any) -> Tensor:
        return self.folder.get_tensor(self.name)[index]


_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
}
_REBUILD = "_rebuild_tensor_v2"
_NAMES = {"torch._utils": (_REBUILD,), "torch": tuple(_STORAGES), "collections": ("OrderedDict",)}
_LOCAL = struct.Struct("<4s22x2H")  # header of an entry: signature, lengths of name and extra field
_MOST_ENTRIES, _MOST_PICKLE_BYTES, _MOST_DIMS = 64, 1 << 16, 64


class _Reader(PickleReader):
    def __init__(self, path: Path, content: bytes) -> None:
        super().__init__(path, content, lambda module, name: name in _NAMES.get(module, ()), "torch.save")

    def persistent_load(self, pid: Any) -> Any:
        return Kept(pid)


def read_tensor(path: Path, raw: bytearray) -> Tensor:
    """Return the tensor in `raw` as a view of it; `path` is the file to name in errors.

    Raises `ModelError` for a pickle that names anything other than a tensor, and `DamagedError`, `zipfile.BadZipFile`
    or an error of `OF_PICKLE` for damaged bytes.
    """
    entries = _entries(raw)
    root = _Reader(path, bytes(_content(raw, entries, "data.pkl", _MOST_PICKLE_BYTES))).load()
    if not isinstance(root, Kept) or root.kind != _REBUILD or len(root.args) < 4:
        raise DamagedError("it holds no tensor")
    if "byteorder" in entries and _content(raw, entries, "byteorder", 8) != sys.byteorder.encode():
        raise DamagedError("its numbers have the other byte order")
    stored, offset, size, strides = root.args[:4]
    key, dtype = _storage(stored)
    values = _content(raw, entries, f"data/{key}", len(raw))
    shape, steps = _numbers(size), _numbers(strides)
    if type(offset) is not int or offset < 0 or len(shape) != len(steps):
        raise DamagedError("its tensor has no place")
    last = offset + sum((number - 1) * step for number, step in zip(shape, steps, strict=True))
    # The second check rejects large tensors that a stride of 0 would make of one number.
    if prod(shape) and (last >= len(values) // dtype.itemsize or prod(shape) * dtype.itemsize > len(values)):
        raise DamagedError("its tensor is larger than its file")
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(values, dtype=dtype, count=len(values) // dtype.itemsize)
    return flat.as_strided(shape, steps, offset)


def _entries(raw: bytearray) -> Mapping[str, zipfile.ZipInfo]:
    with zipfile.ZipFile(BytesIO(raw)) as opened:
        found = opened.infolist()
    if len(found) > _MOST_ENTRIES:
        raise DamagedError(f"it has {len(found)} entries, and a tensor has seven")
    return {each.filename.partition("/")[2]: each for each in found}


def _content(raw: bytearray, entries: Mapping[str, zipfile.ZipInfo], name: str, most: int) -> memoryview:
    entry = entries.get(name)
    if entry is None or entry.compress_type != zipfile.ZIP_STORED or entry.file_size > most:
        raise DamagedError(f"it has no plain {name}")
    signature, *lengths = _LOCAL.unpack_from(raw, entry.header_offset)
    begin = entry.header_offset + _LOCAL.size + sum(lengths)
    found = memoryview(raw)[begin : begin + entry.file_size]
    # CRC is 0 if torch was configured not to compute checksums.
    if signature != b"PK\3\4" or len(found) != entry.file_size or entry.CRC not in (0, zlib.crc32(found)):
        raise DamagedError(f"its {name} does not have its checksum")
    return found


def _storage(stored: object) -> tuple[str, torch.dtype]:
    pid = stored.args[0] if isinstance(stored, Kept) and stored.args else None
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
        raise DamagedError("its tensor has no storage")
    kind = pid[1]
    if not (isinstance(kind, type) and issubclass(kind, Kept) and kind.kind in _STORAGES and type(pid[2]) is str):
        raise DamagedError("its tensor has no storage")
    return pid[2], _STORAGES[kind.kind]


def _numbers(value: object) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > _MOST_DIMS:
        raise DamagedError("its tensor has no size")
    if not all(type(each) is int and 0 <= each < 2**48 for each in value):
        raise DamagedError("its tensor has no size")
    return value
