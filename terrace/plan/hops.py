"""The hops of a message: the tiers it crosses, with wire format, bytes and buffers on each.

With P padded elements in a flat buffer, on a hop over tier i with n_i members a rank sends a shard of P / span(i)
elements to each of n_i - 1 peers (spans: terrace.plan.layout):

    bytes(i) = (n_i - 1) * pieces * message_bytes(numel)        pieces * numel = P / span(i)

An all-reduce of sparse messages, and one in a block format between two members, is an all-gather after which every
member adds up the messages (`Hop.is_whole`). Over the tiers u + 1 .. t a rank sends its shard of P / span(u) elements,
encoded once, and forwards the pieces that arrived over outer tiers:

    bytes(i) = (n_i - 1) * pieces * message_bytes(P / span(u))  pieces = n_(i+1) ... n_t

A program's messages (terrace.program.message) and the formulas for bytes and memory are built from hops.
`terrace.plan.routes` defines the hops of each message class.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrace.plan.wire import BYTES, CODES, FORMATS, MessageClass, WireFormat

if TYPE_CHECKING:
    from terrace.plan.plan import Plan

_OF_SUMS = (MessageClass.SYNC, MessageClass.OUTER)
RESIDUAL_BYTES = 4  # error feedback is kept in fp32
RESIDUAL_COPIES = 2  # current, and from before the step, in case the step is discarded
# Selecting the largest elements: a 4-byte magnitude is written, read for the group maxima and compared; a 1-byte flag
# is written and read (terrace.comm.codecs.sparse_cpu).
_SELECTION_BYTES = 3 * 4 + 2
# Decoding an element of a frozen matrix reads half a byte, writes and reads half an index of 4 bytes, and writes and
# reads its point, in fp32.
_LOOK_UP_BYTES = 13
ARENA_ALIGNMENT = 64  # bytes: a cache line, and enough for any vector load


@dataclass(frozen=True)
class Hop:
    """One tier that a message crosses, with `degree` members; a rank sends `pieces` messages to each peer.

    `is_whole`: hop of a reduction in which every member receives all messages and adds them up itself.
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
        return (self.degree - 1) * self.part_bytes


def hops_coding_bytes(plan: "Plan", message: MessageClass, reduction: Sequence[Hop], gathering: Sequence[Hop]) -> float:
    """Memory traffic in bytes of encoding and decoding one message on a rank; 0 for dtypes.

    On every hop a reduction encodes the parts it sends and adds decoded parts to sums (`Plan.sums`). A gather encodes
    its own part once and decodes everything; a sum of whole messages does the same and adds them up. Error feedback
    also reads and writes its residual.
    """
    summed, compute = FORMATS[plan.sums].element_bytes, FORMATS[plan.compute].element_bytes
    held = compute if message in (MessageClass.REDUCE, MessageClass.TENSOR) else summed
    total = 0.0
    whole = [hop for hop in reduction if hop.is_whole]
    for hop in reduction[: len(reduction) - len(whole)]:
        if hop.wire.block:
            # A rank's own part is neither encoded nor sent.
            coded, added = (hop.degree - 1) * hop.numel, (hop.degree - 1) * _num_decoded(hop)
            total += coded * (held + _coding_bytes(hop)) + added * 2 * summed + 2 * hop.sent_bytes
        held = summed
    if whole:
        first, number = whole[0], whole[-1].degree * whole[-1].pieces
        total += first.numel * (held + _coding_bytes(first) + summed)  # the sum begins at zero
        total += first.part_bytes * (1 + number) + number * _num_decoded(first) * 2 * summed
    # After the first hop the values are sums. `_OF_SUMS` gather sums, all others parameters or activations.
    held = summed if message in _OF_SUMS else compute
    # A run is encoded once, on its first hop, and decoded once, after its last.
    for run in encodings(gathering):
        first, last = run[0], run[-1]
        if first.wire.block:
            number = last.degree * last.pieces
            total += first.numel * (held * (1 + number) + _coding_bytes(first)) + first.part_bytes * (1 + number)
    return total


def decoding_bytes(plan: "Plan", numel: int) -> int:
    """Memory traffic in bytes of decoding `numel` elements of frozen matrices (terrace.runtime.base_codes)."""
    return numel * (_LOOK_UP_BYTES + FORMATS[plan.compute].element_bytes)


def number_bytes(plan: "Plan") -> int:
    """Bytes of one number of the loss, norm statistics or gate weights: fp32 or wider."""
    return max(4, FORMATS[plan.compute].element_bytes)


def _coding_bytes(hop: Hop) -> int:
    # Bytes that encoding an element reads and writes besides the element and its code.
    return (2 * RESIDUAL_BYTES if hop.wire.feedback else 0) + selection_bytes(hop.wire)


def selection_bytes(wire: WireFormat) -> int:
    """Bytes read and written per element to select the largest; 0 for formats that keep all elements."""
    return _SELECTION_BYTES if wire.kept_of else 0


def _num_decoded(hop: Hop) -> int:
    return hop.wire.num_kept(hop.numel) if hop.wire.kept_of else hop.numel


def encodings(hops: Sequence[Hop]) -> Iterator[list[Hop]]:
    """Split the hops of a gather into runs that share one encoding; a hop in a dtype is a run of its own."""
    run: list[Hop] = []
    for hop in hops:
        # A hop with one piece starts from decoded values and so begins a new encoding.
        if run and hop.pieces == 1:
            yield run
            run = []
        run.append(hop)
    if run:
        yield run


def reduce_buffers(plan: "Plan", message: MessageClass, hops: Sequence[Hop]) -> list[int]:
    """Bytes of each buffer for a reduction, in order.

    Per hop: the outgoing message if it must be converted, the incoming one, and the sum. In a block format a rank's own
    part is neither encoded nor sent, except for whole messages.
    """
    sizes = []
    # A fresh gradient or activation is in the compute dtype; sums are in `plan.sums`.
    held = plan.compute if message in (MessageClass.REDUCE, MessageClass.TENSOR) else plan.sums
    for hop in hops:
        if hop.is_whole:
            # Later hops forward received messages.
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
    """Bytes of each buffer for a gather, in order; none if parameters (or their codes) are gathered in place."""
    # Records of frozen matrices are gathered beside the memory that they are decoded into.
    if hops and hops[-1].wire.codec == BYTES:
        return [hops[-1].degree * hops[-1].part_bytes]
    sizes = []
    held = plan.sums if message in _OF_SUMS else plan.compute
    for hop in hops:
        # A forwarding hop (`pieces > 1`) sends the encoded bytes it received and needs no outgoing buffer.
        if hop.wire.codec != held and hop.wire is not CODES:
            sizes += [hop.part_bytes if hop.pieces == 1 else 0, hop.degree * hop.part_bytes]
        elif sends_copies(message, hop):
            sizes.append(hop.degree * hop.part_bytes)
    return sizes


def sends_copies(message: MessageClass, hop: Hop) -> bool:
    """Whether a gather sends every peer a copy of its part from a buffer of its own."""
    # The memory is there: a reduction on the same tier needs buffers as large.
    return message is MessageClass.TENSOR and hop.degree > 2


def arena_bytes(sizes: Sequence[int]) -> int:
    """Total bytes of consecutive, aligned buffers with these sizes."""
    return sum(-(-size // ARENA_ALIGNMENT) * ARENA_ALIGNMENT for size in sizes)
