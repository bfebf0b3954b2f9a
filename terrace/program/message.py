"""Messages: everything a communicating instruction sends, resolved once (terrace.program.resolve) and read by all.

A `Message` names its class, its lane, the ranks it is among, and its transfers. A `Transfer` is one run of collectives:
over the tiers of its reduction from the innermost outward, then over the tiers of its gather from the outermost inward,
with wire format and bytes of every hop (terrace.plan.hops). A message of a block has a transfer for each flat buffer it
carries (terrace.plan.flats), one after the other on one lane; a message inside a block has at most one.

The verifier, the printer, the simulator, the planner and the runtime read these values. Tests check their bytes against
closed formulas.
"""

from dataclasses import dataclass
from functools import cached_property

from terrace.plan.hops import Hop, arena_bytes
from terrace.plan.layout import Layout
from terrace.plan.wire import MessageClass


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The collectives of one flat buffer, or of one message inside a block, among the `ranks` that share it.

    `reduce_buffers` and `gather_buffers` are the bytes of each buffer that the lane's memory must hold, in order. Of a
    transfer of some `columns` of the flat buffer (terrace.plan.gaps), the packed columns are the first.
    """

    message_class: MessageClass
    lane: int
    ranks: Layout
    flat: int = -1  # number of the flat buffer in its block
    columns: tuple[int, int] | None = None  # the first, and the last exclusive; None: all of it
    reduction: tuple[Hop, ...] = ()
    gathering: tuple[Hop, ...] = ()
    reduce_buffers: tuple[int, ...] = ()
    gather_buffers: tuple[int, ...] = ()

    @property
    def hops(self) -> tuple[Hop, ...]:
        """All hops in the order in which they are crossed."""
        return (*self.reduction, *self.gathering)

    def reduced_to(self, outermost: int) -> int:
        """The tier whose part the reduction leaves on a rank: `outermost`, or inside it where messages go whole."""
        return min((hop.tier - 1 for hop in self.reduction if hop.is_whole), default=outermost)


@dataclass(frozen=True, kw_only=True)
class Message:
    """Message of one instruction, or of one step inside a block, as one rank sends it.

    `tiers` are the indexes of the tiers on which the rank has peers, in the order of crossing. `sends` is (tier index,
    bytes) of each collective or point-to-point message; empty for a RECV, since the peer sends its bytes.
    `coding_bytes` is the memory traffic of coding and decoding block formats, `fed_back` the elements of a message
    between stages whose rounding errors are kept. `parts` are those of a message in gaps, whose `sends` and `transfers`
    add up to those of the message.
    """

    message_class: MessageClass
    lane: int
    tiers: tuple[int, ...]
    ranks: Layout | None = None  # None for point to point, and for messages among a context axis
    transfers: tuple[Transfer, ...] = ()
    sends: tuple[tuple[int, int], ...] = ()
    coding_bytes: float = 0.0
    fed_back: int = 0
    parts: "tuple[Message, ...]" = ()

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """The hops of all transfers, in order."""
        return tuple(hop for transfer in self.transfers for hop in transfer.hops)

    @cached_property
    def arenas(self) -> dict[int, int]:
        """Bytes of message memory on each lane: those of the largest transfer, since they follow one another."""
        found: dict[int, int] = {}
        for transfer in (transfer for each in self.parts or (self,) for transfer in each.transfers):
            size = max(arena_bytes(transfer.reduce_buffers), arena_bytes(transfer.gather_buffers))
            found[transfer.lane] = max(found.get(transfer.lane, 0), size)
        return found
