"""Residuals of error feedback in a checkpoint: a resume under the same plan needs them for the same bits.

A residual belongs to a rank, a block and a hop of its messages (terrace.comm.rounding), so no other plan can use it.
Each rank's file holds its own, beside its pieces, as `feedback/BLOCK/BUFFER/CLASS/TIER/LEG`; the manifest has a digest
of all that decides which residuals exist. Under another plan, and from a checkpoint without residuals, they are zero.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import safetensors
from torch import Tensor

from terrace.base.errors import CheckpointError
from terrace.comm.rounding import Hop
from terrace.plan.hops import RESIDUAL_BYTES
from terrace.plan.routes import residual_numels
from terrace.plan.wire import GRADIENTS, MessageClass
from terrace.program.program import Program
from terrace.runtime.flat_param import FlatParam
from terrace.runtime.model_state import ModelState

_PREFIX = "feedback"


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def named_residuals(flats: Iterable[FlatParam]) -> Iterator[tuple[str, Tensor]]:
    """Name in the file and residual, of those that messages have made so far."""
    for prefix, flat in _buffers(flats):
        for (message, tier, leg), values in flat.origin.residuals.items():
            yield f"{prefix}/{message.value}/{tier}/{leg}", values


def num_bytes(program: Program, flats: Iterable[FlatParam]) -> int:
    """Bytes of all residuals of a rank once each message has been sent; 0 for a plan without error feedback."""
    return RESIDUAL_BYTES * sum(
        sum(residual_numels(flat.layout, program.plan, flat.padded)) for flat in flats if flat.spec.trainable
    )


def digest(program: Program) -> str:
    """Digest of the parts of a plan that decide which residuals exist, and of which sums; "" without error feedback."""
    plan, cluster = program.plan, program.cluster
    wires = {message.value: dict(plan.wire.get(message.value, {})) for message in GRADIENTS}
    if not any(name.endswith("+feedback") for row in wires.values() for name in row.values()):
        return ""
    fields = (
        "params",
        "grads",
        "optimizer",
        "mapping",
        "compute",
        "master",
        "stages",
        "schedule",
        "micro_batch",
        "unit",
    )
    values = asdict(plan)
    table = {name: values[name] for name in fields}
    # Stacks of experts have buffers of their own, and each part of a gradient has residuals of its own.
    table |= {name: values[name] for name in ("experts", "expert_gaps") if values[name]}
    table |= {"wire": wires, "tiers": [(tier.name, tier.size) for tier in cluster.tiers]}
    return hashlib.sha256(json.dumps(table, sort_keys=True, default=list).encode()).hexdigest()[:16]


def restore_residuals(state: ModelState, folder: Path, stored: str) -> str:
    """Load this rank's residuals from a checkpoint's `folder`, whose manifest has the digest `stored`.

    Returns a note if the plan has residuals and the checkpoint has none of them. Raises `CheckpointError` for a file
    that cannot be read.
    """
    for flat in state:
        flat.origin.forget()
    wanted = digest(state.program)
    if not wanted:
        return ""
    if stored != wanted:
        why = "was saved under another plan" if stored else "has none"
        return f"residuals of error feedback start at zero, since {folder.name} {why}"
    path = folder / file_of(state.rank)
    if not path.is_file():
        return ""  # saved before the first step
    buffers = dict(_buffers(state))
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                if name.startswith(f"{_PREFIX}/"):
                    prefix, message, tier, leg = name.rsplit("/", 3)
                    buffers[prefix].origin.restore(_hop(message, tier, leg), file.get_tensor(name))
    except (OSError, safetensors.SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"cannot read the residuals of {path}: {error}") from error
    return ""


def _hop(message: str, tier: str, leg: str) -> Hop:
    return MessageClass(message), int(tier), leg


def _buffers(flats: Iterable[FlatParam]) -> Iterator[tuple[str, FlatParam]]:
    seen: dict[str, int] = {}
    for flat in flats:
        number = seen[flat.name] = seen.get(flat.name, -1) + 1
        yield f"{_PREFIX}/{flat.name}/{number}", flat
