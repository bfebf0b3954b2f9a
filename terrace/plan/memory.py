"""Closed formulas for the model-state memory of one rank at its peak, in bytes by category.

With P padded elements per block, c and m the bytes of the compute and of the master dtype:

    params      P / span(params) * c                      always
    secondary   P / span(params_backward) * c             always
    gathered    P * c for every block resident at once    peak over the step
    grads       P / span(grads) * m                       always (accumulated)
    grads_full  P * c for every gradient not yet reduced  peak over the step
    optimizer   P / span(optimizer) * (2 m, and m more when the master copy is apart)
    feedback    what error feedback keeps                 always (terrace.plan.hops.residual_numels)
    buffers     per lane its largest message: what it is converted to, what comes in and the sums, over all hops

P counts the trainable and the frozen parameters of a block apart: each has a flat buffer, padded for
itself. The categories need not peak together, so their sum is a bound that a step may stay below.
Activations are not model state and are not counted here, nor is what a kernel allocates for itself.
NCCL receives sums, so there a message in flight takes less than the formula's.
"""

from collections import defaultdict
from collections.abc import Sequence

from terrace.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.hops import RESIDUAL_BYTES, Hop, block_hops, residual_numels
from terrace.plan.layout import DEVICE, Layout
from terrace.plan.plan import Plan
from terrace.plan.residency import residencies, step_visits
from terrace.plan.wire import FORMATS, MessageClass

ARENA_ALIGNMENT = 64  # bytes: a cache line, and enough for any vector load


def keeps_master(plan: Plan, layout: Layout) -> bool:
    """Return whether the master parameters are a copy apart from the working parameters.

    They can be one memory when dtypes agree and no refresh message rounds the working copy.
    """
    refresh = [plan.wire_format(MessageClass.REFRESH, layout.tiers[i]) for i in _crossed(layout)]
    rounded = any(wire.mantissa_bits < FORMATS[plan.master].mantissa_bits for wire in refresh)
    return plan.compute != plan.master or rounded


def accumulates_in_place(plan: Plan, layout: Layout) -> bool:
    """Return whether autograd can add straight into the accumulated gradient, with no message between."""
    return layout.span(layout.grads) == 1 and plan.compute == plan.master


def model_state_bytes(cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec], num_micros: int) -> dict[str, int]:
    """Return the peak bytes of each category of model state on one rank."""
    layout = Layout.of(cluster, plan)
    compute, master = FORMATS[plan.compute].element_bytes, FORMATS[plan.master].element_bytes
    trainable = [layout.padded(block.num_trainable) for block in blocks]
    frozen = [layout.padded(block.num_frozen) for block in blocks]
    whole = [fixed + size for fixed, size in zip(frozen, trainable, strict=True)]
    optimizer_item = master * (3 if keeps_master(plan, layout) else 2)
    return {
        "params": sum(whole) // layout.span(layout.params) * compute,
        "secondary": sum(whole) // layout.span(layout.params_backward) * compute if layout.has_secondary else 0,
        "gathered": _peak_gathered(layout, plan, blocks, whole, num_micros) * compute,
        "grads": sum(trainable) // layout.span(layout.grads) * master,
        "grads_full": _peak_gradients(layout, plan, blocks, trainable, num_micros) * compute,
        "optimizer": sum(trainable) // layout.span(layout.optimizer) * optimizer_item,
        "feedback": sum(sum(residual_numels(layout, plan, numel)) for numel in trainable) * RESIDUAL_BYTES,
        "buffers": _largest_buffers(layout, plan, blocks, num_micros),
    }


def _crossed(layout: Layout) -> list[int]:
    return [i for i in range(layout.params + 1, layout.optimizer + 1) if layout.degrees[i] > 1]


def _peak_gathered(
    layout: Layout, plan: Plan, blocks: Sequence[BlockSpec], whole: Sequence[int], num_micros: int
) -> int:
    if layout.params == DEVICE:
        return 0
    # The second unit repeats for all further ones, so three show every overlap.
    stays = residencies(blocks, min(num_micros, 3 * plan.unit), plan.unit, plan.prefetch)
    change: dict[int, int] = {}
    for stay in stays:
        change[stay.issue] = change.get(stay.issue, 0) + whole[stay.block]
        change[stay.last + 1] = change.get(stay.last + 1, 0) - whole[stay.block]
    peak = now = 0
    for position in sorted(change):
        now += change[position]
        peak = max(peak, now)
    return peak


def _peak_gradients(
    layout: Layout, plan: Plan, blocks: Sequence[BlockSpec], trainable: Sequence[int], num_micros: int
) -> int:
    """At most one reduction is in flight while the next block runs backward; a lender's buffer waits for its own."""
    if accumulates_in_place(plan, layout):
        return 0
    held: set[int] = set()
    in_flight, peak = 0, 0
    for visit in step_visits(len(blocks), min(num_micros, 2 * plan.unit), plan.unit):
        if visit.backward:
            held |= {visit.block, *blocks[visit.block].borrows}
            peak = max(peak, in_flight + sum(trainable[block] for block in held))
            held.discard(visit.block)
            in_flight = trainable[visit.block] or in_flight  # a frozen block reduces nothing
    return peak


def _largest_buffers(layout: Layout, plan: Plan, blocks: Sequence[BlockSpec], num_micros: int) -> int:
    largest = [layout.padded(max((block.num_trainable for block in blocks), default=0))]
    largest.append(layout.padded(max((block.num_frozen for block in blocks), default=0)))
    cases: set[tuple[MessageClass, int | None, int]]
    cases = {(message, None, largest[0]) for message in (MessageClass.REDUCE, MessageClass.SYNC, MessageClass.REFRESH)}
    for stay in (
        residencies(blocks, min(num_micros, 3 * plan.unit), plan.unit, plan.prefetch) if layout.params != DEVICE else ()
    ):
        message = MessageClass.GATHER_BACKWARD if stay.backward else MessageClass.GATHER
        source = layout.params if stay.opening else layout.params_backward
        cases |= {(message, source, numel) for numel in largest}
    lanes: dict[int, int] = defaultdict(int)  # a lane is named after the outermost tier it crosses
    for message, start, numel in cases:
        reduction, gathering = block_hops(layout, plan, message, numel, start)
        lane = max((hop.tier for hop in (*reduction, *gathering)), default=0)
        lanes[lane] = max(lanes[lane], arena_bytes(reduce_buffers(plan, message, reduction)))
        lanes[lane] = max(lanes[lane], arena_bytes(gather_buffers(plan, message, gathering)))
    return sum(lanes.values())


def reduce_buffers(plan: Plan, message: MessageClass, hops: Sequence[Hop]) -> list[int]:
    """Return the bytes of each buffer that a reduction takes, in order.

    Per hop: the outgoing message if it must be converted, the incoming one, and the sum. Of a block format a
    rank's own part is neither coded nor sent.
    """
    sizes = []
    held = plan.compute if message is MessageClass.REDUCE else plan.master
    for hop in hops:
        if hop.wire.block:
            sizes += [hop.sent_bytes, hop.sent_bytes]
        else:
            whole = hop.degree * hop.part_bytes
            sizes += [whole if hop.wire.codec != held else 0, whole]
        sizes.append(hop.numel * FORMATS[plan.master].element_bytes)
        held = plan.master
    return sizes


def gather_buffers(plan: Plan, message: MessageClass, hops: Sequence[Hop]) -> list[int]:
    """Return the bytes of each buffer that a gather takes, in order: none where the values travel as they lie."""
    sizes = []
    held = plan.master if message is MessageClass.SYNC else plan.compute
    for hop in hops:
        if hop.wire.codec != held:
            sizes += [hop.part_bytes if hop.pieces == 1 else 0, hop.degree * hop.part_bytes]
    return sizes


def arena_bytes(sizes: Sequence[int]) -> int:
    """Return the memory that buffers of these sizes take when they lie behind one another, aligned."""
    return sum(-(-size // ARENA_ALIGNMENT) * ARENA_ALIGNMENT for size in sizes)
