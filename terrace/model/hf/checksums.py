"""Checksums in the metadata of exported weights: CRC-32 of every tensor of a file, and of the files written with them.

Other programs ignore this metadata. Weights of others have none, and are read as they are.
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
    """Metadata of a file of `tensors` that is written with `files`, name -> content."""
    raw = {name: content.encode() if isinstance(content, str) else content for name, content in files.items()}
    tables = {
        _TENSORS: {name: _crc(tensor) for name, tensor in sorted(tensors.items())},
        _FILES: {name: checksum(content) for name, content in sorted(raw.items())},
    }
    return {key: json.dumps(table) for key, table in tables.items()}


def sort_metadata(path: Path) -> None:
    """Give the metadata of a file of weights a fixed order, which safetensors does not. Raises `OSError`."""
    with path.open("rb+") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        metadata = dict(sorted(header.pop("__metadata__").items()))
        text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":"), ensure_ascii=False)
        file.seek(8)
        # Spaces are the padding of the format. Other escapes would make another length: then the order stays.
        if len(text.encode()) <= size:
            file.write(text.encode().ljust(size))


class Checksums:
    """The checksums of a folder of weights; a tensor is compared with its own when it is first read."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._agrees = folder, set[str]()

    def check(self, file: Any, file_name: str, tensor: str) -> None:
        """Raise `ModelError` unless a tensor of an open file is as it was written."""
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
        """Warn of files that were written with an open file of weights and have changed since; a user may edit them."""
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
    except ValueError:  # of another program, or damaged: then the tensors are not
        return {}
    return found if isinstance(found, dict) else {}


def _crc(tensor: Tensor) -> str:
    flat = tensor.contiguous().flatten()
    # One element has the stride that it came with, and only elements at stride 1 can be viewed as bytes.
    return checksum(flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy().data)
