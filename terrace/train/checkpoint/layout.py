"""What a checkpoint is on disk. It knows nothing of the plan.

A checkpoint is a folder `step-00000100` with a `manifest.json` and safetensors files. Each file holds
pieces: boxes of whole parameters, as tensors of the box's shape named `block/parameter[0:4,8:16]/kind`. So any rank
of any plan finds what it needs by intersecting boxes. Of a trainable parameter the master value and both moments
are stored; of a frozen one the value. Padding is not stored, and no element twice. The manifest has

    layout   block -> parameter -> [trainable or frozen, shape of the whole parameter]
    files    file -> its size, its SHA-256 and its pieces: block -> parameter -> boxes

and, in `checksum`, the SHA-256 of its own other entries. A checkpoint is written into a hidden folder beside it,
synced, and renamed: it is there whole or not at all.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from terrace.base.errors import CheckpointError
from terrace.model.spec import BlockSpec
from terrace.train.checkpoint.boxes import Box, to_text

FORMAT = 2
TRAINABLE, FROZEN = "trainable", "frozen"
KINDS = {TRAINABLE: ("master", "exp_avg", "exp_avg_sq"), FROZEN: ("frozen",)}

Group = str  # trainable or frozen
BlockLayout = dict[str, tuple[Group, list[int]]]  # parameter -> group, shape
Files = dict[str, dict[str, Any]]  # file -> its entry in the manifest


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
    """Return the group and the shape of every parameter of whole blocks."""
    return {
        block.name: {
            param.name: (TRAINABLE if param.trainable and param.numel else FROZEN, list(param.shape))
            for param in block.params
        }
        for block in blocks
    }


def tensor_name(block: str, parameter: str, box: Box, kind: str) -> str:
    """Return the name of a piece in its file."""
    return f"{block}/{parameter}[{to_text(box)}]/{kind}"


def manifest_of(
    blocks: Sequence[BlockSpec], step: int, num_updates: int, facts: Mapping[str, Any], files: Files
) -> dict[str, Any]:
    """Return the manifest of a model's checkpoint; `blocks` are whole."""
    return {
        "format": FORMAT,
        "step": step,
        "num_updates": num_updates,
        "facts": dict(facts),
        "layout": block_layouts(blocks),
        "files": dict(sorted(files.items())),
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
    """Raise `CheckpointError` naming the first difference between a checkpoint's parameters and whole blocks."""
    here = block_layouts(blocks)
    for block in (*here, *theirs):
        stored, wanted = _parameters(theirs.get(block)), _parameters(here.get(block))
        for name in (*wanted, *stored):
            if stored.get(name) != wanted.get(name):
                raise CheckpointError(
                    f"{where} is of another model: {block}.{name} is {stored.get(name, 'absent')} there and "
                    f"{wanted.get(name, 'absent')} here; use the model and train.freeze it was saved with"
                )


def _parameters(layout: BlockLayout | None) -> dict[str, str]:
    """Return what each parameter of a block is, in words."""
    return {name: f"{group} {shape}" for name, (group, shape) in (layout or {}).items()}


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
