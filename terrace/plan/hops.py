"""The hops of a message: the tiers it crosses, with wire format and bytes on each.

A gather goes from the outermost tier inward, a reduction from the innermost outward. With P padded elements
in a flat buffer, a hop over tier i with n_i members makes a rank send its part of P / span(i) elements to
n_i - 1 peers:

    bytes(i) = (n_i - 1) * pieces * message_bytes(numel)        pieces * numel = P / span(i)

A reduction codes every part anew after each sum. A gather with neighbouring tiers in the same block
format codes once, on the outermost of them, and the tiers inside forward the messages as they came: one
rounding, however many tiers. There `pieces` messages of `numel` elements travel together.

Messages of a program are made of hops (terrace.program.message), and so are the formulas of bytes and memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from terrace.plan.layout import Layout
from terrace.plan.mesh import TENSOR
from terrace.plan.plan import Plan
from terrace.plan.wire import FORMATS, GRADIENTS, PLACEABLE, ROUTES, MessageClass, WireFormat

RESIDUAL_BYTES = 4  # error feedback is kept in fp32


@dataclass(frozen=True)
class Hop:
    """One tier that a message crosses, with `degree` members; a rank sends `pieces` messages to each peer."""

    tier: int
    degree: int
    wire: WireFormat
    numel: int
    pieces: int = 1

    @property
    def part_bytes(self) -> int:
        """Bytes a rank sends to one peer."""
        return self.pieces * self.wire.message_bytes(self.numel)

    @property
    def sent_bytes(self) -> int:
        """Bytes a rank sends over this tier."""
        return (self.degree - 1) * self.part_bytes


def gather_hops(layout: Layout, plan: Plan, message: MessageClass, numel: int, outer: int, inner: int) -> list[Hop]:
    """The hops of a gather of `numel` padded elements from tier `outer` to tier `inner`, in order."""
    hops: list[Hop] = []
    for tier in range(outer, inner, -1):
        degree, wire = layout.degrees[tier], plan.wire_format(message, layout.tiers[tier])
        if degree == 1 or not numel:
            continue
        # Same block format as the tier outside: forward its coded pieces instead of rounding again.
        if hops and wire.block and hops[-1].wire == wire:
            # Each forwarded message is one piece; their number grows by the degree of every tier crossed.
            hops.append(Hop(tier, degree, wire, hops[-1].numel, hops[-1].pieces * hops[-1].degree))
        else:
            hops.append(Hop(tier, degree, wire, numel // layout.span(tier)))
    return hops


def reduce_hops(layout: Layout, plan: Plan, message: MessageClass, numel: int, inner: int, outer: int) -> list[Hop]:
    """The hops of a reduction of `numel` padded elements from tier `inner` to tier `outer`, in order."""
    return [
        Hop(tier, layout.degrees[tier], plan.wire_format(message, layout.tiers[tier]), numel // layout.span(tier))
        for tier in range(inner + 1, outer + 1)
        if layout.degrees[tier] > 1 and numel
    ]


def block_hops(
    layout: Layout, plan: Plan, message: MessageClass, numel: int, source: int | None = None
) -> tuple[list[Hop], list[Hop]]:
    """(Hops of the reduction, hops of the gather) of one message of a block of `numel` padded elements.

    `source` is the tier that a gather of parameters starts from, where it is not the one the plan names.
    """
    route = ROUTES[message]
    reduction, gathering = [], []
    if route.reduction is not None:
        inner, outer = map(layout.tier_of, route.reduction)
        reduction = reduce_hops(layout, plan, message, numel, inner, outer)
    if route.gathering is not None:
        outer, inner = map(layout.tier_of, route.gathering)
        if route.carries == "all":  # the primary copy, unless the instruction reads the secondary one
            outer = layout.params if source is None else source
        gathering = gather_hops(layout, plan, message, numel, outer, inner)
    return reduction, gathering


def lossy_messages(layout: Layout, plan: Plan) -> tuple[MessageClass, ...]:
    """Message classes that cross some tier in a block format; their rounding error is measured.

    `layout` joins all ranks that hold some part of a block together.
    """
    # TENSOR messages cross the tensor axis' tiers, which `layout` does not describe.
    tensor = layout.mesh.group(*TENSOR) if layout.mesh is not None else (1,) * len(layout.tiers)

    def crossed(message: MessageClass) -> list[int]:
        if message is MessageClass.TENSOR:
            return [tier for tier, degree in enumerate(tensor) if degree > 1]
        return [tier for tier in layout.route(message) if layout.degrees[tier] > 1]

    return tuple(
        message
        for message in PLACEABLE
        if any(plan.wire_format(message, layout.tiers[tier]).block for tier in crossed(message))
    )


def hops_coding_bytes(plan: Plan, message: MessageClass, reduction: Sequence[Hop], gathering: Sequence[Hop]) -> float:
    """Bytes of memory that coding and decoding in block formats reads and writes for one message of a rank.

    On every hop a reduction codes the parts it sends and adds the decoded parts to sums in the master dtype; a gather
    codes its own part once and decodes the whole. Error feedback reads and writes its residual too. 0 for dtypes.
    """
    master, compute = FORMATS[plan.master].element_bytes, FORMATS[plan.compute].element_bytes
    held = compute if message in (MessageClass.REDUCE, MessageClass.TENSOR) else master
    total = 0.0
    for hop in reduction:
        if hop.wire.block:
            # A rank's own part is neither coded nor sent.
            coded = (hop.degree - 1) * hop.numel
            total += coded * (held + _feedback_bytes(hop) + 2 * master) + 2 * hop.sent_bytes
        held = master
    # After the first hop the values are sums, kept in the master dtype.
    # SYNC gathers accumulated gradients, every other gather parameters or activations.
    held = master if message is MessageClass.SYNC else compute
    # A run is coded once, on its first hop, and decoded once, after its last.
    for run in encodings(gathering):
        first, last = run[0], run[-1]
        if first.wire.block:
            whole = last.degree * last.pieces
            total += first.numel * (held * (1 + whole) + _feedback_bytes(first)) + first.part_bytes * (1 + whole)
    return total


def _feedback_bytes(hop: Hop) -> int:
    return 2 * RESIDUAL_BYTES if hop.wire.feedback else 0


def control_numbers(layout: Layout, plan: Plan) -> int:
    """Number of fp64 numbers in a control message.

    The squared norm, the loss and the token count; then squared error and square of each lossy class.
    """
    return 3 + 2 * len(lossy_messages(layout, plan))


def residual_numels(layout: Layout, plan: Plan, numel: int) -> Iterator[int]:
    """Elements of each residual that error feedback keeps for a block of `numel` padded elements."""
    for message in GRADIENTS:
        reduction, gathering = block_hops(layout, plan, message, numel)
        # A rank's own part is not rounded and leaves no residual.
        yield from ((hop.degree - 1) * hop.numel for hop in reduction if hop.wire.feedback)
        # Only the hop that codes makes an error; forwarded pieces (`pieces > 1`) make none.
        yield from (hop.numel for hop in gathering if hop.wire.feedback and hop.pieces == 1)


def encodings(hops: Sequence[Hop]) -> Iterator[list[Hop]]:
    """The hops of a gather in runs that share one encoding; a hop in a dtype is a run of its own."""
    run: list[Hop] = []
    for hop in hops:
        # A hop of one piece starts from decoded values, hence a new encoding.
        if run and hop.pieces == 1:
            yield run
            run = []
        run.append(hop)
    if run:
        yield run
