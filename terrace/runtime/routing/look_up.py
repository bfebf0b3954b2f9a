"""The axis of tables whose rows are on several ranks: it dispatches ids and combines vectors (terrace.plan.tables).

A look-up crosses the tiers one after another, the innermost first. Each hop is that of a chunk to experts and back
(terrace.runtime.routing.way): an id is the one expert that its row of the chunk chooses, and each peer of the tier has
a unit, a range of ids. After a hop, ids that several peers sent are deduplicated: the next hop sends each once, and
`combine` returns its vector to every peer that asked. In a backward the gradients of such an id are added up in the
order of the peers, so a sum does not depend on when messages arrive.

Shape legend: n distinct ids that a rank holds before or after a hop, H elements of a row.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from terrace.comm.collectives import Collectives
from terrace.comm.rounding import Origin
from terrace.plan.in_block_messages import RoutedMessage
from terrace.plan.tables import ID_BYTES
from terrace.plan.wire import MessageClass
from terrace.program.program import Program
from terrace.runtime.batch import Batch
from terrace.runtime.in_block import InBlockComm
from terrace.runtime.routing.route import HopRows
from terrace.runtime.routing.routed_axis import RoutedAxis
from terrace.runtime.routing.way import Chunk, Way
from terrace.runtime.table_param import IdRoute, Table, TableParam, distinct, summed

_Units = tuple[tuple[int, int], ...]  # the range of rows (first, last + 1) of each peer's unit in a hop


@dataclass(frozen=True)
class _Hop:
    """A hop that ids took. `inverse` has for each id that arrived its index among the `num_ids` distinct ones."""

    way: Way
    tier: int
    inverse: Tensor
    num_ids: int


class TableAxis(RoutedAxis):
    """Installs itself in the tables of a rank's `blocks`."""

    def __init__(
        self,
        in_block: InBlockComm,
        program: Program,
        rank: int,
        collectives: Collectives,
        blocks: Iterable[nn.Module],
        origin: Origin,
        declared: Counter[tuple[MessageClass, str]],
    ) -> None:
        routed = program.model.routed
        line = routed.table_line
        super().__init__(in_block, rank, collectives, origin, routed.of_tables, (line, line), declared)
        places = zip(line.degrees, line.coordinates(rank), strict=True)
        self._hops = [(tier, degree, here) for tier, (degree, here) in enumerate(places) if degree > 1]
        self._blocks, self._tables = list(blocks), list[TableParam]()

    def take(self, batches: Sequence[Batch], *, trains: bool = True) -> Sequence[Batch]:
        """Return the batches unchanged. The first call makes this axis the dispatcher of the blocks' tables."""
        if not self._tables:  # parameters are replaced by those of the model state after axes are applied
            found = (each for block in self._blocks for each in block.parameters() if isinstance(each, Table))
            self._tables = [each.table for each in found]
            for table in self._tables:
                table.dispatcher = self
        return batches

    def remove(self) -> None:
        for table in self._tables:
            table.detach()

    def dispatch(self, ids: Tensor, num_rows: int) -> tuple[Tensor, IdRoute]:
        """Send distinct ascending `ids` (n) of a table of `num_rows` to the ranks that have their rows.

        Returns the ids that arrived here, which are distinct and ascending, too, and the route.
        """
        first, size, route = 0, num_rows, list[_Hop]()
        for tier, degree, here in self._hops:
            size //= degree
            units = tuple((first + unit * size, first + (unit + 1) * size) for unit in range(degree))
            way = Way(len(ids), (self._exchange_counts(ids, tier, here, units),), (units,))
            empty = ids.new_empty(len(ids), 0, dtype=torch.uint8)  # an id has neither hidden elements nor weights
            chunk = Chunk(self, [way], (empty, empty, ids.int().unsqueeze(1)))
            self._run_hop(chunk, way, RoutedMessage(MessageClass.DISPATCH, tier))
            ids, inverse = distinct(chunk.parts[2].squeeze(1).long())
            route.append(_Hop(way, tier, inverse, len(ids)))
            first += here * size
        return ids, tuple(route)

    def combine(self, route: IdRoute, vectors: Tensor) -> Tensor:
        """Send `vectors` (n, H) of the ids that arrived here back along their route.

        Returns the vectors of the ids that this rank sent.
        """
        for hop in reversed(route):
            chunk = Chunk(self, [hop.way], ())
            chunk.turn([vectors.index_select(0, hop.inverse)])
            self._run_hop(chunk, hop.way, RoutedMessage(MessageClass.COMBINE, hop.tier))
            (vectors,) = chunk.parts
        return vectors

    def dispatch_gradients(self, route: IdRoute, gradients: Tensor) -> Tensor:
        """Send `gradients` (n, H) of the ids that this rank sent along their route.

        Returns the sum for each id that arrived here, in fp32 at least.
        """
        for hop in route:
            chunk = Chunk(self, [hop.way], (gradients,))
            self._run_hop(chunk, hop.way, RoutedMessage(MessageClass.DISPATCH, hop.tier, backward=True))
            gradients = summed(chunk.parts[0], hop.inverse, hop.num_ids)
        return gradients

    def code(self, message: RoutedMessage, rows: Tensor) -> Tensor:
        """As in `RoutedAxis`, but ids are dispatched without elements, which no codec takes."""
        return super().code(message, rows) if rows.shape[1] else rows

    def read(self, message: RoutedMessage, coded: Tensor, dtype: torch.dtype) -> Tensor:
        """As in `RoutedAxis`, but ids are dispatched without elements, which no codec takes."""
        return super().read(message, coded, dtype) if coded.shape[1] else coded

    def _run_hop(self, chunk: Chunk, way: Way, message: RoutedMessage) -> None:
        """Run the message of a hop and wait for it."""
        (hop,), (_, over) = way.hops, self._over(message)
        is_dispatch = message.message_class is MessageClass.DISPATCH
        row_bytes = ID_BYTES if is_dispatch and not message.backward else over.part_bytes
        self._declare(message, (hop.sent if is_dispatch else hop.returned) * row_bytes)
        self.in_block.wait(self.in_block.submit(partial(chunk.go, message), message), self.peers(message))
        chunk.arrived()

    def _exchange_counts(self, ids: Tensor, tier: int, here: int, units: _Units) -> HopRows:
        """Exchange with the peers of a tier how many ids each sends to each. `here` is this rank's index among them."""
        ends = torch.tensor([units[0][0], *(last for _, last in units)], device=ids.device)
        counts = torch.searchsorted(ids, ends).diff().int()
        message = RoutedMessage(MessageClass.ROUTE, tier)
        self._declare(message, (len(units) - 1) * counts.nbytes)
        # On CUDA the host waits: from here on, it knows the sizes of the hop.
        table: Sequence[Sequence[int]] = self.gather(self._over(message)[0], counts).tolist()
        return HopRows(tier, False, here, tuple(table[here]), tuple(each[here] for each in table))

    def _declare(self, message: RoutedMessage, num_bytes: int) -> None:
        self._declared[message.message_class, self._lines[0].tiers[message.tier]] += num_bytes
