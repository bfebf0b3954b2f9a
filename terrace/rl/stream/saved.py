"""The state of a stream in a file beside a checkpoint: responses that no step has learned from yet.

Tensors alone, in safetensors. The checkpoint's facts have the file's digest, so a file that is damaged, or of another
step, is refused.
"""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from terrace.base.errors import CheckpointError
from terrace.base.files import write_atomic
from terrace.base.foreign import read_file
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows
from terrace.rl.workers.drawing import BEGUN

_OFFSETS = "offsets"
_MOST_BYTES = 16 << 30


def write_state(path: Path, place: int, rows: Rows) -> dict[str, Any]:
    """Write a stream's state (`Stream.state`) and return the facts that `read_state` checks it by."""
    tensors = {name: rows.tensor(name) for name in ("groups", "finish")}
    tensors |= {name: rows.ragged(name).values for name in BEGUN} | {_OFFSETS: rows.ragged(BEGUN[0]).offsets}
    content = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    write_atomic(path, content)
    return {"place": place, "sha256": sha256(content).hexdigest()}


def read_state(path: Path, facts: Mapping[str, Any]) -> tuple[int, Rows]:
    """The state that `write_state` wrote, as `Stream.restore` takes it; raises `CheckpointError` for another file."""
    try:
        content = read_file(path, path.parent, _MOST_BYTES)
        if sha256(content).hexdigest() != facts["sha256"]:
            raise CheckpointError(
                f"{path} is damaged: its digest is not that of its checkpoint; remove that checkpoint to resume from "
                "the one before"
            )
        tensors: dict[str, Tensor] = load(content)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}, the responses under way of a checkpoint: {error}") from error
    offsets = tensors[_OFFSETS]
    columns: dict[str, Any] = {name: tensors[name] for name in ("groups", "finish")}
    return int(facts["place"]), Rows(columns | {name: Ragged(tensors[name], offsets) for name in BEGUN})
