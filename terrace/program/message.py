"""Messages: everything that a communicating instruction sends, resolved once (terrace.program.resolve).

A `Message` has its class, its lane, its ranks, and its transfers. A `Transfer` is a sequence of collectives: a
reduction from the innermost tier outward, then a gather from the outermost tier inward, with wire format and bytes of
every hop (terrace.plan.hops). A message of a block has one transfer per flat buffer that it carries
(terrace.plan.flats), in order on one lane; a message inside a block has at most one.

Verifier, printer, simulator, planner and runtime use these values. Tests check their bytes against closed formulas.
"""

from dataclasses import dataclass
from functools import cached_property

from terrace.plan.hops import Hop, arena_bytes
from terrace.plan.layout import Layout
from terrace.plan.wire import MessageClass


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The collectives of one flat buffer, or of one message inside a block, among the `ranks` that shard it.

    `reduce_buffers` and `gather_buffers` are the bytes of each buffer in the lane's memory, in order. For a transfer of
    only some `columns` of the flat buffer (terrace.plan.gaps), the first holds the packed columns.
    """

    message_class: MessageClass
    lane: int
    ranks: Layout
    flat: int = -1  # index of the flat buffer in its block
    columns: tuple[int, int] | None = None  # (start, stop); None: all columns
    reduction: tuple[Hop, ...] = ()
    gathering: tuple[Hop, ...] = ()
    reduce_buffers: tuple[int, ...] = ()
    gather_buffers: tuple[int, ...] = ()

    @property
    def hops(self) -> tuple[Hop, ...]:
        """All hops in the order of crossing."""
        return (*self.reduction, *self.gathering)

    def reduced_to(self, outermost: int) -> int:
        """Tier of the shard that a rank holds after the reduction.

        `outermost`, or the tier inside the first hop with whole messages.
        """
        return min((hop.tier - 1 for hop in self.reduction if hop.is_whole), default=outermost)


@dataclass(frozen=True, kw_only=True)
class Message:
    """Message of one instruction, or of one step inside a block, as one rank sends it.

    `tiers` are the tiers on which the rank has peers, in the order of crossing. `sends` is (tier index, bytes) of each
    collective or point-to-point message; empty for a RECV, since the peer sends the bytes. `coding_bytes` is the memory
    traffic of encoding and decoding block formats, `fed_back` the number of elements with an error-feedback residual in
    a message between stages. `parts` are the parts of a message in gaps; their `sends` add up to those of the message.
    """

    message_class: MessageClass
    lane: int
    tiers: tuple[int, ...]
    ranks: Layout | None = None  # None for point-to-point and context messages
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
    def collectives(self) -> tuple[tuple[int, Layout], ...]:
        """(Tier, ranks) of each collective; empty for point-to-point and context messages."""
        ranks = self.ranks
        return () if ranks is None else tuple((tier, ranks) for tier in self.tiers)

    @cached_property
    def arenas(self) -> dict[int, int]:
        """Lane -> bytes of message memory: the largest transfer, since transfers run one after another."""
        found: dict[int, int] = {}
        for transfer in (transfer for each in self.parts or (self,) for transfer in each.transfers):
            size = max(arena_bytes(transfer.reduce_buffers), arena_bytes(transfer.gather_buffers))
            found[transfer.lane] = max(found.get(transfer.lane, 0), size)
        return found
