"""Safe reader for `.metadata` of a DCP folder, in time linear in its size.

The file is a pickle. It is read with an allow-list of the names that `torch.distributed.checkpoint` writes
(`terrace.model.dcp.pickled`), and its contents are checked in one pass with limits on chunks, dims and names.

Source: `torch.distributed.checkpoint.metadata` and `.filesystem` of torch 2.4 to 2.13.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from terrace.base.errors import ModelError
from terrace.base.foreign import read_file
from terrace.base.printable import printable
from terrace.model.dcp.pickled import OF_PICKLE, DamagedError, Kept, PickleReader
from terrace.model.hf.folder import METADATA

_RECORDS = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    _RECORDS: (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    # `StorageMeta` has the path of the folder.
    **dict.fromkeys(("pathlib", "pathlib._local"), ("Path", "PosixPath", "PurePosixPath", "WindowsPath")),
}
# Names of safetensors. Other dtypes keep their name, for the error message.
_DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_OF_TORCH = re.compile(r"Size|bool|(u?int|float|bfloat|complex|qu?int|bits)\d+\w*")
_MOST_BYTES = 4 << 30  # about the size for 100,000 tensors of 1,024 chunks each
_MOST_DIMS, _MOST_LETTERS = 64, 4096
# Limits the number of chunks by the file size, since a pickle can repeat one object for two bytes each. A genuine chunk
# takes 30 bytes; tied tensors may share theirs.
_CHUNK_BYTES, _FEW_CHUNKS = 4, 1000


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a tensor, written by `torch.save` into a byte range of a file."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    position: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class DcpTensor:
    """A tensor of a DCP folder; its chunks cover it exactly once."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors names it
    chunks: tuple[Chunk, ...]


def read_metadata(folder: Path) -> dict[str, DcpTensor]:
    """Tensors of a DCP folder by full name; other objects are skipped.

    Raises `ModelError` if the file is missing or damaged, or names anything other than DCP's own classes.
    """
    path = folder / METADATA
    try:
        raw = read_file(path, folder, _MOST_BYTES)
        return _tensors(PickleReader(path, raw, _is_known, "DCP").load(), _FEW_CHUNKS + len(raw) // _CHUNK_BYTES)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}; is {folder} a DCP folder?") from error
    except DamagedError as error:
        raise ModelError(f"{path} is damaged ({error}): copy the folder again, or save it again") from error
    except OF_PICKLE as error:
        reason = printable(str(error).partition("\n")[0])
        raise ModelError(f"{path} is damaged ({reason}): copy the folder again, or save it again") from error
    except (MemoryError, OverflowError, RecursionError, ImportError) as error:
        raise ModelError(f"{path} is damaged ({type(error).__name__}): copy the folder again") from error


def _is_known(module: str, name: str) -> bool:
    return name in _CLASSES.get(module, ()) or (module == "torch" and _OF_TORCH.fullmatch(name) is not None)


def _tensors(root: object, most_chunks: int) -> dict[str, DcpTensor]:
    whole = _state(root, "Metadata")
    described, stored = whole.get("state_dict_metadata"), whole.get("storage_data")
    if type(described) is not dict or type(stored) is not dict:
        raise DamagedError("it lists no tensors")
    places: dict[tuple[str, tuple[int, ...]], Mapping[str, Any]] = {}
    for index, info in stored.items():
        key = _state(index, "MetadataIndex")
        if key.get("offset") is not None:
            places[_text(key.get("fqn")), _sizes(key["offset"])] = _state(info, "_StorageInfo")
    found: dict[str, DcpTensor] = {}
    num_chunks = 0
    for name, item in described.items():
        if isinstance(item, Kept) and item.kind == "TensorStorageMetadata":
            text = _text(name)
            table = _state(item, item.kind)
            chunks = table.get("chunks")
            if type(chunks) is not list:
                raise DamagedError(f"{text} has no list of chunks")
            num_chunks += len(chunks)
            if num_chunks > most_chunks:
                raise DamagedError(f"{text} has more chunks than the file")
            found[text] = _tensor(text, table, chunks, places)
    return found


def _tensor(
    name: str,
    item: Mapping[str, Any],
    chunks: list[object],
    places: Mapping[tuple[str, tuple[int, ...]], Mapping[str, Any]],
) -> DcpTensor:
    shape, found = _sizes(item.get("size")), []
    for each in chunks:
        box = _state(each, "ChunkStorageMetadata")
        offsets, sizes = _sizes(box.get("offsets")), _sizes(box.get("sizes"))
        if not len(offsets) == len(sizes) == len(shape) or any(
            offset + size > most for offset, size, most in zip(offsets, sizes, shape, strict=True)
        ):
            raise DamagedError(f"a chunk of {name} lies outside of it")
        place = places.get((name, offsets))
        if place is None:
            raise DamagedError(f"a chunk of {name} is in no file")
        # Ranks without a shard of the tensor write empty chunks.
        if prod(sizes) or not prod(shape):
            found.append(_chunk(name, offsets, sizes, place))
    # With the coverage mask of `terrace.model.dcp.reading`, this ensures that each element is present exactly once.
    if sum(prod(chunk.shape) for chunk in found) != prod(shape):
        raise DamagedError(f"the chunks of {name} do not cover it once")
    return DcpTensor(shape=shape, dtype=_dtype(item.get("properties")), chunks=tuple(found))


def _chunk(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], place: Mapping[str, Any]) -> Chunk:
    if place.get("transform_descriptors"):
        raise ModelError(
            f"{name} was written through a transform of DCP (transform_descriptors), which is not read: save it "
            "without extensions"
        )
    file, position, length = _text(place.get("relative_path")), place.get("offset"), place.get("length")
    # The file must be inside the folder.
    if os.path.basename(file) != file or file in ("", ".", ".."):
        raise DamagedError(f"{name} is in {file}, which is no file of the folder")
    if type(position) is not int or type(length) is not int or position < 0 or length < 0:
        raise DamagedError(f"{name} has no place in {file}")
    return Chunk(offsets=offsets, shape=sizes, file=file, position=position, num_bytes=length)


def _state(value: object, kind: str) -> Mapping[str, Any]:
    if not isinstance(value, Kept) or value.kind != kind or type(value.state) is not dict:
        raise DamagedError(f"a {kind} is missing")
    return value.state


def _dtype(properties: object) -> str:
    # The state of TensorProperties is a tuple that begins with the dtype, pickled by name.
    if not isinstance(properties, Kept) or type(properties.state) is not tuple or not properties.state:
        raise DamagedError("a tensor has no dtype")
    dtype = properties.state[0]
    if not (isinstance(dtype, type) and issubclass(dtype, Kept)):
        raise DamagedError("a tensor has no dtype")
    return _DTYPES.get(dtype.kind, dtype.kind)


def _sizes(value: object) -> tuple[int, ...]:
    # torch.Size is pickled as a call with one tuple.
    if not isinstance(value, Kept) or value.kind != "Size" or len(value.args) > 1:
        raise DamagedError("a size is missing")
    sizes = value.args[0] if value.args else ()
    if type(sizes) is tuple and len(sizes) > _MOST_DIMS:
        raise DamagedError(f"a size has {len(sizes)} dims")
    if type(sizes) is not tuple or not all(type(each) is int and 0 <= each < 2**48 for each in sizes):
        # Not shown: with shared objects, its text could be exponentially longer than the file.
        raise DamagedError("a size has other parts than whole numbers of elements")
    return sizes


def _text(value: object) -> str:
    if type(value) is not str or len(value) > _MOST_LETTERS or not value.isprintable():
        shown = repr(value[:40]) if type(value) is str else f"an object ({type(value).__name__})"
        raise DamagedError(f"{shown} is no name")
    return value
