"""Bytes of a flat buffer's states on a rank, as far as they stay allocated throughout a step.

For temporary buffers see terrace.program.buffers.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

from terrace.base.alike import once_each
from terrace.plan.flats import FlatParamSpec
from terrace.plan.hops import RESIDUAL_BYTES, RESIDUAL_COPIES
from terrace.plan.layout import Layout
from terrace.plan.plan import Plan
from terrace.plan.projected import projected_bytes
from terrace.plan.routes import residual_numels
from terrace.plan.state_formats import state_bytes
from terrace.plan.update import Update, parse_update
from terrace.plan.wire import FORMATS, MessageClass

CATEGORIES = ("params", "secondary", "gathered", "grads", "grads_full", "optimizer", "outer", "feedback", "buffers")


def keeps_master(plan: Plan, layout: Layout, *, coded: bool = False) -> bool:
    """Whether the master parameters are stored separately from the working parameters.

    They share memory if dtypes agree, no refresh message rounds the working copy, it is not kept below the device, and
    the device updates it, unless the plan keeps them apart. `coded`: the working copy is 8-bit codes.
    """
    if coded:
        return True
    # What is gathered for use is a copy already.
    if plan.master_apart and not layout.gathers:
        return True
    # Parameters below the device are read for passes, not for updates; the host's cores update a copy of their own.
    if layout.params_below or plan.keep.updates_on_host:
        return True
    # Only tiers that a refresh crosses can round it.
    crossed = [i for i in range(layout.params + 1, layout.optimizer + 1) if layout.degrees[i] > 1]
    refresh = [plan.wire_format(MessageClass.REFRESH, layout.tiers[i]) for i in crossed]
    # A rounded working copy cannot serve as the master: its error would feed the next update.
    rounded = any(wire.mantissa_bits < FORMATS[plan.master].mantissa_bits for wire in refresh)
    return plan.compute != plan.master or rounded


def rests_master(plan: Plan, flat: FlatParamSpec) -> bool:
    """Whether the master copy of a flat buffer is kept below the device.

    Only if it is separate from the working copy. Codes of matrices are made from the whole master copy, and exchanges
    of islands change it after UPDATE: there it stays on the device.
    """
    if not plan.keep.optimizer_below or flat.is_coded or plan.outer.has_islands or not flat.trainable:
        return False
    return keeps_master(plan, flat.layout) and not flat.is_spread


def rests_rows(plan: Plan, flat: FlatParamSpec) -> bool:
    """Whether a flat buffer is a table whose rows, with all their states, are kept below the device."""
    return flat.is_spread and plan.keep.table_below


def accumulates_in_place(layout: Layout) -> bool:
    """Whether a backward adds directly into the accumulated gradient, with no message between. Dtypes may differ."""
    return layout.span(layout.grads) == 1


def slice_bytes(plan: Plan, parts: Sequence[FlatParamSpec]) -> dict[str, int]:
    """Category -> bytes that a rank keeps throughout the step for a block with flat buffers `parts`."""
    total: dict[str, int] = defaultdict(int)
    for flat in parts:
        for category, size in _steady(plan, flat).items():
            total[category] += size
    return total


def blocks_bytes(plan: Plan, flats: Sequence[Sequence[FlatParamSpec]]) -> list[dict[str, int]]:
    """`slice_bytes` of every block, computed once for blocks with equal flat buffers."""
    return once_each(partial(slice_bytes, plan), flats)


def _steady(plan: Plan, flat: FlatParamSpec) -> dict[str, int]:
    if rests_rows(plan, flat):
        return {"params": 0, "grads": 0, "optimizer": 0}
    summed = FORMATS[plan.sums].element_bytes
    layout, padded, whole = flat.layout, flat.padded, flat.num_orthogonal
    held = partial(flat.stored_bytes, plan)
    found = {"params": 0 if layout.params_below else held(padded // layout.span(layout.params)) + flat.constants_bytes}
    if layout.has_secondary:
        found["secondary"] = held(padded // layout.span(layout.params_backward))
    if flat.trainable:
        # Not in the compute dtype, since many micro-batches are summed.
        found["grads"] = 0 if layout.grads_below else padded // layout.span(layout.grads) * summed
        if flat.is_spread and not plan.outer.has_islands:
            found["grads"] = 0  # only used rows have gradients; islands exchange changes in a buffer of all rows
        owned = padded // layout.span(layout.optimizer)
        # The master copy if it is separate, and moments.
        kept = owned if keeps_master(plan, layout, coded=flat.is_coded) and not rests_master(plan, flat) else 0
        found["optimizer"] = kept * FORMATS[plan.master].element_bytes
        if whole and parse_update(plan.update).projects:
            found["optimizer"] += projected_bytes(plan, flat.matrix_slices)
        elif flat.is_spread or not plan.keep.optimizer_below:
            found["optimizer"] += moment_bytes(plan, moments(plan.update, owned, padded - whole))
        found["outer"] = owned * summed * plan.outer.num_slices
        found["feedback"] = sum(residual_numels(layout, plan, padded)) * RESIDUAL_BYTES * RESIDUAL_COPIES
    return found


def moments(update: Update, owned: int, num_elementwise: int) -> tuple[int, ...]:
    """Elements of each optimizer state tensor for a slice of `owned` elements, on the rank where they are most.

    `num_elementwise` is the number of elements at the end of the buffer, padding included, that are not updated as
    matrices.
    """
    alone = min(owned, num_elementwise)
    rule = parse_update(update)
    match rule.name:
        case "sgd":
            return ()
        case "own":
            return (owned,) * len(rule.states)
        case "lion" | "sgd+momentum":
            return (owned,)
        case "adamw":
            return owned, owned
        case "muon":  # elementwise updates (AdamW) have a second moment
            return owned - alone, alone, alone
        case _:  # projected matrices are counted by terrace.plan.projected
            return alone, alone


def moment_bytes(plan: Plan, numels: Iterable[int]) -> int:
    """Bytes of optimizer state tensors with these numbers of elements."""
    return sum(state_bytes(plan.optimizer_states or plan.sums, numel) for numel in numels)


def tie_bytes(flats: Sequence[FlatParamSpec], summed: str) -> int:
    """Bytes that a rank sends to sum the gradient of a block held by two stages."""
    # Gradients are exchanged after their reduction, so each rank sends only its shard.
    shards = (flat.padded // flat.layout.span(flat.layout.grads) for flat in flats if flat.trainable)
    return sum(shards) * FORMATS[summed].element_bytes
