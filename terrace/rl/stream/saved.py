"""Saves the state of a stream beside a checkpoint: responses that no step has learned from yet.

The file is safetensors. The checkpoint's facts hold its digest, so a file that is damaged or from another step is
rejected.
"""

import re
from collections.abc import Collection, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from terrace.base.errors import CheckpointError
from terrace.base.files import write_atomic
from terrace.base.foreign import read_file
from terrace.checkpoint.layout import folder_name
from terrace.rl.values.ragged import Ragged, offsets_of, row_sums
from terrace.rl.values.rows import Rows
from terrace.rl.workers.drawing import BEGUN

_OFFSETS = "offsets"
_NAME = re.compile(r"step-(\d{8,})\.\d+\.safetensors")
_MOST_BYTES = 16 << 30


def state_file(folder: Path, updates: int, step: int) -> Path:
    """Path of the state that belongs to the checkpoint after `updates` updates.

    The name includes `step`: after a step without updates, the new checkpoint replaces one with the same number, whose
    state must not be overwritten.
    """
    return folder / f"{folder_name(updates)}.{step}.safetensors"


def clear_states(newest: Path, kept: Collection[int]) -> None:
    """Remove states of checkpoints not in `kept` (numbers of updates), and stale states with the number of `newest`.

    Other files in the folder are left alone.
    """
    (own,) = _NAME.findall(newest.name)  # a file of `state_file`
    for path in newest.parent.iterdir():
        found = _NAME.fullmatch(path.name)
        if found is None or path == newest or path.is_symlink() or not path.is_file():
            continue
        if int(found[1]) not in kept or found[1] == own:
            path.unlink(missing_ok=True)


def write_state(path: Path, place: int, rows: Rows) -> dict[str, Any]:
    """Write a stream's state (`Stream.state`). Returns the facts with which `read_state` verifies it."""
    tensors = {name: column for name, column in rows.columns.items() if isinstance(column, Tensor)}
    tensors |= {name: column.values for name, column in rows.columns.items() if isinstance(column, Ragged)}
    tensors[_OFFSETS] = rows.ragged(BEGUN[0]).offsets
    content = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    try:
        write_atomic(path, content)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}, the responses under way: {error.strerror or error}; free space, or "
            "move away what is there"
        ) from error
    return {"place": place, "sha256": sha256(content).hexdigest()}


def read_state(path: Path, facts: Mapping[str, Any]) -> tuple[int, Rows]:
    """Read a state of `write_state`, for `Stream.restore`; raises `CheckpointError` if it is damaged or missing."""
    try:
        content = read_file(path, path.parent, _MOST_BYTES)
        if sha256(content).hexdigest() != facts["sha256"]:
            raise CheckpointError(
                f"{path} is damaged: its digest is not that of its checkpoint; resume from another checkpoint"
            )
        tensors: dict[str, Tensor] = load(content)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}, the responses under way of a checkpoint: {error}") from error
    offsets = kept = tensors.pop(_OFFSETS)
    columns: dict[str, Any] = dict(tensors)
    if "emitted" in tensors:
        columns["emitted"] = Ragged(tensors["emitted"], offsets)
        kept = offsets_of(row_sums(tensors["emitted"].long(), offsets))
    columns |= {name: Ragged(tensors[name], offsets if name == BEGUN[0] else kept) for name in BEGUN}
    return int(facts["place"]), Rows(columns)
