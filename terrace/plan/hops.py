"""The hops of a message, the tiers it crosses: wire format and bytes on each, and the memory that they take.

With P padded elements in a flat buffer, a hop over tier i with n_i members makes a rank send its part of P / span(i)
elements to n_i - 1 peers (spans: terrace.plan.layout):

    bytes(i) = (n_i - 1) * pieces * message_bytes(numel)        pieces * numel = P / span(i)

Sparse messages of sums that all members get, and coded ones between two members, go whole to every member, which adds
them up (`Hop.is_whole`): over the tiers u + 1 .. t a rank sends its part of P / span(u) elements, coded once, and
forwards the pieces that arrived over the tiers outside:

    bytes(i) = (n_i - 1) * pieces * message_bytes(P / span(u))  pieces = n_(i+1) ... n_t

Messages of a program are made of hops (terrace.program.message), and so are the formulas of bytes and memory.
`terrace.plan.routes` says which hops a message class takes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrace.plan.wire import CODES, FORMATS, MessageClass, WireFormat

if TYPE_CHECKING:
    from terrace.plan.plan import Plan

_OF_SUMS = (MessageClass.SYNC, MessageClass.OUTER)
RESIDUAL_BYTES = 4  # error feedback is kept in fp32
RESIDUAL_COPIES = 2  # the second is of before the step, which may be given up
# To select the largest, a magnitude of 4 bytes is written, read for the maxima of groups and compared; its flag of a
# byte is written and read (terrace.comm.codecs.sparse_cpu).
_SELECTION_BYTES = 3 * 4 + 2
ARENA_ALIGNMENT = 64  # bytes: a cache line, and enough for any vector load


@dataclass(frozen=True)
class Hop:
    """One tier that a message crosses, with `degree` members; a rank sends `pieces` messages to each peer.

    `is_whole`: of a reduction, and every member gets the messages of all and adds them up itself.
    """

    tier: int
    degree: int
    wire: WireFormat
    numel: int
    pieces: int = 1
    is_whole: bool = False

    @property
    def part_bytes(self) -> int:
        """Bytes a rank sends to one peer."""
        return self.pieces * self.wire.message_bytes(self.numel)

    @property
    def sent_bytes(self) -> int:
        """Bytes a rank sends over this tier."""
        return (self.degree - 1) * self.part_bytes


def hops_coding_bytes(plan: "Plan", message: MessageClass, reduction: Sequence[Hop], gathering: Sequence[Hop]) -> float:
    """Bytes of memory that coding and decoding in block formats reads and writes for one message of a rank.

    On every hop a reduction codes the parts it sends and adds the decoded parts to sums (`Plan.sums`); a gather
    codes its own part once and decodes the whole; so does a sum of whole messages, but it adds them up. Error feedback
    reads and writes its residual too. 0 for dtypes.
    """
    summed, compute = FORMATS[plan.sums].element_bytes, FORMATS[plan.compute].element_bytes
    held = compute if message in (MessageClass.REDUCE, MessageClass.TENSOR) else summed
    total = 0.0
    whole = [hop for hop in reduction if hop.is_whole]
    for hop in reduction[: len(reduction) - len(whole)]:
        if hop.wire.block:
            # A rank's own part is neither coded nor sent.
            coded, added = (hop.degree - 1) * hop.numel, (hop.degree - 1) * _num_decoded(hop)
            total += coded * (held + _coding_bytes(hop)) + added * 2 * summed + 2 * hop.sent_bytes
        held = summed
    if whole:
        first, number = whole[0], whole[-1].degree * whole[-1].pieces
        total += first.numel * (held + _coding_bytes(first) + summed)  # the sum begins at zero
        total += first.part_bytes * (1 + number) + number * _num_decoded(first) * 2 * summed
    # After the first hop the values are sums. These gather sums, every other gather parameters or activations.
    held = summed if message in _OF_SUMS else compute
    # A run is coded once, on its first hop, and decoded once, after its last.
    for run in encodings(gathering):
        first, last = run[0], run[-1]
        if first.wire.block:
            number = last.degree * last.pieces
            total += first.numel * (held * (1 + number) + _coding_bytes(first)) + first.part_bytes * (1 + number)
    return total


def number_bytes(plan: "Plan") -> int:
    """Bytes of a number of the loss, of a norm's statistics or of a gate's weight: fp32 at least."""
    return max(4, FORMATS[plan.compute].element_bytes)


def _coding_bytes(hop: Hop) -> int:
    # What coding an element reads and writes besides the element and its code.
    return (2 * RESIDUAL_BYTES if hop.wire.feedback else 0) + selection_bytes(hop.wire)


def selection_bytes(wire: WireFormat) -> int:
    """Bytes that selecting the largest elements reads and writes for each; 0 for formats that keep all."""
    return _SELECTION_BYTES if wire.kept_of else 0


def _num_decoded(hop: Hop) -> int:
    return hop.wire.num_kept(hop.numel) if hop.wire.kept_of else hop.numel


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


def reduce_buffers(plan: "Plan", message: MessageClass, hops: Sequence[Hop]) -> list[int]:
    """Bytes of each buffer that a reduction takes, in order.

    Per hop: the outgoing message if it must be converted, the incoming one, and the sum. Of a block format a
    rank's own part is neither coded nor sent, but of whole messages.
    """
    sizes = []
    # A fresh gradient or activation is in the compute dtype; sums are in `plan.sums`.
    held = plan.compute if message in (MessageClass.REDUCE, MessageClass.TENSOR) else plan.sums
    for hop in hops:
        if hop.is_whole:
            # Later hops send what came in.
            sizes += [*([hop.part_bytes] if hop.pieces == 1 else []), hop.degree * hop.part_bytes]
            continue
        # Outgoing codes and incoming codes.
        if hop.wire.block:
            sizes += [hop.sent_bytes, hop.sent_bytes]
        else:
            # A dtype travels as one contiguous tensor, own part included; conversion is needed only if dtypes differ.
            whole = hop.degree * hop.part_bytes
            sizes += [whole if hop.wire.codec != held else 0, whole]
        sizes.append(hop.numel * FORMATS[plan.sums].element_bytes)
        held = plan.sums
    if hops and hops[-1].is_whole:
        sizes.append(hops[-1].numel * FORMATS[plan.sums].element_bytes)
    return sizes


def gather_buffers(plan: "Plan", message: MessageClass, hops: Sequence[Hop]) -> list[int]:
    """Bytes of each buffer that a gather takes, in order; none where parameters travel in place, codes among them."""
    sizes = []
    held = plan.sums if message in _OF_SUMS else plan.compute
    for hop in hops:
        # A forwarded hop (`pieces > 1`) sends the coded bytes it received and needs no outgoing buffer.
        if hop.wire.codec != held and hop.wire is not CODES:
            sizes += [hop.part_bytes if hop.pieces == 1 else 0, hop.degree * hop.part_bytes]
        elif sends_copies(message, hop):
            sizes.append(hop.degree * hop.part_bytes)
    return sizes


def sends_copies(message: MessageClass, hop: Hop) -> bool:
    """Whether a gather keeps room for a copy of its part for each peer, which reductions of its size need anyway."""
    return message is MessageClass.TENSOR and hop.degree > 2


def arena_bytes(sizes: Sequence[int]) -> int:
    """Bytes of buffers of these sizes, one behind the other, aligned."""
    return sum(-(-size // ARENA_ALIGNMENT) * ARENA_ALIGNMENT for size in sizes)
