"""Writes the weights of a model to a Hugging Face folder.

Writing is deterministic: equal values give folders with equal bytes.
"""

import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from terrace.base.errors import ModelError, did_you_mean
from terrace.base.files import folder_atomic, respect_umask, write_atomic
from terrace.model.config import ModelConfig, to_table
from terrace.model.hf.checksums import checksums_of, sort_metadata
from terrace.model.hf.config import published_table
from terrace.model.hf.folder import CONFIG, INDEX, SINGLE, carried_files, quantisation, token_ids
from terrace.model.hf.names import StoredTensor, sources, stored_bytes

SHARD_BYTES = 5_000_000_000  # file size limit of transformers
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def check_new(folder: Path) -> None:
    """Raise `ModelError` for a folder that is not empty, or a path that is a file."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} is there and not an empty folder: name a new one")


def write_pretrained(
    folder: str | Path,
    config: ModelConfig,
    value: Callable[[str, str], Tensor],
    dtype: str,
    *,
    shard_bytes: int = SHARD_BYTES,
    source: str | Path | None = None,
    end_of_text: int | None = None,
    carried: Mapping[str, bytes] | None = None,
    ids: Mapping[str, int | None] | None = None,
) -> list[str]:
    """Write a folder for `transformers` atomically, and return the names of its files.

    `value` returns the whole parameter of (block, parameter); it is called once for each, in the order of blocks, and
    one shard is in memory at a time. `dtype` is fp32, bf16, fp16 or fp64. Tokenizer files and generation_config.json
    are copied from the folder `source`, and the BOS, EOS and padding ids from its config.json; without it, the EOS id
    is `end_of_text`. `carried` (files) and `ids` (keys of config.json) override these. Raises `ModelError` for a folder
    that is not empty or cannot be written, for values beyond the range of `dtype`, and for a model that its family's
    config.json cannot describe.
    """
    folder = Path(folder)
    if dtype not in DTYPES:
        raise ModelError(f"dtype = {dtype!r} is not known{did_you_mean(dtype, DTYPES)}")
    if shard_bytes < 1:
        raise ModelError(f"shard_bytes = {shard_bytes} must be at least 1")
    check_new(folder)
    if source is not None and (packed := quantisation(Path(source))):
        warnings.warn(f"{source} has weights in {packed}; they are written as {dtype}, without it", stacklevel=2)
    tokens = {**token_ids(source, end_of_text), **(ids or {})}
    table = published_table(to_table(config), str(DTYPES[dtype]).removeprefix("torch."), tokens)
    others: dict[str, str | bytes] = {CONFIG: _json(table), **carried_files(source, end_of_text), **(carried or {})}
    shards = _shards(config, DTYPES[dtype].itemsize, shard_bytes)
    try:
        with folder_atomic(folder) as made:
            if len(shards) > 1:
                files = {name: file for file, tensors in shards.items() for name in tensors}
                metadata = {"total_size": stored_bytes(config, DTYPES[dtype].itemsize)}
                others[INDEX] = _json({"metadata": metadata, "weight_map": dict(sorted(files.items()))})
            once = _Once(value)
            for file, tensors in shards.items():
                _write_shard(made / file, {n: _stored(parts, once, dtype) for n, parts in tensors.items()}, others)
            for name, content in others.items():
                write_atomic(made / name, content)
    except OSError as error:
        raise ModelError(f"cannot write {folder}: {error.strerror or error}") from error
    return sorted([*shards, *others])


# For one stored tensor: (block, parameter, index in a stack, location) of each of its parts, in order
Parts = list[tuple[str, str, int, StoredTensor]]


class _Once:
    # Caches the last value, since the tensors of a stack are consecutive, possibly in several shards.
    def __init__(self, value: Callable[[str, str], Tensor]) -> None:
        self._value, self._last = value, ("", "")
        self._held = torch.empty(0)

    def __call__(self, block: str, param: str) -> Tensor:
        if (block, param) != self._last:
            self._held, self._last = self._value(block, param), (block, param)
        return self._held


def stored_parts(config: ModelConfig) -> dict[str, Parts]:
    """Parts of each tensor in a model's files, by name, in the order of blocks."""
    tensors: dict[str, Parts] = {}
    for (block, param), source in sources(config).items():
        for index, name in enumerate(source.tensors):
            tensors.setdefault(name, []).append((block, param, index, source))
    # Parts of a fused tensor (query, key, value) are joined in their stored order.
    return {name: sorted(parts, key=lambda each: each[3].part) for name, parts in tensors.items()}


def _shards(config: ModelConfig, item: int, shard_bytes: int) -> dict[str, dict[str, Parts]]:
    tensors = stored_parts(config)
    shards: list[dict[str, Parts]] = [{}]
    held = 0
    for name, parts in tensors.items():
        size = parts[0][3].nbytes(item)
        # A tensor is never split, so one larger than the limit has a shard of its own.
        if shards[-1] and held + size > shard_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = parts
        held += size
    # One file has the name that transformers looks for, and no index.
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, start=1)}


def _stored(parts: Parts, value: Callable[[str, str], Tensor], dtype: str) -> Tensor:
    _, _, index, source = parts[0]
    values = [value(block, param) for block, param, _, _ in parts]
    if source.num_stacked:
        values = [values[0][index]]
    dtype = "fp32" if source.wide and DTYPES[dtype].itemsize < 4 else dtype
    return joined([rounded(each, dtype, source.tensors[index]) for each in values], source)


def rounded(value: Tensor, dtype: str, name: str) -> Tensor:
    """Convert the tensor `name` to `dtype`. Raises `ModelError` if its values exceed the range of `dtype`."""
    found = value.to(DTYPES[dtype])
    # Infinities that were there before the conversion are accepted.
    if found.isinf().any() and not value.isinf().any():
        wider = "bf16 or fp32" if dtype == "fp16" else "fp64"
        raise ModelError(f"{name} has values beyond what {dtype} holds: write {wider}")
    return found


def joined(parts: list[Tensor], source: StoredTensor) -> Tensor:
    """Join parts in Terrace's layout to the tensor of a file, contiguous and with storage of exactly its size."""
    whole, rows = parts[0], int(source.is_stack)
    if source.num_groups == 1:
        whole = torch.cat(parts, rows) if source.parts else whole
    elif source.parts:
        grouped = [part.reshape(*part.shape[:rows], source.num_groups, -1, *part.shape[rows + 1 :]) for part in parts]
        whole = torch.cat(grouped, rows + 1).flatten(rows, rows + 1)
    whole = (whole.mT if source.transposed else whole).contiguous()
    whole = whole.view(source.shape) if source.is_flat else whole
    # safetensors cannot store a view of a larger tensor.
    return whole if whole.untyped_storage().nbytes() == whole.nbytes else whole.clone()


def _write_shard(path: Path, tensors: dict[str, Tensor], others: Mapping[str, str | bytes]) -> None:
    try:
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt", **checksums_of(tensors, others)})
        sort_metadata(path)
    except safetensors.SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error
    respect_umask(path)
    with path.open("rb+") as file:
        # On disk before the rename makes it visible.
        os.fsync(file.fileno())


def _json(table: Mapping[str, Any]) -> str:
    return json.dumps(table, indent=2, sort_keys=True) + "\n"
