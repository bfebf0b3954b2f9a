"""Error-feedback residuals in a checkpoint, which make a resume under the same plan bitwise equal.

A residual belongs to a rank, a block and a hop of its messages (terrace.comm.rounding), so no other plan can use it.
Each rank's file holds its own after its pieces, as `feedback/BLOCK/BUFFER/CLASS/TIER/LEG`; BUFFER is `edge` for a
block's messages to another stage. The manifest has a digest of everything that determines which residuals exist.
Under another plan, or from a checkpoint without residuals, they start at zero.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors
from torch import Tensor

from terrace.base.errors import CheckpointError
from terrace.base.foreign import check_file
from terrace.comm.rounding import Hop, Origin
from terrace.plan.hops import RESIDUAL_BYTES
from terrace.plan.plan import OF_STACKS
from terrace.plan.routes import between_two, residual_numels
from terrace.plan.wire import CHANGES, FED_BACK, GRADIENTS, MessageClass
from terrace.program.program import Program

if TYPE_CHECKING:
    from terrace.runtime.flat_param import FlatParam
    from terrace.runtime.model_state import ModelState

_PREFIX = "feedback"


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def named_residuals(flats: Iterable["FlatParam"], edges: Iterable[Origin]) -> Iterator[tuple[str, Tensor]]:
    """(name in the file, residual) of all residuals so far.

    `edges` are the origins of the messages that blocks send to other stages.
    """
    for prefix, origin in _origins(flats, edges):
        for (message, tier, leg), values in origin.residuals.items():
            yield f"{prefix}/{message.value}/{tier}/{leg}", values


def num_bytes(program: Program, flats: Iterable["FlatParam"]) -> int:
    """Bytes of a rank's residuals once every message has been sent; 0 without error feedback."""
    of_states = sum(
        sum(residual_numels(flat.layout, program.plan, flat.padded)) for flat in flats if flat.spec.trainable
    )
    return RESIDUAL_BYTES * (of_states + sum(message.fed_back for message in program.messages))


def digest(program: Program) -> str:
    """Digest of what in a plan determines the residuals that exist, and their sums; "" without error feedback."""
    plan, cluster = program.plan, program.cluster
    wires = {message.value: dict(plan.wire.get(message.value, {})) for message in FED_BACK}
    # A class without formats leaves no trace, so that digests stay as they were before it had any.
    wires = {message: row for message, row in wires.items() if row or message in GRADIENTS}
    if not any("+feedback" in name for row in wires.values() for name in row.values()):
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
    # Stacks have buffers of their own, and each part of a gradient has residuals of its own.
    table |= {name: values[name] for name in (*OF_STACKS, "order") if values[name]}
    if MessageClass.PIPELINE_BACKWARD in wires:  # their size depends on the sequence length
        table |= {"edge": program.model.edge.numel}
    if (cycle := plan.outer).has_islands:
        table["outer"] = (cycle.tier, cycle.every, cycle.fragments, cycle.delay)
    pairs = _pairs(program)
    # Without any the digest stays as it was when no coded message went whole between two members.
    if pairs:
        table["whole"] = pairs
    table |= {"wire": wires, "tiers": [(tier.name, tier.size) for tier in cluster.tiers]}
    return hashlib.sha256(json.dumps(table, sort_keys=True, default=list).encode()).hexdigest()[:16]


def _pairs(program: Program) -> list[str]:
    """Message classes that are exchanged whole between two members with error feedback, with one residual each."""
    layouts, found = {flat.layout for flats in program.model.flats for flat in flats}, set[str]()
    for message in CHANGES:
        for layout in layouts:
            tiers = between_two(layout, program.plan, message)
            wires = [program.plan.wire_format(message, layout.tiers[tier]) for tier in tiers]
            # Sparse messages have always gone whole.
            if any(wire.feedback and not wire.kept_of for wire in wires):
                found.add(message.value)
    return sorted(found)


def restore_residuals(state: "ModelState", folder: Path, stored: str) -> str:
    """Load this rank's residuals from a checkpoint's `folder`, whose manifest has the digest `stored`.

    Returns a note if the plan has residuals that the checkpoint does not provide. Raises `CheckpointError` for an
    unreadable file.
    """
    for _, origin in _origins(state, state.edges.values()):
        origin.forget()
    wanted = digest(state.program)
    if not wanted:
        return ""
    if stored != wanted:
        why = "was saved under another plan" if stored else "has none"
        return f"residuals of error feedback start at zero, since {folder.name} {why}"
    path = folder / file_of(state.rank)
    if not path.is_file():
        return ""  # saved before the first step
    origins = dict(_origins(state, state.edges.values()))
    try:
        check_file(path, folder)
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                if name.startswith(f"{_PREFIX}/"):
                    prefix, message, tier, leg = name.rsplit("/", 3)
                    origins[prefix].restore(_hop(message, tier, leg), file.get_tensor(name))
    except (OSError, safetensors.SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"cannot read the residuals of {path}: {error}") from error
    return ""


def _hop(message: str, tier: str, leg: str) -> Hop:
    return MessageClass(message), int(tier), leg


def _origins(flats: Iterable["FlatParam"], edges: Iterable[Origin]) -> Iterator[tuple[str, Origin]]:
    seen: dict[str, int] = {}
    for flat in flats:
        number = seen[flat.name] = seen.get(flat.name, -1) + 1
        prefix = f"{_PREFIX}/{flat.name}/{number}"
        yield prefix, flat.origin
        yield from ((f"{prefix}/islands", outer.origin) for outer in flat.outer_states)
    yield from ((f"{_PREFIX}/{origin.name}/edge", origin) for origin in edges)
