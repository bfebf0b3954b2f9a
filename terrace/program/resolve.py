"""Resolves messages from a plan: lane, ranks, hops, formats, bytes and message memory.

A program calls these functions once per distinct instruction (terrace.program.program).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from terrace.model.spec import BlockSpec
from terrace.plan.counts import count_hops, num_counts
from terrace.plan.edges import edge_coding_bytes
from terrace.plan.flats import FlatParamSpec
from terrace.plan.gaps import part_buffers, part_columns, slices_of
from terrace.plan.hops import Hop, decoding_bytes, gather_buffers, hops_coding_bytes, number_bytes, reduce_buffers
from terrace.plan.in_block_messages import Leg, TensorMessage
from terrace.plan.layout import INSIDE, Layout, message_tiers
from terrace.plan.outer import Exchange
from terrace.plan.plan import Plan
from terrace.plan.routes import block_hops, control_numbers, outer_hops
from terrace.plan.tensor_traffic import TensorTraffic, line_hops
from terrace.plan.wire import FORMATS, ROUTES, MessageClass
from terrace.program.message import Message, Transfer


def block_message(
    message_class: MessageClass,
    stage_layout: Layout,
    plan: Plan,
    flats: Sequence[FlatParamSpec],
    source: int | None = None,
) -> Message:
    """Message of one class for a block with the flat buffers `flats`.

    `stage_layout` is the layout of all ranks that together hold a block. `source` overrides the tier that a gather of
    parameters starts from.
    """
    tiers = message_tiers(stage_layout, message_class, source, coded=any(flat.is_coded for flat in flats))
    lane = max(tiers, default=0)
    transfers = list[Transfer]()
    for number, flat in enumerate(flats):
        if carries(message_class, flat, source):
            own = flat_transfer(message_class, lane, flat.layout, plan, flat.padded, source, number, flat.num_scales)
            transfers += [own, *_of_parts(message_class, lane, plan, flat, number)]
    # A pure gather crosses the outermost tier first.
    if ROUTES[message_class].reduction is None:
        tiers = tiers[::-1]
    message = _collective(message_class, plan, lane, tiers, stage_layout, transfers)
    decoded = sum(decoding_bytes(plan, flats[each.flat].padded) for each in transfers if each.ranks.code)
    return replace(message, coding_bytes=message.coding_bytes + decoded) if decoded else message


def _of_parts(
    message_class: MessageClass, lane: int, plan: Plan, flat: FlatParamSpec, number: int
) -> Iterator[Transfer]:
    """The transfer among the ranks that hold the other parts of matrices that the tensor axis cuts."""
    if message_class is MessageClass.ORTHOGONALISE and flat.layout.across.degree > 1:
        yield flat_transfer(message_class, lane, flat.layout.across, plan, flat.gathered_numel, flat=number)


def carries(message_class: MessageClass, flat: FlatParamSpec, source: int | None) -> bool:
    """Whether the message of a block (`block_message`) has a transfer for this flat buffer."""
    # There is none for buffers that this class does not carry (whole, frozen, or not orthogonalised), nor for a
    # whole secondary copy, which the first gather has filled.
    return flat.travels_in(message_class) and (source is None or flat.layout.frees)


def flat_transfer(
    message_class: MessageClass,
    lane: int,
    ranks: Layout,
    plan: Plan,
    padded: int,
    source: int | None = None,
    flat: int = -1,
    num_scales: int = 0,
) -> Transfer:
    """The transfer of flat buffer `flat` of a block, with `padded` elements; see `block_message`."""
    reduction, gathering = block_hops(ranks, plan, message_class, padded, source, num_scales)
    summed = [] if num_scales and message_class is MessageClass.REFRESH else reduction  # scales are no sums
    return Transfer(
        message_class=message_class,
        lane=lane,
        ranks=ranks,
        flat=flat,
        reduction=tuple(reduction),
        gathering=tuple(gathering),
        reduce_buffers=tuple(reduce_buffers(plan, message_class, summed)),
        gather_buffers=tuple(gather_buffers(plan, message_class, gathering)),
    )


def message_in_gaps(whole: Message, plan: Plan, flats: Sequence[FlatParamSpec]) -> Message:
    """The gradient message `whole`, cut into parts; a part without columns sends nothing."""
    columns = [part_columns(plan, flats[each.flat].layout, flats[each.flat].padded) for each in whole.transfers]
    parts = []
    for part in range(len(plan.gap_shares)):
        pairs = ((each, of[part]) for each, of in zip(whole.transfers, columns, strict=True))
        carried = [_part(each, plan, start, stop) for each, (start, stop) in pairs if each.hops and start < stop]
        tiers = whole.tiers if carried else ()
        parts.append(_collective(whole.message_class, plan, whole.lane, tiers, whole.ranks, carried))
    sends = tuple(each for part in parts for each in part.sends)
    return replace(whole, parts=tuple(parts), sends=sends, coding_bytes=sum(part.coding_bytes for part in parts))


def _part(whole: Transfer, plan: Plan, start: int, stop: int) -> Transfer:
    numel = (stop - start) * slices_of(whole.ranks)
    reduced, gathered = part_buffers(plan, whole.ranks, whole.message_class, numel)
    part = flat_transfer(whole.message_class, whole.lane, whole.ranks, plan, numel, flat=whole.flat)
    return replace(part, columns=(start, stop), reduce_buffers=tuple(reduced), gather_buffers=tuple(gathered))


AGREED = 2  # numbers of AGREE: the squared gradient norm of a block, and the tokens of the step


def control_message(
    stage_layout: Layout,
    world_layout: Layout,
    plan: Plan,
    blocks: Sequence[BlockSpec],
    *,
    inside: bool = True,
    numbers: int = 0,
) -> Message:
    """Message of CLIP: on each tier a rank sends all its numbers to every peer and sums those it receives.

    `numbers` is how many another op sends, such as AGREE; 0: those of CLIP. With `inside` the message stays inside an
    island.
    """
    crossed = world_layout.inside if inside else range(len(world_layout.tiers))
    tiers = tuple(tier for tier in crossed if world_layout.degrees[tier] > 1)
    numbers = numbers or control_numbers(stage_layout, plan, blocks)
    # Few numbers (losses, squared norms, token counts), so fp64 costs next to nothing.
    hops = tuple(Hop(tier, world_layout.degrees[tier], FORMATS["fp64"], numbers) for tier in tiers)
    # As for block messages, the lane is the outermost tier.
    lane, message_class = max(tiers, default=0), MessageClass.CONTROL
    return _collective(
        message_class,
        plan,
        lane,
        tiers,
        world_layout,
        [Transfer(message_class=message_class, lane=lane, ranks=world_layout, gathering=hops)],
    )


def outer_numbers_message(world_layout: Layout, plan: Plan, blocks: Sequence[BlockSpec], exchange: Exchange) -> Message:
    """Message of OUTER_COUNT: numbers are summed over an island as for CLIP, then gathered from all islands."""
    hops = outer_hops(world_layout, plan, blocks, exchange)
    inside = tuple(hop for hop in hops if hop.tier in world_layout.inside)
    outside = hops[len(inside) :]
    lane, message_class = hops[-1].tier, MessageClass.OUTER
    transfer = Transfer(message_class=message_class, lane=lane, ranks=world_layout, reduction=inside, gathering=outside)
    return _collective(message_class, plan, lane, tuple(hop.tier for hop in hops), world_layout, [transfer])


def counts_message(stage_layout: Layout, plan: Plan, blocks: Sequence[BlockSpec]) -> Message:
    """Message of COUNT for `blocks`: counts are reduced over a stage from the innermost tier outward, then gathered."""
    hops, message_class = count_hops(stage_layout, num_counts(blocks)), MessageClass.COUNTS
    lane, tiers = max((hop.tier for hop in hops), default=0), tuple(hop.tier for hop in hops)
    transfer = Transfer(
        message_class=message_class, lane=lane, ranks=stage_layout, reduction=hops, gathering=hops[::-1]
    )
    return _collective(message_class, plan, lane, tiers, stage_layout, [transfer])


def stage_message(message_class: MessageClass, tier: int, num_bytes: int) -> Message:
    """A message of `num_bytes` from a rank to its peer on another stage, across `tier`."""
    return Message(message_class=message_class, lane=tier, tiers=(tier,), sends=((tier, num_bytes),))


def edge_message(message_class: MessageClass, hop: Hop, compute: str, *, received: bool) -> Message:
    """An activation or gradient sent to a peer on another stage; the sender's message counts coding on both sides."""
    if received:
        return Message(message_class=message_class, lane=hop.tier, tiers=(hop.tier,))
    sent, fed_back = stage_message(message_class, hop.tier, hop.part_bytes), hop.numel if hop.wire.feedback else 0
    return replace(sent, coding_bytes=edge_coding_bytes(compute, hop), fed_back=fed_back)


def tensor_message(tensor: TensorTraffic, message: TensorMessage) -> Message:
    """A message inside a block, among ranks of the tensor axis or ranks that share sequences."""
    line, plan = tensor.line(message.axes), tensor.plan
    # Statistics such as a norm's squares are sent unrounded; activations use the wire format of each tier.
    if message.leg is Leg.NUMBERS:
        transfer = number_transfer(line, plan, message.numel)
    else:
        transfer = line_transfer(line, plan, message.leg, message.numel)
    tiers = tuple(hop.tier for hop in transfer.hops)
    return _collective(message.message_class, plan, INSIDE, tiers, line, [transfer])


def number_transfer(line: Layout, plan: Plan, numel: int) -> Transfer:
    """A gather of `numel` numbers from every rank of `line`, never rounded."""
    hops, pieces, wire = [], 1, FORMATS["fp32" if number_bytes(plan) == 4 else "fp64"]
    for tier, degree in enumerate(line.degrees):
        if degree > 1:  # forward numbers gathered over inner tiers
            hops.append(Hop(tier, degree, wire, numel, pieces))
            pieces *= degree
    message_class = TensorMessage(Leg.NUMBERS, line.axes, numel).message_class
    return Transfer(message_class=message_class, lane=INSIDE, ranks=line, gathering=tuple(hops))


def line_transfer(line: Layout, plan: Plan, leg: Leg, numel: int) -> Transfer:
    """A gather or reduction of `numel` padded elements over the ranks of `line`."""
    hops, message_class = tuple(line_hops(line, plan, leg, numel)), MessageClass.TENSOR
    transfer = Transfer(message_class=message_class, lane=INSIDE, ranks=line)
    if leg is Leg.GATHER:
        return replace(transfer, gathering=hops, gather_buffers=tuple(gather_buffers(plan, message_class, hops)))
    return replace(transfer, reduction=hops, reduce_buffers=tuple(reduce_buffers(plan, message_class, hops)))


def context_message(sends: tuple[tuple[int, int], ...]) -> Message:
    """A message inside a block among context ranks; `sends` are (tier index, bytes sent)."""
    tiers = tuple(tier for tier, _ in sends)
    return Message(message_class=MessageClass.CONTEXT, lane=INSIDE, tiers=tiers, sends=sends)


def _collective(
    message_class: MessageClass,
    plan: Plan,
    lane: int,
    tiers: tuple[int, ...],
    ranks: Layout | None,
    transfers: Sequence[Transfer],
) -> Message:
    hops = [hop for transfer in transfers for hop in transfer.hops]
    # Dtypes are cast on the fly; only block formats cost memory traffic.
    coding = 0.0
    if any(hop.wire.block for hop in hops):
        coding = sum(hops_coding_bytes(plan, message_class, each.reduction, each.gathering) for each in transfers)
    return Message(
        message_class=message_class,
        lane=lane,
        tiers=tiers,
        ranks=ranks,
        transfers=tuple(transfers),
        sends=tuple((hop.tier, hop.sent_bytes) for hop in hops),
        coding_bytes=coding,
    )
