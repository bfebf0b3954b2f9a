"""The messages that carry tokens to experts on other ranks and back; none if every rank has every expert.

For sizes see terrace.plan.expert_traffic, for the order terrace.program.block_program.routed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.dims import has_routers, hidden_size
from terrace.plan.expert_traffic import ExpertTraffic
from terrace.plan.hops import Hop
from terrace.plan.in_block_messages import RoutedMessage
from terrace.plan.layout import Layout
from terrace.plan.mesh import PARTS, Mesh
from terrace.plan.tensor_traffic import TensorTraffic
from terrace.plan.wire import FORMATS, ROUTED_ROWS, MessageClass
from terrace.program.message import Message, Transfer


@dataclass(frozen=True)
class Routed:
    """The routed messages of all blocks under a plan."""

    cluster: Cluster
    mesh: Mesh
    tensor: TensorTraffic
    blocks: Sequence[BlockSpec]

    @cached_property
    def lines(self) -> tuple[Layout, Layout]:
        """(Ranks with different experts, ranks that cut every expert); single ranks without a factoring for experts."""
        stacks = self.mesh.stacks if self.mesh.divides_stacks else self.mesh.only("pipeline")
        expert, rows = (Layout.of(self.cluster, self.tensor.plan, axes, stacks) for axes in (PARTS, ("rows",)))
        return expert, rows

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """One transfer per kind of message between tokens and experts; empty if experts are not distributed."""
        return tuple(transfer for line in self.lines for transfer in self._transfers(line))

    @cached_property
    def lanes(self) -> frozenset[int]:
        """The tier lanes that routed messages use."""
        return frozenset(each.lane for each in self.transfers)

    def traffic(self, block: int) -> ExpertTraffic:
        """Message sizes of a block; `NO_TRAFFIC` if it has no experts on other ranks."""
        return ExpertTraffic.of(self.tensor, self.blocks[block])

    def message(self, message: RoutedMessage, block: int) -> Message:
        """Resolve a message of a block, with its expected bytes."""
        sends, line = self.traffic(block).sends(message), self.lines[message.copies]
        tiers = tuple(tier for tier, _ in sends)
        return Message(message_class=message.message_class, lane=message.tier, tiers=tiers, ranks=line, sends=sends)

    def _transfers(self, line: Layout) -> Iterator[Transfer]:
        # Tables of counts are one message over all tiers of a line, rows one message per tier, each on the lane of its
        # outermost tier. Sizes depend on the batch; a hop of rows has the size of one row.
        tiers = [(tier, degree) for tier, degree in enumerate(line.degrees) if degree > 1]
        if not tiers:
            return
        tables = tuple(Hop(tier, degree, FORMATS["fp32"], 1) for tier, degree in tiers)
        yield Transfer(message_class=MessageClass.ROUTE, lane=tiers[-1][0], ranks=line, gathering=tables)
        for message_class in ROUTED_ROWS:
            for tier, degree in tiers:
                wire = self.tensor.plan.wire_format(message_class, line.tiers[tier])
                hop = Hop(tier, degree, wire, hidden_size(self.blocks))
                yield Transfer(message_class=message_class, lane=tier, ranks=line, gathering=(hop,))


def uneven_rows(blocks: Sequence[BlockSpec]) -> str:
    """Why matmuls have a varying number of rows per micro-batch; "" if they have not."""
    mixture = next((block.name for block in blocks if has_routers([block])), "")
    return f"the rows of an expert of {mixture} are another number in every micro-batch" if mixture else ""
