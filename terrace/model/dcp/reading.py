"""Reads a DCP folder through the interface of an open safetensors file.

A tensor is assembled from its chunks, each written by `torch.save` (`terrace.model.dcp.stored_tensor`).
"""

import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from terrace.model.dcp.pickled import OF_PICKLE, DamagedError
from terrace.model.dcp.stored_tensor import read_tensor
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
        """Lazy tensor, read when it is indexed."""
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
