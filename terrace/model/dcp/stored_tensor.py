"""Safe reader for a tensor written by `torch.save`, without torch's unpickler.

    an uncompressed zip file:  NAME/data.pkl      a call of _rebuild_tensor_v2 with the storage's key, the offset, the
                                                  size and the strides
                               NAME/data/KEY      the storage's bytes
                               NAME/byteorder     "little" or "big"

The pickle is read with an allow-list (`terrace.model.dcp.pickled`). The tensor is a view of the bytes that were read,
so that a small file cannot claim much memory.
"""

import struct
import sys
import zipfile
import zlib
from collections.abc import Mapping
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from terrace.model.dcp.pickled import DamagedError, Kept, PickleReader

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
