"""Closed formulas for the bytes a rank sends in a step, per (message class, tier).

A gather or a reduce-scatter of a piece that has P / span(i-1) elements on tier i makes every rank send
its own P / span(i) elements (n_i - 1) times, directly or along a ring (terrace.plan.hops). An all-reduce is
a reduce-scatter followed by a gather. Per block, with P trainable padded elements:

    gather, gather_backward   tiers params .. 0            once per residency
    reduce                    tiers 0 .. grads             once per unit of micro-batches
    sync                      tiers grads+1 .. optimizer   once a step (reduce-scatter), and
                              tiers optimizer+1 .. island  once a step (all-reduce)
    outer                     tiers island+1 .. last       once an exchange (all-reduce of a rank's part), and
                              tiers optimizer+1 .. island  once an exchange (gather); and numbers over all tiers
    refresh                   tiers optimizer .. params+1  once a step; of matrices that are held as codes, a number
                                                           each before over tiers 0 .. optimizer (a gather on each)
    orthogonalise             tiers optimizer .. 0         once a step, of layers under Muon, and then
                              tiers last .. 0              among the R tensor ranks that cut its matrices, R P elements
    pipeline, p._backward     between stages               once a micro-batch (`stage_sends`)
    tie                       between stages               once a step
    counts                    all tiers, of a stage        once a step, of mixtures (terrace.plan.counts)

Frozen parameters are only gathered. Parameters that tensor ranks share are counted with the ranks that share them.
Messages inside a block are in tests.support.tensor_formula and terrace.plan.context_traffic. Summed over all ranks, the
bytes between N nodes are 2 (N - 1) S a step for three-level placement, S being the bytes of all parameters.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod

from terrace.base.repeated import Repeated
from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.context_traffic import NO_ATTENTION, AttentionBytes, ContextTraffic
from terrace.plan.counts import num_counts
from terrace.plan.edges import Edge, edge_of
from terrace.plan.flats import FlatParamSpec, block_flats, stage_layout, world_layout
from terrace.plan.hops import Hop
from terrace.plan.mesh import Mesh
from terrace.plan.outer import Exchange
from terrace.plan.plan import Plan
from terrace.plan.residency import recomputed, residencies
from terrace.plan.routes import block_hops, control_numbers, outer_hops
from terrace.plan.stage import SHORT, Stage, count_units, whole_stage
from terrace.plan.state_bytes import tie_bytes
from terrace.plan.tensor_traffic import TensorTraffic, choice_messages
from terrace.plan.wire import BETWEEN_STAGES, COUNT_BYTES, ROUTES, MessageClass
from tests.support.tensor_formula import block_messages

CONTROL_NUMBER_BYTES = 8  # control messages hold fp64 numbers
Bytes = dict[tuple[MessageClass, str], int]


def step_bytes(
    cluster: Cluster,
    plan: Plan,
    blocks: Sequence[BlockSpec],
    num_micros: int,
    sequence: int = 0,
    stage: Stage | None = None,
) -> Bytes:
    """Bytes each rank sends per step of `num_micros` micro-batches, by message class and tier.

    `blocks` are as one tensor rank holds them, `stage` says which of them the rank runs, if not all. Zeros are left
    out, and the messages of context ranks with `balance = "cost"`, which depend on the batch. Raises `ClusterError` for
    an unknown tier.
    """
    layout = stage_layout(cluster, plan)
    flats = block_flats(cluster, plan, blocks)
    total: Bytes = defaultdict(int)

    def add(message: MessageClass, flat: FlatParamSpec, times: int = 1, source: int | None = None) -> None:
        for hop in _hops(plan, flat, message, source):
            total[message, layout.tiers[hop.tier]] += times * hop.sent_bytes

    own, held = (range(len(blocks)),) * 2 if stage is None else (stage.own, stage.held)
    # Replicated parameters are never gathered.
    gathers = gather_counts(blocks, num_micros, plan, stage) if plan.params != "device" else {}
    for (index, for_backward, opening), times in gathers.items():
        message = MessageClass.GATHER_BACKWARD if for_backward else MessageClass.GATHER
        # Only a block's first gather of the step reads the primary copy.
        source = layout.params if opening else layout.params_backward
        for flat in filter(lambda flat: flat.layout.gathers, flats[index]):
            add(message, flat, times, source)
    num_units = count_units(num_micros, plan.unit)
    # Gathers were counted above by residency; the other classes run once per unit or per step.
    for flat in chain(*(flats[index] for index in held)):
        for message, route in ROUTES.items():
            if route.carries in ("trainable", "orthogonal") and flat.travels_in(message):
                add(message, flat, times=num_units if message is MessageClass.REDUCE else 1)
    numbers = control_numbers(layout, plan, blocks)
    # Control messages join all stages of an island, so they use the world's degrees.
    for tier, (name, degree) in enumerate(zip(layout.tiers, world_layout(cluster, plan).degrees, strict=True)):
        if degree > 1 and tier <= layout.island:
            total[MessageClass.CONTROL, name] += (degree - 1) * numbers * CONTROL_NUMBER_BYTES
    counted = layout.padded(num_counts(blocks[index] for index in own))
    for tier, (name, degree) in enumerate(zip(layout.tiers, layout.degrees, strict=True)):
        if degree > 1 and tier <= layout.island and counted:
            total[MessageClass.COUNTS, name] += 2 * (degree - 1) * counted // layout.span(tier) * COUNT_BYTES
    mesh = Mesh.of(cluster, plan)
    tensor = TensorTraffic.of(mesh, layout.tiers, plan, sequence)
    again = recomputed(plan, blocks)
    if stage is not None and stage.num_stages > 1:
        edge = edge_of(tensor, blocks)
        for between, tier, num_bytes in stage_sends(stage, mesh, layout.tiers, edge, plan):
            total[between, layout.tiers[tier]] += num_micros * num_bytes
        for index, peer in stage.ties:
            tier = mesh.edge_tier(stage.index, peer)
            total[MessageClass.TIE, layout.tiers[tier]] += tie_bytes(flats[index], plan.sums)
        # Receivers complete each activation within their row of tensor ranks.
        if edge.gathers is not None:
            received = sum(peer is not None for peer in (*stage.onward, *stage.back))
            for tier, num_bytes in tensor.sends(edge.gathers):
                total[MessageClass.TENSOR, layout.tiers[tier]] += num_micros * received * num_bytes
    context = ContextTraffic(plan, mesh, sequence, layout.tiers)
    for index in own:
        attention = context.attention(blocks[index])
        if attention != NO_ATTENTION:
            ahead, back = attention_totals(attention)
            # A recomputed layer sends its forward messages twice.
            for table in (ahead, back, *([ahead] if index in again else [])):
                for tier, num_bytes in table.items():
                    total[MessageClass.CONTEXT, layout.tiers[tier]] += num_micros * num_bytes
        for told in choice_messages(tensor, blocks[index]):
            for tier, num_bytes in tensor.sends(told):
                total[told.message_class, layout.tiers[tier]] += num_micros * num_bytes
        forward, backward = block_messages(tensor, blocks, index)
        for inside in [*forward, *(forward if index in again else []), *backward]:
            for tier, num_bytes in tensor.sends(inside):
                total[MessageClass.TENSOR, layout.tiers[tier]] += num_micros * num_bytes
    return dict(total)


def _hops(plan: Plan, flat: FlatParamSpec, message: MessageClass, source: int | None) -> list[Hop]:
    hops = [*chain(*block_hops(flat.layout, plan, message, flat.padded, source, flat.num_scales))]
    if message is MessageClass.ORTHOGONALISE:
        hops += block_hops(flat.layout.across, plan, message, flat.padded * flat.layout.across.degree)[1]
    return hops


def block_bytes(
    cluster: Cluster,
    plan: Plan,
    blocks: Sequence[BlockSpec],
    held: Iterable[int],
    messages: Collection[MessageClass],
) -> Bytes:
    """Bytes each rank sends in one message of each class for every block of `held`, by message class and tier."""
    flats, total = block_flats(cluster, plan, blocks), Counter[tuple[MessageClass, str]]()
    for flat in chain(*(flats[index] for index in held)):
        for message in filter(flat.travels_in, messages):
            for hop in chain(*block_hops(flat.layout, plan, message, flat.padded, num_scales=flat.num_scales)):
                total[message, flat.layout.tiers[hop.tier]] += hop.sent_bytes
    return dict(total)


def outer_bytes(
    cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec], held: Iterable[int], exchange: Exchange
) -> Bytes:
    """Bytes each rank sends in an exchange of islands: the changes of its blocks that start, and numbers."""
    if not exchange.starts:
        return {}
    layout, outer = world_layout(cluster, plan), plan.outer
    sent = [index for index in held if outer.fragment(index) in exchange.starts]
    total = Counter(block_bytes(cluster, plan, blocks, sent, [MessageClass.OUTER]))
    for hop in outer_hops(layout, plan, blocks, exchange):
        total[MessageClass.OUTER, layout.tiers[hop.tier]] += hop.sent_bytes
    return dict(total)


def gather_counts(
    blocks: Sequence[BlockSpec], num_micros: int, plan: Plan, stage: Stage | None = None
) -> dict[tuple[int, bool, bool], int]:
    """Gathers per step, by (block, whether for a backward, whether the block's first in the step).

    Whether a visit needs a gather depends on how far back the last visit of its block lies, which is the same in every
    unit but the first: so of many units three are gone through, and the third stands for the rest. So do three
    repetitions of a `stage` of a pipeline; where its groups do not repeat, they are gone through one by one.
    """

    def count(stage: Stage) -> Counter[tuple[int, bool, bool]]:
        stays = residencies(stage, blocks, plan.prefetch)
        return Counter((stay.block, stay.backward, stay.opening) for stay in stays)

    if stage is not None:
        if not isinstance(stage.groups, Repeated):
            return count(stage)
        two, three = count(stage.repeating(SHORT - 1)), count(stage.short)
        return {key: times + (stage.groups.repeats - SHORT) * (times - two[key]) for key, times in three.items()}
    num_units = count_units(num_micros, plan.unit)
    # Few units are counted directly.
    if num_units <= 3:
        return count(whole_stage(len(blocks), num_units, 1))
    # The difference of three units and two is one steady unit.
    two, three = (count(whole_stage(len(blocks), length, 1)) for length in (2, 3))
    return {key: times + (num_units - 3) * (times - two[key]) for key, times in three.items()}


def stage_sends(
    stage: Stage, mesh: Mesh, tiers: Sequence[str], edge: Edge, plan: Plan
) -> Iterator[tuple[MessageClass, int, int]]:
    """(Class, tier index, bytes) of each message from a rank of `stage` to other stages, for one micro-batch.

    `tiers` are the names of all tiers.
    """
    for peer, is_gradient in stage.sends():
        message, tier = BETWEEN_STAGES[is_gradient], mesh.edge_tier(stage.index, peer)
        yield message, tier, plan.wire_format(message, tiers[tier]).message_bytes(edge.numel)


def attention_totals(attention: AttentionBytes) -> tuple[Mapping[int, int], Mapping[int, int]]:
    """Bytes by tier index that a layer's attention sends in a forward, and in a backward by itself."""
    forward = Counter[int]()
    for tier, degree in enumerate(attention.ulysses):
        if degree > 1:
            # Across this tier a rank meets (degree - 1) units, each with all Ulysses ranks of the tiers inside.
            peers = (degree - 1) * prod(attention.ulysses[:tier])
            forward[tier] += peers * (attention.on(tier).inputs + attention.on(tier).outputs)
    # Ulysses exchanges are mirrored in the backward.
    backward = forward.copy()
    crossed = [tier for tier, degree in enumerate(attention.ring) if degree > 1]
    left = prod(attention.ring)
    for tier in crossed:
        num_steps = left - left // attention.ring[tier]
        left //= attention.ring[tier]
        forward[tier] += num_steps * attention.on(tier).keys
        # Keys once more, their gradients after all but the first exchange, and home over the outermost tier.
        backward[tier] += (2 * num_steps - (tier == crossed[0]) + (tier == crossed[-1])) * attention.on(tier).keys
        # A linear layer tells the other ranks of a tier its maps and the ends of its runs, whatever their length.
        for passed in (forward, backward):
            passed[tier] += (attention.ring[tier] - 1) * (attention.halo + attention.state)
    return forward, backward
