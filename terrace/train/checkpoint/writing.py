"""Writing a checkpoint: every rank its own pieces, then rank 0 the manifest and the rename."""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from terrace.base.errors import CheckpointError
from terrace.base.files import sync_folder, write_atomic
from terrace.runtime.engine import Engine
from terrace.runtime.shard import Shard
from terrace.train.checkpoint.boxes import to_text
from terrace.train.checkpoint.layout import Files, complete, encode, file_sha256, folder_of, manifest_of, tensor_name
from terrace.train.checkpoint.parts import Slices, held, parts, slices_of


def save(engine: Engine, run_folder: Path, step: int, facts: Mapping[str, Any], keep: int) -> Path:
    """Write a checkpoint of all ranks and return its folder. Every rank calls this after `engine.drain()`.

    The newest `keep` checkpoints stay. Raises `CheckpointError` on every rank when any of them could not
    write; what was there before is untouched then, and nothing half-written is left.
    """
    folder = folder_of(run_folder, step)
    partial = folder.with_name(f".{folder.name}.partial")
    problem = _attempt(lambda: _make_empty(partial)) if engine.rank == 0 else None
    _agree(engine, problem, partial)
    own: Files = {}
    problem = _attempt(lambda: own.update(_write_own(engine, partial)))
    files = {name: entry for part in _agree(engine, problem, partial, own) for name, entry in part.items()}
    problem = None
    if engine.rank == 0:
        manifest = encode(manifest_of(engine.whole, step, _num_updates(engine), facts, files))
        problem = _attempt(lambda: _commit(partial, folder, manifest, keep))
    _agree(engine, problem, partial)
    return folder


def write_pieces(path: Path, shards: Iterable[Shard], slices: Slices) -> Files:
    """Write the pieces that a rank is the first to hold into a file; return its entry for the manifest.

    `slices` says what the rank holds of each parameter. Without a piece there is no file. Raises `OSError` and
    `SafetensorError`.
    """
    tensors: dict[str, Tensor] = {}
    pieces: dict[str, dict[str, list[str]]] = {}
    for shard in shards:
        for part in (part for own in held(shard) if own.is_first for part in parts(own, slices)):
            pieces.setdefault(shard.name, {}).setdefault(part.parameter, []).append(to_text(part.box))
            for kind, values in part.values.items():
                # A copy, since safetensors refuses tensors that share a storage.
                copy = values.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                tensors[tensor_name(shard.name, part.parameter, part.box, kind)] = copy
    if not tensors:
        return {}
    save_file(tensors, path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return {path.name: {"sha256": file_sha256(path), "num_bytes": path.stat().st_size, "pieces": pieces}}


def _write_own(engine: Engine, partial: Path) -> Files:
    shards = (shard for state in engine.states for shard in state.shards)
    slices = slices_of(engine.program.tensor, engine.rank)
    return write_pieces(partial / f"rank-{engine.rank:05d}.safetensors", shards, slices)


def _num_updates(engine: Engine) -> int:
    shards = [shard for state in engine.states for shard in state.shards]
    return max((shard.optimizer.num_steps for shard in shards if shard.optimizer is not None), default=0)


def _make_empty(partial: Path) -> None:
    """Make the folder, and remove what saves that were cut short have left."""
    for left in partial.parent.glob(".step-*"):
        shutil.rmtree(left)
    partial.mkdir(parents=True)


def _commit(partial: Path, folder: Path, manifest: str, keep: int) -> None:
    write_atomic(partial / "manifest.json", manifest)
    sync_folder(partial)
    if folder.exists():
        folder.rename(folder.with_name(f".{folder.name}.replaced"))
    partial.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(folder.with_name(f".{folder.name}.replaced"), ignore_errors=True)
    for old in complete(folder.parent)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def _attempt(work: Callable[[], object]) -> str | None:
    try:
        work()
    except (OSError, safetensors.SafetensorError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def _agree(engine: Engine, problem: str | None, partial: Path, own: Files | None = None) -> list[Files]:
    """Exchange what each rank wrote; when any failed, clean up and raise the same error on all."""
    answers = engine.exchange((engine.rank, problem, own))
    failed = [(rank, why) for rank, why, _ in answers if why is not None]
    if failed:
        if engine.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        rank, why = failed[0]
        raise CheckpointError(
            f"cannot write a checkpoint in {partial.parent} (rank {rank}: {why}): free space or name another --folder; "
            "earlier checkpoints are untouched"
        )
    return [files for _, _, files in answers if files is not None]
