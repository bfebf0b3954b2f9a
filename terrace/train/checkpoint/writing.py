"""Writing a checkpoint: every rank its own pieces, then rank 0 the manifest and the rename."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import save_file
from torch import Tensor

from terrace.base.errors import CheckpointError
from terrace.base.files import sync_folder, write_atomic
from terrace.runtime.engine import Engine
from terrace.train.checkpoint.layout import (
    FORMAT,
    FROZEN,
    KINDS,
    TRAINABLE,
    block_layouts,
    complete,
    encode,
    file_sha256,
    folder_of,
)
from terrace.train.checkpoint.reading import clipped

Files = dict[str, dict[str, Any]]  # file name -> its entry in the manifest


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
        manifest = encode(_manifest(engine, step, facts, files))
        problem = _attempt(lambda: _commit(partial, folder, manifest, keep))
    _agree(engine, problem, partial)
    return folder


def _write_own(engine: Engine, partial: Path) -> Files:
    """Write the pieces this rank is the first to hold; return the manifest's entry of its file."""
    tensors: dict[str, Tensor] = {}
    pieces: dict[str, list[tuple[str, int, int]]] = {group: [] for group in KINDS}

    def add(group: str, block: str, start: int, stop: int, sources: tuple[Tensor, ...]) -> None:
        if start == stop:
            return  # all padding
        pieces[group].append((block, start, stop))
        for kind, source in zip(KINDS[group], sources, strict=True):
            # A copy, since safetensors refuses tensors that share a storage.
            tensors[f"{block}/{kind}"] = source[: stop - start].detach().to("cpu", copy=True)

    for shard in (shard for state in engine.states for shard in state.shards):
        layout, coordinates = shard.layout, shard.coordinates
        if shard.trainable is not None and shard.optimizer is not None and not any(coordinates[layout.optimizer + 1 :]):
            held = (shard.optimizer.master, shard.optimizer.exp_avg, shard.optimizer.exp_avg_sq)
            add(TRAINABLE, shard.name, *clipped(shard.trainable, layout.optimizer), held)
        if shard.fixed is not None and not any(coordinates[layout.params + 1 :]):
            add(FROZEN, shard.name, *clipped(shard.fixed, layout.params), (shard.fixed.shard,))
    if not tensors:
        return {}
    path = partial / f"rank-{engine.rank:05d}.safetensors"
    save_file(tensors, path)
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return {path.name: {"sha256": file_sha256(path), "num_bytes": path.stat().st_size, **pieces}}


def _manifest(engine: Engine, step: int, facts: Mapping[str, Any], files: Files) -> dict[str, Any]:
    shards = [shard for state in engine.states for shard in state.shards]
    updates = [shard.optimizer.num_steps for shard in shards if shard.optimizer is not None]
    return {
        "format": FORMAT,
        "step": step,
        "num_updates": max(updates, default=0),
        "facts": dict(facts),
        "layout": block_layouts([state.spec for state in engine.states]),
        "files": dict(sorted(files.items())),
    }


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
