"""Routed messages: of tokens to experts on other ranks, of ids to the owners of their rows, and of both results.

There are none where every rank has all experts and all rows.

For sizes see terrace.plan.expert_traffic and terrace.plan.tables, for the order terrace.program.block_program.routed
and terrace.program.block_program.build.
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
from terrace.plan.tables import TableTraffic
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
    def table_line(self) -> Layout:
        """The ranks with different rows of a table; single ranks where every rank has all rows."""
        return Layout.of(self.cluster, self.tensor.plan, PARTS, self.mesh.tables or self.mesh.only("pipeline"))

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """One transfer per kind of routed message; empty if neither experts nor tables are distributed."""
        return (*self.of_experts, *self.of_tables)

    @cached_property
    def of_experts(self) -> tuple[Transfer, ...]:
        """One transfer per kind of message between tokens and experts."""
        return tuple(transfer for line in self.lines for transfer in self._transfers(line))

    @cached_property
    def of_tables(self) -> tuple[Transfer, ...]:
        """One transfer per kind of message of look-ups."""
        widths = {each.width for each in map(self.look_ups, range(len(self.blocks))) if each.tiers}
        return tuple(transfer for width in sorted(widths) for transfer in self._row_transfers(width))

    @cached_property
    def lanes(self) -> frozenset[int]:
        """The tier lanes that routed messages use."""
        return frozenset(each.lane for each in self.transfers)

    def traffic(self, block: int) -> ExpertTraffic:
        """Message sizes of a block; `NO_TRAFFIC` if it has no experts on other ranks."""
        return ExpertTraffic.of(self.tensor, self.blocks[block])

    def look_ups(self, block: int) -> TableTraffic:
        """Message sizes of a block's look-ups; `NO_LOOK_UPS` if it looks up no rows of other ranks."""
        return TableTraffic.of(self.tensor, self.blocks[block])

    def sizes(self, block: int) -> ExpertTraffic | TableTraffic:
        found = self.look_ups(block)
        return found if found.tiers else self.traffic(block)

    def message(self, message: RoutedMessage, block: int) -> Message:
        """Resolve a message of a block, with its expected bytes."""
        sizes = self.sizes(block)
        sends, line = sizes.sends(message), self.lines[message.copies]
        line = self.table_line if isinstance(sizes, TableTraffic) else line
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

    def _row_transfers(self, width: int) -> Iterator[Transfer]:
        # Every hop has its own table of counts: how many ids a rank passes on is known after the hop before.
        line = self.table_line
        for tier, degree in enumerate(line.degrees):
            if degree > 1:
                for message_class in (MessageClass.ROUTE, *ROUTED_ROWS):
                    rows = message_class is not MessageClass.ROUTE
                    wire = self.tensor.plan.wire_format(message_class, line.tiers[tier]) if rows else FORMATS["fp32"]
                    hop = Hop(tier, degree, wire, width if rows else 1)
                    yield Transfer(message_class=message_class, lane=tier, ranks=line, gathering=(hop,))


def uneven_rows(blocks: Sequence[BlockSpec]) -> str:
    """Why blocks handle a varying number of rows per micro-batch; "" if they do not."""
    table = next((block.name for block in blocks if any(param.is_spread for param in block.params)), "")
    if table:
        return f"rows of {table} are looked up on other ranks"
    mixture = next((block.name for block in blocks if has_routers([block])), "")
    return f"the rows of an expert of {mixture} are another number in every micro-batch" if mixture else ""
