"""Checksums in the metadata of exported weights: CRC-32 of every tensor, and of the other files of the export.

Other programs ignore this metadata. Weights without it are read unchecked.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from terrace.base.errors import ModelError
from terrace.base.foreign import read_file
from terrace.base.parsing import parse_json
from terrace.base.sealed import checksum, warn_changed

_TENSORS, _FILES = "crc32", "crc32_of_files"


def checksums_of(tensors: Mapping[str, Tensor], files: Mapping[str, str | bytes]) -> dict[str, str]:
    """Metadata for a file of `tensors` in an export with other `files` (name -> content)."""
    raw = {name: content.encode() if isinstance(content, str) else content for name, content in files.items()}
    tables = {
        _TENSORS: {name: _crc(tensor) for name, tensor in sorted(tensors.items())},
        _FILES: {name: checksum(content) for name, content in sorted(raw.items())},
    }
    return {key: json.dumps(table) for key, table in tables.items()}


def sort_metadata(path: Path) -> None:
    """Sort the metadata of a safetensors file, whose order is otherwise random. Raises `OSError`."""
    with path.open("rb+") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        metadata = dict(sorted(header.pop("__metadata__").items()))
        text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":"), ensure_ascii=False)
        file.seek(8)
        # The format is padded with spaces. If other escapes make the text longer, the order stays.
        if len(text.encode()) <= size:
            file.write(text.encode().ljust(size))


class Checksums:
    """Verifies the checksums of a folder of weights, once for each tensor."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._agrees = folder, set[str]()

    def check(self, file: Any, file_name: str, tensor: str) -> None:
        """Raise `ModelError` if the checksum of a tensor in an open file differs."""
        if tensor in self._agrees:
            return
        wanted = _table(file, _TENSORS).get(tensor)
        if wanted is not None and _crc(file.get_tensor(tensor)) != wanted:
            raise ModelError(
                f"{self._folder / file_name} is damaged ({tensor} does not have its checksum): export the model again, "
                "or copy it again"
            )
        self._agrees.add(tensor)

    def check_others(self, file: Any) -> None:
        """Warn of other files of the export that have changed since, which a user may do on purpose."""
        for name, wanted in _table(file, _FILES).items():
            path = self._folder / str(name)
            if path.parent == self._folder and path.is_file() and _checksum(path) != wanted:
                warn_changed(path, "the weights were exported with another")


def _checksum(path: Path) -> str:
    try:
        return checksum(read_file(path, path.parent))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


def _table(file: Any, key: str) -> Mapping[str, Any]:
    try:
        found = parse_json((file.metadata() or {}).get(key, "{}"))
    except ValueError:  # written by another program, or damaged metadata
        return {}
    return found if isinstance(found, dict) else {}


def _crc(tensor: Tensor) -> str:
    flat = tensor.contiguous().flatten()
    # A view as bytes requires stride 1, but a tensor of one element may have any stride.
    return checksum(flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy().data)
