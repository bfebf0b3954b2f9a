"""`.metadata` of a DCP folder, read without running anything in it.

The file is a pickle. A pickle names classes and functions and has them called, so one from a stranger could run
anything. Here every name is looked up in a table of those that `torch.distributed.checkpoint` writes, and each stands
for a class of this module that only keeps its arguments; no class or function of torch is called. Any other name is
refused. The classes are made anew for each file, since a pickle may set attributes of a class. The reader is pickle's
own in Python: five bytes, the number of an object, can make the one in C clear 64 GiB of memory.

Source: `torch.distributed.checkpoint.metadata` and `.filesystem` of torch 2.4 to 2.13.
"""

import os
import pickle
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

from terrace.base.errors import ModelError
from terrace.base.files import read_bounded
from terrace.base.printable import printable
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
    # The folder that was written, in `StorageMeta`.
    **dict.fromkeys(("pathlib", "pathlib._local"), ("Path", "PosixPath", "PurePosixPath", "WindowsPath")),
}
# As safetensors names them; of other dtypes only the name is kept, for an error.
_DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_OF_TORCH = re.compile(r"Size|bool|(u?int|float|bfloat|complex|qu?int|bits)\d+\w*")
# A damaged pickle may raise nearly any of these, among them the errors of a stack that is too short.
_OF_PICKLE = (
    pickle.UnpicklingError,
    struct.error,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    AssertionError,
    EOFError,
)
_MOST_BYTES = 4 << 30  # of a file; one of 100,000 tensors in 1,024 chunks each has about as many


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a tensor, saved by `torch.save` in a part of a file."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    position: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class DcpTensor:
    """A tensor of a DCP folder; its chunks cover it once."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors names it
    chunks: tuple[Chunk, ...]


def read_metadata(folder: Path) -> dict[str, DcpTensor]:
    """The tensors of a DCP folder by their whole names. Objects beside them are left out.

    Raises `ModelError` for a file that is missing, damaged, or names anything but DCP's own records.
    """
    path = folder / METADATA
    try:
        found = _Reader(path, read_bounded(path, _MOST_BYTES)).load()
        return _tensors(found)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}; is {folder} a DCP folder?") from error
    except _DamagedError as error:
        raise ModelError(f"{path} is damaged ({error}): copy the folder again, or save it again") from error
    except _OF_PICKLE as error:
        reason = printable(str(error).partition("\n")[0])
        raise ModelError(f"{path} is damaged ({reason}): copy the folder again, or save it again") from error
    except (MemoryError, OverflowError, RecursionError, ImportError) as error:
        raise ModelError(f"{path} is damaged ({type(error).__name__}): copy the folder again") from error


class _DamagedError(Exception):
    pass


class _Kept:
    # Stands for every class and function of the table: keeps its arguments and its state.
    kind = ""
    args: tuple[object, ...]
    state: object

    def __new__(cls, *args: object) -> "_Kept":
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: object) -> None:
        self.state = state


class _Reader(pickle._Unpickler):
    def __init__(self, path: Path, content: bytes) -> None:
        super().__init__(BytesIO(content))
        self._path, self._made = path, dict[tuple[str, str], type[_Kept]]()

    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()) and not (module == "torch" and _OF_TORCH.fullmatch(name)):
            raise ModelError(
                f"{self._path} names {f'{module}.{name}'[:80]!r}, which DCP does not write: a pickle can run "
                "anything, so the file is not read; save the model again from its own program"
            )
        if (module, name) not in self._made:
            self._made[module, name] = type(name, (_Kept,), {"kind": name})
        return self._made[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise _DamagedError("it refers to objects elsewhere")


def _tensors(root: object) -> dict[str, DcpTensor]:
    table = _state(root, "Metadata")
    described, stored = table.get("state_dict_metadata"), table.get("storage_data")
    if type(described) is not dict or type(stored) is not dict:
        raise _DamagedError("it lists no tensors")
    places: dict[tuple[str, tuple[int, ...]], Mapping[str, Any]] = {}
    for index, info in stored.items():
        key = _state(index, "MetadataIndex")
        if key.get("offset") is not None:
            places[_text(key.get("fqn")), _sizes(key["offset"])] = _state(info, "_StorageInfo")
    found: dict[str, DcpTensor] = {}
    for name, item in described.items():
        if isinstance(item, _Kept) and item.kind == "TensorStorageMetadata":
            text = _text(name)
            found[text] = _tensor(text, _state(item, item.kind), places)
    return found


def _tensor(
    name: str, item: Mapping[str, Any], places: Mapping[tuple[str, tuple[int, ...]], Mapping[str, Any]]
) -> DcpTensor:
    shape, chunks = _sizes(item.get("size")), item.get("chunks")
    if type(chunks) is not list:
        raise _DamagedError(f"{name} has no list of chunks")
    found = []
    for each in chunks:
        box = _state(each, "ChunkStorageMetadata")
        offsets, sizes = _sizes(box.get("offsets")), _sizes(box.get("sizes"))
        if not len(offsets) == len(sizes) == len(shape) or any(
            offset + size > most for offset, size, most in zip(offsets, sizes, shape, strict=True)
        ):
            raise _DamagedError(f"a chunk of {name} lies outside of it")
        place = places.get((name, offsets))
        if place is None:
            raise _DamagedError(f"a chunk of {name} is in no file")
        found.append(_chunk(name, offsets, sizes, place))
    # Together with the mask of `terrace.model.dcp.reading`, this says that each element is there once.
    if sum(prod(chunk.shape) for chunk in found) != prod(shape):
        raise _DamagedError(f"the chunks of {name} do not cover it once")
    return DcpTensor(shape=shape, dtype=_dtype(item.get("properties")), chunks=tuple(found))


def _chunk(name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], place: Mapping[str, Any]) -> Chunk:
    if place.get("transform_descriptors"):
        raise ModelError(
            f"{name} was written through a transform of DCP (transform_descriptors), which is not read: save it "
            "without extensions"
        )
    file, position, length = _text(place.get("relative_path")), place.get("offset"), place.get("length")
    # A name must not lead out of the folder.
    if os.path.basename(file) != file or file in ("", ".", ".."):
        raise _DamagedError(f"{name} is in {file}, which is no file of the folder")
    if type(position) is not int or type(length) is not int or position < 0 or length < 0:
        raise _DamagedError(f"{name} has no place in {file}")
    return Chunk(offsets=offsets, shape=sizes, file=file, position=position, num_bytes=length)


def _state(value: object, kind: str) -> Mapping[str, Any]:
    if not isinstance(value, _Kept) or value.kind != kind or type(value.state) is not dict:
        raise _DamagedError(f"a {kind} is missing")
    return value.state


def _dtype(properties: object) -> str:
    # The state of TensorProperties is a tuple, which begins with the dtype: pickled as its name.
    if not isinstance(properties, _Kept) or type(properties.state) is not tuple or not properties.state:
        raise _DamagedError("a tensor has no dtype")
    dtype = properties.state[0]
    if not (isinstance(dtype, type) and issubclass(dtype, _Kept)):
        raise _DamagedError("a tensor has no dtype")
    return _DTYPES.get(dtype.kind, dtype.kind)


def _sizes(value: object) -> tuple[int, ...]:
    # torch.Size is pickled as a call with one tuple.
    if not isinstance(value, _Kept) or value.kind != "Size" or len(value.args) > 1:
        raise _DamagedError("a size is missing")
    sizes = value.args[0] if value.args else ()
    if type(sizes) is not tuple or not all(type(each) is int and 0 <= each < 2**48 for each in sizes):
        # Its text could be far longer than the file: a tuple may hold one object twice, which holds another twice.
        raise _DamagedError("a size has other parts than whole numbers of elements")
    return sizes


def _text(value: object) -> str:
    if type(value) is not str or not value.isprintable():
        shown = repr(value[:40]) if type(value) is str else f"an object ({type(value).__name__})"
        raise _DamagedError(f"{shown} is no name")
    return value
