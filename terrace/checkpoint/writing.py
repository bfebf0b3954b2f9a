"""Writes checkpoints: every rank its pieces and their list, rank 0 the manifest; then rank 0 renames the folder.

    .step-00000100.partial/    made by every rank: its rank-00007.safetensors and, once that is synced, rank-00007.json
    step-00000100/             rank 0 has joined the small files into manifest.json, and renamed the folder

At any moment the parent folder holds the earlier checkpoints, or these and the new one, all complete.
"""

import errno
import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrace.base.errors import CheckpointError
from terrace.base.files import sync_folder, write_atomic
from terrace.checkpoint.islands import Islands
from terrace.checkpoint.layout import (
    LOSS_SCALE,
    Files,
    complete,
    encode,
    folder_name,
    folder_of,
    form_of,
    manifest_of,
    step_of,
)
from terrace.checkpoint.parts import choices_of, numbers_of, slices_of
from terrace.checkpoint.residuals import digest, file_of
from terrace.checkpoint.snapshot import Snapshot
from terrace.runtime.model_state import ModelState

if TYPE_CHECKING:
    from terrace.runtime.engine import Engine

_REPLACED = ".replaced"
_LEFT = re.compile(r"\.step-\d{8,18}\.(.+\.)?(partial|removed|replaced)")  # a run writes no others


def save(engine: "Engine", run_folder: Path, step: int, facts: Mapping[str, Any], keep: int) -> Path:
    """Write a checkpoint of all ranks and return its folder. Every rank calls this after `engine.drain()`.

    Keeps the newest `keep` checkpoints, or all if 0. Raises `CheckpointError` on every rank if any rank could not
    write; earlier checkpoints are then untouched and no partial file is left.
    """
    folder = folder_of(run_folder, step)
    partial = partial_of(folder)

    def agree(problem: str) -> None:
        failed = [f"rank {rank}: {why}" for rank, why in enumerate(engine.comm.exchange(problem)) if why]
        if failed:
            if engine.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(not_written(folder, failed[0]))

    # All ranks agree after each phase, so that none continues after another has failed.
    agree(attempt(lambda: clear_leftovers(folder.parent)) if engine.rank == 0 else "")
    snapshot = snapshot_of(engine.state)
    snapshot.take()
    agree(attempt(lambda: write_part(snapshot, partial, engine.rank)))
    agree(attempt(lambda: commit(engine.state, partial, folder, step, facts, keep)) if engine.rank == 0 else "")
    return folder


def snapshot_of(state: ModelState) -> Snapshot:
    program = state.program
    is_first = not any(program.model.stage_layout.coordinates(state.rank))
    beside = [*(choices_of(program, state.choices) if is_first else ()), *numbers_of(state.outer_numbers)]
    slices, staging = slices_of(program.mesh, state.rank), state.below.staging
    return Snapshot(state, slices, beside, state.edges.values(), state.loss_scale, staging)


def partial_of(folder: Path, life: str = "") -> Path:
    """Folder of an incomplete checkpoint; `life` distinguishes runs in the same folder."""
    return folder.with_name(f".{folder.name}.{life}{'.' * bool(life)}partial")


def part_of(partial: Path, rank: int) -> Path:
    """The file that lists a rank's pieces; it exists once they are on disk."""
    return partial / f"rank-{rank:05d}.json"


def not_written(folder: Path, why: str) -> str:
    return (
        f"cannot write a checkpoint in {folder.parent} ({why}): free space or name another --folder; "
        "earlier checkpoints are untouched"
    )


def attempt(work: Callable[[], object]) -> str:
    """Run `work`. Returns the reason of an `OSError`, or ""."""
    try:
        work()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return ""


def write_part(snapshot: Snapshot, partial: Path, rank: int) -> None:
    """Write a rank's snapshot. Raises `OSError`."""
    partial.mkdir(parents=True, exist_ok=True)
    part, files = part_of(partial, rank), {}
    # A rank that is nowhere the first holder, and has no residuals, writes an empty list and no file of tensors.
    if snapshot.num_bytes:
        path = partial / file_of(rank)
        files[path.name] = snapshot.write(path)
    # Written last: its existence says that the tensors are on disk.
    write_atomic(part, json.dumps({"num_updates": snapshot.num_updates, "files": files, **snapshot.loss_scale}))


def commit(
    state: ModelState,
    partial: Path,
    folder: Path,
    step: int,
    facts: Mapping[str, Any],
    keep: int,
    best: int = -1,
) -> None:
    """Join the parts of all ranks, rename the folder into place and remove old checkpoints. Raises `OSError`.

    The newest `keep` checkpoints and the one after step `best` (-1: none) are kept; all if `keep` is 0.
    """
    files: Files = {}
    num_updates = 0
    for rank in range(state.program.cluster.world_size):
        path = part_of(partial, rank)
        part = json.loads(path.read_text(encoding="utf-8"))
        files |= part["files"]
        # A rank with only frozen parameters has made no updates.
        num_updates = max(num_updates, part["num_updates"])
        # The manifest takes the place of the lists.
        path.unlink()
    islands = Islands.of(state.program)
    manifest = manifest_of(state.specs, state.settings, step, num_updates, facts, files, islands)
    manifest |= {"feedback": digest(state.program), **form_of(state.program.plan, state.specs)}
    if LOSS_SCALE in part:  # the same on all ranks
        manifest[LOSS_SCALE] = part[LOSS_SCALE]
    write_atomic(partial / "manifest.json", encode(manifest))
    sync_folder(partial)
    # A run that resumed before this checkpoint replaces it. A rename onto a folder fails unless it is empty, so the
    # old one moves aside first.
    aside = folder.with_name(f".{folder.name}{_REPLACED}")
    if folder.exists():
        if not _is_own(folder) and any(folder.iterdir()):
            raise OSError(errno.EEXIST, f"{folder.name} is there and no checkpoint of a run: move it away")
        _move(folder, aside)
    partial.rename(folder)
    # The rename must survive a crash before the old checkpoint is removed.
    sync_folder(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)
    if not keep:
        return
    # Newer checkpoints may be damaged, if the run resumed before them: they are neither counted nor removed.
    earlier = [path for path in complete(folder.parent) if step_of(path) <= step and _is_own(path)]
    for old in earlier[:-keep] + [path for path in earlier[-keep:] if step_of(path) == 0 < step]:
        if step_of(old) != best:
            remove(old)


def _is_own(folder: Path) -> bool:
    """Whether a run wrote this folder; a user may have created others beside it."""
    has_part = (folder / "manifest.json").is_file() or any(folder.glob("rank-*.safetensors"))
    return folder.name == folder_name(step_of(folder)) and has_part


def remove(folder: Path) -> None:
    """Remove a folder if it is a checkpoint.

    An interruption leaves no damaged checkpoint, only a hidden folder for `clear_leftovers`.
    """
    if not _is_own(folder):
        return
    hidden = folder.with_name(f".{folder.name}.removed")
    with suppress(OSError):
        _move(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _move(folder: Path, hidden: Path) -> None:
    # What an interruption left there, of the same step, would be in the way.
    if hidden.exists():
        shutil.rmtree(hidden)
    folder.rename(hidden)


def clear_leftovers(checkpoints: Path) -> None:
    """Create the folder of checkpoints and remove the remains of interrupted saves. Raises `OSError`."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    for left in checkpoints.glob(f".step-*{_REPLACED}"):
        whole = left.with_name(left.name.removeprefix(".").removesuffix(_REPLACED))
        # Interrupted between the two renames of `commit`.
        if not whole.exists():
            left.rename(whole)
    for left in checkpoints.iterdir():
        if _LEFT.fullmatch(left.name) and left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
