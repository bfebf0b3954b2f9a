"""The hops that each message class takes under a plan.

A gather goes from the outermost tier inward, a reduction from the innermost outward. A reduction encodes every part
again after each sum. A gather over adjacent tiers with the same block format encodes once, on the outermost of them,
and inner tiers forward the received messages: one rounding for any number of tiers. On those, `pieces` messages of
`numel` elements travel together (terrace.plan.hops).

A reduction that is gathered over the same tiers is an all-reduce. A sum of n sparse messages is n times as dense and
would have to be encoded again for the gather. So sparse messages of an all-reduce are all-gathered instead, and every
member decodes and adds them, including its own: one rounding, and the same sum on all members. Tiers outside a sparse
one must then have the same format, and no gather follows over them. On the outermost tier of an all-reduce between two
members, all block formats do this: the same number of bytes, in one message instead of two.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from terrace.model.balance import FIGURES
from terrace.model.base_formats import BASE_FORMATS
from terrace.model.spec import BlockSpec
from terrace.plan.dims import has_routers
from terrace.plan.hops import Hop
from terrace.plan.mesh import CONTEXT, PIPELINE, TENSOR
from terrace.plan.outer import Exchange
from terrace.plan.plan import Plan
from terrace.plan.update import parse_update
from terrace.plan.wire import (
    BETWEEN_STAGES,
    BYTES,
    CHANGES,
    FORMATS,
    PLACEABLE,
    ROUTED_ROWS,
    ROUTES,
    MessageClass,
    WireFormat,
)

if TYPE_CHECKING:
    from terrace.plan.layout import Layout

# Numbers per fragment that an island sends when it starts an exchange: valid tokens and sum of losses since the last
# start; squared norms of its change, of its change while the last exchange was in flight, and of the last mean change
OUTER_FIGURES = ("tokens", "loss", "change", "meanwhile", "mean")


def gather_hops(
    layout: "Layout", plan: Plan, message: MessageClass, numel: int, outer: int, inner: int, *, coded: bool = False
) -> list[Hop]:
    """The hops of a gather of `numel` padded elements from tier `outer` to tier `inner`, in order.

    `coded`: the elements are 8-bit codes of matrices. Records of a layout's `code` are sent as they are, byte by byte.
    """
    hops: list[Hop] = []
    if layout.code:
        numel = BASE_FORMATS[layout.code].coded_bytes(numel)
    for tier in range(outer, inner, -1):
        degree, wire = layout.degrees[tier], plan.wire_format(message, layout.tiers[tier], coded=coded)
        if layout.code:
            wire = WireFormat(layout.code, BYTES, 8, 0)
        if degree == 1 or not numel:
            continue
        # Same block format as the outer tier: forward its encoded pieces instead of rounding again.
        if hops and wire.block and hops[-1].wire == wire:
            # The number of pieces is multiplied by the degree of every tier crossed.
            hops.append(Hop(tier, degree, wire, hops[-1].numel, hops[-1].pieces * hops[-1].degree))
        else:
            hops.append(Hop(tier, degree, wire, numel // layout.span(tier)))
    return hops


def reduce_hops(layout: "Layout", plan: Plan, message: MessageClass, numel: int, inner: int, outer: int) -> list[Hop]:
    """The hops of a reduction of `numel` padded elements from tier `inner` to tier `outer`, in order."""
    return [
        Hop(tier, layout.degrees[tier], plan.wire_format(message, layout.tiers[tier]), numel // layout.span(tier))
        for tier in range(inner + 1, outer + 1)
        if layout.degrees[tier] > 1 and numel
    ]


def block_hops(
    layout: "Layout", plan: Plan, message: MessageClass, numel: int, source: int | None = None, num_scales: int = 0
) -> tuple[list[Hop], list[Hop]]:
    """(Hops of the reduction, hops of the gather) of one message of a block with `numel` padded elements.

    `source` overrides the tier that a gather of parameters starts from. `num_scales` is the number of matrices in a
    buffer held as codes: a refresh first reduces their largest magnitudes.
    """
    route = ROUTES[message]
    reduction, gathering = [], []
    summed = reduced_to(layout, plan, message)
    if route.reduction is not None:
        inner, outer = map(layout.tier_of, route.reduction)
        reduction = reduce_hops(layout, plan, message, numel, inner, summed)
        reduction += _whole_hops(layout, plan, message, numel, summed, outer)
    if route.gathering is not None:
        outer, inner = map(layout.tier_of, route.gathering)
        if route.reduction is not None:
            outer = summed
        if route.carries == "all":  # the primary copy, unless the instruction reads the secondary one
            outer = layout.params if source is None else source
        gathering = gather_hops(layout, plan, message, numel, outer, inner, coded=num_scales > 0)
    if num_scales and message is MessageClass.REFRESH:
        reduction = scale_hops(layout, num_scales)
    return reduction, gathering


def scale_hops(layout: "Layout", num_scales: int) -> list[Hop]:
    """Hops that reduce the matrices' largest magnitudes, fp32, among the ranks that shard their masters."""
    tiers = range(layout.optimizer + 1)
    return [Hop(tier, layout.degrees[tier], FORMATS["fp32"], num_scales) for tier in tiers if layout.degrees[tier] > 1]


def reduced_to(layout: "Layout", plan: Plan, message: MessageClass) -> int:
    """Tier of the shard that a rank holds after the reduction of a message; -1 without a reduction."""
    route = ROUTES[message]
    if route.reduction is None:
        return -1
    outer = layout.tier_of(route.reduction[1])
    whole = [tier for tier in all_reduced_tiers(layout, message) if _format(layout, plan, message, tier).kept_of]
    whole += between_two(layout, plan, message)
    return min(whole, default=outer + 1) - 1


def between_two(layout: "Layout", plan: Plan, message: MessageClass) -> list[int]:
    """The outermost all-reduced tier, if it has two members and a block format; they exchange whole messages there.

    Empty otherwise.
    """
    # Two members send as many bytes either way.
    reduced = all_reduced_tiers(layout, message)[-1:]
    return [tier for tier in reduced if layout.degrees[tier] == 2 and _format(layout, plan, message, tier).block]


def all_reduced_tiers(layout: "Layout", message: MessageClass) -> list[int]:
    """Indexes of the tiers with peers over which a message is all-reduced, innermost first."""
    route = ROUTES[message]
    if route.reduction is None or route.gathering is None:
        return []
    inner, outer = map(layout.tier_of, route.reduction)
    first = max(inner, layout.tier_of(route.gathering[1])) + 1
    return [tier for tier in range(first, outer + 1) if layout.degrees[tier] > 1]


def _whole_hops(layout: "Layout", plan: Plan, message: MessageClass, numel: int, inner: int, outer: int) -> list[Hop]:
    # From the outermost tier inward, like a gather, so that the fewest messages cross outer links.
    hops, pieces = list[Hop](), 1
    for tier in range(outer, inner, -1):
        degree, wire = layout.degrees[tier], _format(layout, plan, message, tier)
        if degree > 1 and numel:
            hops.append(Hop(tier, degree, wire, numel // layout.span(inner), pieces, is_whole=True))
            pieces *= degree
    return hops


def _format(layout: "Layout", plan: Plan, message: MessageClass, tier: int) -> WireFormat:
    return plan.wire_format(message, layout.tiers[tier])


def crossed_tiers(layout: "Layout", message: MessageClass) -> tuple[int, ...]:
    """Indexes of the tiers that a message class crosses.

    For messages inside blocks and between stages, these are the tiers where the axes of the class have several ranks;
    `layout` need not join those.
    """
    if message in ROUTES or layout.mesh is None:
        return tuple(layout.route(message))
    if message in ROUTED_ROWS:
        return layout.mesh.routed_tiers
    return tuple(tier for tier, degree in enumerate(layout.mesh.group(*axes_of(message))) if degree > 1)


def axes_of(message: MessageClass) -> tuple[str, ...]:
    """The axes whose ranks exchange a message class that is not in `ROUTES`."""
    if message is MessageClass.CONTEXT:
        return CONTEXT
    return PIPELINE if message in BETWEEN_STAGES else TENSOR


def coded_messages(layout: "Layout", plan: Plan, *, lossy: bool = False) -> tuple[MessageClass, ...]:
    """Message classes that cross some tier in a block format; with `lossy`, in one that rounds.

    `layout` joins all ranks that together hold a block.
    """
    found = []
    for message in PLACEABLE:
        # Messages between islands span many steps, so they are not in a step's sums.
        if message is MessageClass.OUTER:
            continue
        # `layout` does not join the ranks of classes inside blocks or between stages.
        tiers = (tier for tier in crossed_tiers(layout, message) if message not in ROUTES or layout.degrees[tier] > 1)
        wires = (wire for tier in tiers for wire in plan.wire_formats(message, layout.tiers[tier]))
        if any(wire.block and not (lossy and wire.packed) for wire in wires):
            found.append(message)
    return tuple(found)


def lossy_messages(layout: "Layout", plan: Plan) -> tuple[MessageClass, ...]:
    """Message classes that cross some tier in a block format that rounds, whose error is measured."""
    return coded_messages(layout, plan, lossy=True)


def control_numbers(layout: "Layout", plan: Plan, blocks: Sequence[BlockSpec]) -> int:
    """Number of fp64 numbers in a control message.

    Squared gradient norm, loss and token count; router figures, if any block has a router; squared error and squared
    norm of each lossy message class; the largest score of each head under QK-clip.
    """
    sums = 3 + len(FIGURES) * has_routers(blocks) + 2 * len(lossy_messages(layout, plan))
    return sums + num_scores(plan, blocks)


def num_scores(plan: Plan, blocks: Sequence[BlockSpec]) -> int:
    """Number of largest scores that ranks exchange at the end of a step: one of each query head of the model."""
    return sum(block.operations.core.heads for block in blocks) if parse_update(plan.update).clips_scores else 0


def outer_hops(world: "Layout", plan: Plan, blocks: Sequence[BlockSpec], exchange: Exchange) -> tuple[Hop, ...]:
    """The hops of an exchange's fp64 numbers, innermost tier first.

    The numbers are `OUTER_FIGURES` of each fragment that starts and a digest of each of its blocks. Outside islands,
    received numbers are forwarded, so that every rank gets those of all islands.
    """
    trained = (index for index, block in enumerate(blocks) if block.num_trainable)
    digests = sum(plan.outer.fragment(index) in exchange.starts for index in trained)
    numbers, pieces, hops = len(OUTER_FIGURES) * len(exchange.starts) + digests, 1, list[Hop]()
    for tier, degree in enumerate(world.degrees):
        if degree > 1:
            hops.append(Hop(tier, degree, FORMATS["fp64"], numbers, pieces))
            pieces *= degree if tier in world.outside else 1
    return tuple(hops)


def residual_numels(layout: "Layout", plan: Plan, numel: int) -> Iterator[int]:
    """Number of elements of each error-feedback residual for a block of `numel` padded elements."""
    for message in CHANGES if plan.wire else ():  # dtypes have no residual
        reduction, gathering = block_hops(layout, plan, message, numel)
        for hop in reduction:
            # A rank's own part is not rounded and has no residual, except for whole messages, which are rounded once.
            if hop.wire.feedback and hop.pieces == 1:
                yield hop.numel if hop.is_whole else (hop.degree - 1) * hop.numel
        # Only the hop that encodes makes an error; forwarded pieces (`pieces > 1`) make none.
        yield from (hop.numel for hop in gathering if hop.wire.feedback and hop.pieces == 1)
