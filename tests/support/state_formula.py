"""Closed formulas for the model-state memory of one rank at its peak, in bytes by category.

With P padded elements per block, c and m the bytes of the compute dtype and of that of sums (`Plan.sums`: fp32, or
fp64 under master = "fp64"), and s(n) the bytes of a state of n elements (terrace.plan.state_formats: n m, n 2 in bf16,
n + 4 (ceil(n / 256) + 1) in 8-bit blocks):

    params      P / span(params) * c                      always; here and in the next two lines c is 1 for matrices
    secondary   P / span(params_backward) * c             always           that are held as codes
    gathered    P * c for every block resident at once    peak over the step; 0 where span(params_backward) is 1
    grads       P / span(grads) * m                       always (accumulated)
    grads_full  P * c for every gradient not yet reduced  peak over the step
    optimizer   with n = P / span(optimizer): 2 s(n), and n elements of the master dtype more when the master copy is
                apart. Lion and SGD with momentum have one moment, s(n), and so have the matrices of layers under Muon:
                of the rank with the fewest of them. SGD without momentum has none
    outer       P / span(optimizer) * m                   always, of islands, for each of Outer.num_slices: the values
                last agreed on, momentum, and two where an exchange takes steps
    feedback    residuals of error feedback               always (terrace.plan.routes.residual_numels), and of
                                                          gradients that a stage sends back
    buffers     under Muon P * c for every layer with whole matrices in memory, two of them; and
                per lane its largest message: converted parts, received parts and sums, over all hops;
                or its largest part that travels in a gap, packed before (terrace.plan.gaps);
                and the largest gradient shard that comes in from the other stage of a block that two stages hold

P counts every flat buffer of a block apart (terrace.plan.flats), padded for itself; spans are its layout's.
The categories need not peak together, so their sum is a bound that a step may stay below. Activations are not model
state and are not counted here, nor is scratch memory of kernels. NCCL receives sums, so there a message in
flight takes less than the formula's.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, product

from terrace.base.alike import first_equal
from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.edges import Edge, edge_feedback_bytes, edge_of
from terrace.plan.flats import FlatParamSpec, block_flats, gathered_bytes, orthogonalised, stage_layout
from terrace.plan.gaps import largest_part_bytes
from terrace.plan.hops import arena_bytes, gather_buffers, reduce_buffers
from terrace.plan.in_block_messages import Leg
from terrace.plan.layout import Layout, message_lane
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.residency import Residency, gathers
from terrace.plan.routes import block_hops
from terrace.plan.stage import Pass, Stage, reduction_points, whole_stage
from terrace.plan.state_bytes import CATEGORIES, accumulates_in_place, slice_bytes, tie_bytes
from terrace.plan.tensor_traffic import TensorTraffic, shared_bytes
from terrace.plan.wire import BETWEEN_STAGES, FORMATS, GRADIENTS, OF_PARAMETERS, ROUTES, MessageClass
from tests.support.tensor_formula import block_messages

_OF_TRAINABLE = tuple(message for message, route in ROUTES.items() if route.carries != "all")


def model_state_bytes(
    cluster: Cluster,
    plan: Plan,
    blocks: Sequence[BlockSpec],
    num_micros: int,
    sequence: int = 0,
    stage: Stage | None = None,
) -> dict[str, int]:
    """Peak bytes of model state on one rank, by category.

    `blocks` are as one tensor rank holds them, `stage` says which of them the rank runs, if not all.
    """
    if stage is None:  # the second unit repeats for all further ones, so three show every overlap
        stage = whole_stage(len(blocks), min(num_micros, 3 * plan.unit), plan.unit)
    stage = stage.short
    compute = FORMATS[plan.compute].element_bytes
    flats = block_flats(cluster, plan, blocks)
    total: dict[str, int] = defaultdict(int)
    held = [flats[index] for index in stage.held]
    for parts in held:
        for category, size in slice_bytes(plan, parts).items():
            total[category] += size
    whole = [gathered_bytes(plan, parts) for parts in flats]
    buffered = [
        sum(flat.padded for flat in parts if flat.trainable and not accumulates_in_place(flat.layout))
        for parts in flats
    ]
    stays = gathers(stage, blocks, flats, plan.prefetch)
    total["gathered"] = _peak_gathered(stays, whole)
    total["grads_full"] = _peak_gradients(stage, plan.unit, blocks, buffered) * compute
    mesh, tiers = Mesh.of(cluster, plan), [tier.name for tier in cluster.tiers]
    tensor = TensorTraffic.of(mesh, tiers, plan, sequence)
    if stage.num_stages > 1:
        total["feedback"] += stage_feedback_bytes(stage, mesh, tiers, edge_of(tensor, blocks), plan)
    total["buffers"] = _largest_buffers(stage_layout(cluster, plan), plan, stays, held)
    # Messages inside blocks have a lane and memory of their own.
    total["buffers"] += tensor_buffers(tensor, blocks, stage.own)
    total["buffers"] += _peak_directions(flats, stage.held) * compute
    tied = chain(*(flats[index] for index, _ in stage.ties))  # one flat buffer after the other
    total["buffers"] += max((tie_bytes([flat], plan.sums) for flat in tied), default=0)
    return {category: total[category] for category in CATEGORIES}


def _peak_directions(flats: Sequence[Sequence[FlatParamSpec]], held: Sequence[int]) -> int:
    # A layer is gathered for Muon while the one before it is updated.
    sizes = [sum(map(_gathered, flats[block])) for block in orthogonalised(flats, held)]
    return max(map(sum, zip(sizes, [*sizes, 0][1:], strict=True)), default=0)


def _gathered(flat: FlatParamSpec) -> int:
    # P elements for each of the tensor ranks that cut its matrices, unless a rank's slice is all of them.
    cut = math.prod(flat.layout.ranks.total(axis) for of_dim in flat.params[0].cuts for axis in {*of_dim} - {"expert"})
    is_whole = cut * flat.layout.span(flat.layout.optimizer) == 1
    return 0 if is_whole or not flat.num_orthogonal else cut * flat.padded


def _peak_gathered(stays: Sequence[Residency], whole: Sequence[int]) -> int:
    change: dict[int, int] = {}
    for stay in stays:
        change[stay.issue] = change.get(stay.issue, 0) + whole[stay.block]
        # The block is still read during visit `until`, so its memory returns after it.
        change[stay.until + 1] = change.get(stay.until + 1, 0) - whole[stay.block]
    peak = now = 0
    for position in sorted(change):
        now += change[position]
        peak = max(peak, now)
    return peak


def _peak_gradients(stage: Stage, unit: int, blocks: Sequence[BlockSpec], buffered: Sequence[int]) -> int:
    # The first backward that adds to a gradient opens its buffer; an owner's stays open until its own reduction.
    points = reduction_points(stage, blocks, unit)
    turns: dict[int, list[int]] = {}
    for block, numbers in points.items():
        for number in numbers:
            turns.setdefault(number, []).append(block)
    held: dict[int, int] = {}
    in_flight: list[int] = []
    peak = 0
    for number, (group, _, block) in enumerate(stage.passes()):
        if group.pass_ is Pass.FORWARD:
            continue
        for needed in (block, *blocks[block].tied_to):
            if needed not in held and buffered[needed]:
                # Opening a buffer waits for all reductions but the newest, as the executor does.
                in_flight = in_flight[-1:]
                held[needed] = buffered[needed]
        peak = max(peak, sum(in_flight) + sum(held.values()))
        in_flight += [held.pop(reduced) for reduced in turns.get(number, ()) if reduced in held]
    return peak


def _largest_buffers(
    layout: Layout, plan: Plan, stays: Sequence[Residency], flats: Sequence[Sequence[FlatParamSpec]]
) -> int:
    sources: set[tuple[MessageClass, int | None]] = {(message, None) for message in _OF_TRAINABLE}
    for stay in stays:
        message = MessageClass.GATHER_BACKWARD if stay.backward else MessageClass.GATHER
        sources.add((message, layout.params if stay.opening else layout.params_backward))
    # Bytes grow with size within one layout, so only the largest buffer of each kind is priced.
    largest: dict[tuple[object, bool, bool, bool], FlatParamSpec] = {}
    for flat in chain(*flats):
        key = (flat.layout.joined, flat.trainable, flat.num_orthogonal > 0, flat.is_coded)
        largest[key] = max(largest.get(key, flat), flat, key=lambda each: each.padded)
    lanes: dict[int, int] = defaultdict(int)  # a lane is named after the outermost tier it crosses
    for message, source in sources:
        lane = message_lane(layout, message, source)
        for flat in largest.values():
            # Codes travel in place, and the numbers before them are few.
            if flat.travels_in(message) and not (flat.is_coded and message in OF_PARAMETERS):
                reduction, gathering = block_hops(flat.layout, plan, message, flat.padded, source)
                lanes[lane] = max(lanes[lane], arena_bytes(reduce_buffers(plan, message, reduction)))
                lanes[lane] = max(lanes[lane], arena_bytes(gather_buffers(plan, message, gathering)))
                if message is MessageClass.ORTHOGONALISE:
                    hops = block_hops(flat.layout.across, plan, message, _gathered(flat))[1]
                    lanes[lane] = max(lanes[lane], arena_bytes(gather_buffers(plan, message, hops)))
    # Where a part is cut depends on the size, so the largest buffer need not have the largest part.
    sizes = {(flat.layout, flat.padded) for flat in chain(*flats) if flat.trainable} if plan.expert_gaps else set()
    for message, (of, padded) in product(GRADIENTS, sizes):
        lane = message_lane(layout, message)
        lanes[lane] = max(lanes[lane], largest_part_bytes(plan, of, message, padded))
    return sum(lanes.values())


def tensor_buffers(tensor: TensorTraffic, blocks: Sequence[BlockSpec], indexes: Iterable[int]) -> int:
    """Bytes of buffers that the largest message inside one of the blocks takes, and of memory that ranks share.

    Messages are in the middle of computing, one after the other.
    """
    largest = 0
    known: set[tuple[int, bool, bool]] = set()  # most layers are alike
    firsts = first_equal([block.params for block in blocks])
    for index in indexes:
        alike = (firsts[index], index == 0, index == len(blocks) - 1)
        if tensor.degree == 1 or alike in known:
            continue
        known.add(alike)
        for message in chain(*block_messages(tensor, blocks, index)):
            if message.leg is not Leg.NUMBERS:
                buffers = gather_buffers if message.leg is Leg.GATHER else reduce_buffers
                largest = max(largest, arena_bytes(buffers(tensor.plan, MessageClass.TENSOR, tensor.hops(message))))
    return largest + shared_bytes(tensor, blocks)


def stage_feedback_bytes(stage: Stage, mesh: Mesh, tiers: Sequence[str], edge: Edge, plan: Plan) -> int:
    """Bytes of all residuals of the messages from a rank of `stage` to other stages; one for each chunk's boundary."""
    num_fed_back = 0
    for peer, is_gradient in stage.sends():
        message, tier = BETWEEN_STAGES[is_gradient], mesh.edge_tier(stage.index, peer)
        num_fed_back += plan.wire_format(message, tiers[tier]).feedback
    return num_fed_back * edge_feedback_bytes(edge.numel)
