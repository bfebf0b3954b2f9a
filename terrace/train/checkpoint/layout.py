"""What a checkpoint is on disk. It knows nothing of the plan.

A checkpoint is a folder `step-00000100` with a `manifest.json` and safetensors files. Each file holds
pieces: ranges of the flat buffers of blocks, in unpadded element numbers. The order of parameters in a
flat buffer follows from the model alone, so any rank of any plan finds what it needs by intersecting
ranges. Of a trainable buffer the master parameters and both moments are stored; of a frozen one the
parameters.

A checkpoint is written into a hidden folder beside it, synced, and renamed: it is there whole or not at
all. The manifest carries the SHA-256 of every file and, in `checksum`, that of its own other entries.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from terrace.base.errors import CheckpointError
from terrace.model.spec import BlockSpec, ParamSpec

FORMAT = 1
TRAINABLE, FROZEN = "trainable", "frozen"
KINDS = {TRAINABLE: ("master", "exp_avg", "exp_avg_sq"), FROZEN: ("frozen",)}

Extent = tuple[str, tuple[int, ...], int, int]  # parameter, shape, start, stop
BlockLayout = dict[str, list[Extent]]  # trainable or frozen -> its flat buffer


def folder_of(run_folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return run_folder / "checkpoints" / f"step-{step:08d}"


def complete(checkpoints: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    if not checkpoints.is_dir():
        return []
    found = [path for path in checkpoints.iterdir() if re.fullmatch(r"step-\d+", path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def latest(run_folder: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None."""
    found = complete(run_folder / "checkpoints")
    return found[-1] if found else None


def checkpoint_bytes(num_trainable: int, num_frozen: int, master_bytes: int, compute_bytes: int) -> int:
    """Return the size of a checkpoint on disk, without headers."""
    return num_trainable * len(KINDS[TRAINABLE]) * master_bytes + num_frozen * compute_bytes


def block_layouts(blocks: Sequence[BlockSpec]) -> dict[str, BlockLayout]:
    """Return the flat buffers of every block, in the runtime's order: matrices, which decay, come first."""
    return {
        block.name: {
            TRAINABLE: _extents([param for param in block.params if param.trainable and param.numel]),
            FROZEN: _extents([param for param in block.params if not (param.trainable and param.numel)]),
        }
        for block in blocks
    }


def encode(manifest: Mapping[str, Any]) -> str:
    """Return the text of a manifest, with its checksum."""
    return json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1)


def decode(text: str) -> dict[str, Any]:
    """Read a manifest back; raises `ValueError` when it is damaged."""
    manifest = json.loads(text)
    if not isinstance(manifest, dict):
        raise ValueError("it holds no table")
    found = manifest.pop("checksum", None)
    if manifest.get("format") == FORMAT and found != _checksum(manifest):
        raise ValueError("its checksum differs")
    return manifest


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_model(where: Path, theirs: Mapping[str, BlockLayout], blocks: Sequence[BlockSpec]) -> None:
    """Raise `CheckpointError` naming the first difference between a checkpoint's parameters and a model's."""
    here = block_layouts(blocks)
    for block in (*here, *theirs):
        stored, wanted = _parameters(theirs.get(block)), _parameters(here.get(block))
        for name in (*wanted, *stored):
            if stored.get(name) != wanted.get(name):
                raise CheckpointError(
                    f"{where} is of another model: {block}.{name} is {stored.get(name, 'absent')} there and "
                    f"{wanted.get(name, 'absent')} here; use the model and train.freeze it was saved with"
                )
    if json.loads(json.dumps(here)) != theirs:
        raise CheckpointError(f"{where} lays its parameters out in another order: it is of another version of Terrace")


def _extents(params: list[ParamSpec]) -> list[Extent]:
    extents, start = [], 0
    for param in sorted(params, key=lambda param: not param.decays):
        extents.append((param.name, param.shape, start, start + param.numel))
        start += param.numel
    return extents


def _parameters(layout: BlockLayout | None) -> dict[str, str]:
    """Return what each parameter of a block is, in words."""
    groups = layout or {}
    return {name: f"{group} {list(shape)}" for group, extents in groups.items() for name, shape, _, _ in extents}


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
