"""Writing checkpoints: every rank writes its pieces and their list, rank 0 the manifest, then renames the folder.

    .step-00000100.partial/    made by every rank: its rank-00007.safetensors and, once that is synced, rank-00007.json
    step-00000100/             rank 0 has joined the small files into manifest.json, and renamed the folder

At any instant the folder holds either the earlier checkpoints, or these and the new one, all complete.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from terrace.base.errors import CheckpointError
from terrace.base.files import sync_folder, write_atomic
from terrace.checkpoint.layout import Files, complete, encode, folder_of, manifest_of, step_of
from terrace.checkpoint.parts import slices_of
from terrace.checkpoint.snapshot import Snapshot
from terrace.runtime.engine import Engine
from terrace.runtime.model_state import ModelState

_REPLACED = ".replaced"


def save(engine: Engine, run_folder: Path, step: int, facts: Mapping[str, Any], keep: int) -> Path:
    """Write a checkpoint of all ranks and return its folder. Every rank calls this after `engine.drain()`.

    The newest `keep` checkpoints stay. Raises `CheckpointError` on every rank when any of them could not
    write; earlier checkpoints are untouched then, and no partial file is left.
    """
    folder = folder_of(run_folder, step)
    partial = partial_of(folder)

    def agree(problem: str | None) -> None:
        failed = [f"rank {rank}: {why}" for rank, why in enumerate(engine.comm.exchange(problem)) if why is not None]
        if failed:
            if engine.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(not_written(folder, failed[0]))

    agree(attempt(lambda: clear_leftovers(folder.parent)) if engine.rank == 0 else None)
    snapshot = snapshot_of(engine.state)
    snapshot.take()
    agree(attempt(lambda: write_part(snapshot, partial, engine.rank)))
    agree(attempt(lambda: commit(engine.state, partial, folder, step, facts, keep)) if engine.rank == 0 else None)
    return folder


def snapshot_of(state: ModelState) -> Snapshot:
    """The part of the model's state that this rank writes."""
    return Snapshot(state, slices_of(state.program.mesh, state.rank))


def partial_of(folder: Path, life: str = "") -> Path:
    """The folder of an incomplete checkpoint; `life` keeps runs of the same folder apart."""
    return folder.with_name(f".{folder.name}.{life}{'.' * bool(life)}partial")


def part_of(partial: Path, rank: int) -> Path:
    """The file that lists the pieces of a rank; it exists once they are on disk."""
    return partial / f"rank-{rank:05d}.json"


def not_written(folder: Path, why: str) -> str:
    """The message of a save that failed."""
    return (
        f"cannot write a checkpoint in {folder.parent} ({why}): free space or name another --folder; "
        "earlier checkpoints are untouched"
    )


def attempt(work: Callable[[], object]) -> str | None:
    """Run `work`; returns the reason of a file error, None without one."""
    try:
        work()
    except OSError as error:
        return error.strerror or str(error)
    return None


def write_part(snapshot: Snapshot, partial: Path, rank: int) -> None:
    """Write the snapshot of a rank. Raises `OSError`."""
    partial.mkdir(parents=True, exist_ok=True)
    part, files = part_of(partial, rank), {}
    if snapshot.pieces:
        path = part.with_suffix(".safetensors")
        files[path.name] = snapshot.write(path)
    write_atomic(part, json.dumps({"num_updates": snapshot.num_updates, "files": files}))


def commit(state: ModelState, partial: Path, folder: Path, step: int, facts: Mapping[str, Any], keep: int) -> None:
    """Join the parts of all ranks, rename the folder into place and remove old checkpoints. Raises `OSError`."""
    files: Files = {}
    num_updates = 0
    for rank in range(state.program.cluster.world_size):
        path = part_of(partial, rank)
        part = json.loads(path.read_text(encoding="utf-8"))
        files |= part["files"]
        num_updates = max(num_updates, part["num_updates"])
        path.unlink()
    manifest = manifest_of(state.specs, state.settings, step, num_updates, facts, files)
    write_atomic(partial / "manifest.json", encode(manifest))
    sync_folder(partial)
    if folder.exists():
        folder.rename(folder.with_name(f".{folder.name}{_REPLACED}"))
    partial.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(folder.with_name(f".{folder.name}{_REPLACED}"), ignore_errors=True)
    # Newer checkpoints may be damaged, if the run resumed before them: they are neither counted nor removed.
    earlier = [path for path in complete(folder.parent) if step_of(path) <= step]
    for old in earlier[:-keep] + [path for path in earlier[-keep:] if step_of(path) == 0 < step]:
        shutil.rmtree(old, ignore_errors=True)


def clear_leftovers(checkpoints: Path) -> None:
    """Make the folder of checkpoints and remove the remains of interrupted saves. Raises `OSError`."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    for left in checkpoints.glob(f".step-*{_REPLACED}"):
        whole = left.with_name(left.name.removeprefix(".").removesuffix(_REPLACED))
        if not whole.exists():  # interrupted between the two renames of `commit`
            left.rename(whole)
    for left in checkpoints.glob(".step-*"):
        shutil.rmtree(left)
