"""Messages of look-ups in tables whose rows are spread over ranks (`Plan.vocabulary`).

Each row of a look-up table has one owner in an island. A rank looks up the rows of its micro-batch in three phases:

    dispatch of ids         hop by hop from the innermost tier outward, to the owner of the row. On every tier a rank
                            sends an id to the peer through which its owner is reached, and drops duplicates first:
                            among its own tokens before the first hop, among the ids of several peers before the others
    combine of vectors      along the same route in reverse; a rank passes a vector on to all peers that asked for it
    dispatch of gradients   in a backward, along the route of the ids; gradients of one row are summed before each hop

So each distinct id of a unit crosses the tier outside the unit once, or not at all if the unit owns the row. The
innermost tier cuts the table first, so the rows that a hop reaches through one peer are consecutive. Each hop begins
with a table of counts, because a rank knows only after the hop before how many ids it passes on.

Bytes that a rank sends over a tier of d ranks for one micro-batch (a run counts the ids, and its ledger must agree):

    route      4 d (d - 1)   d counts, to each of d - 1 peers
    dispatch   4 n           for the n ids that it sends to peers; in a backward n rows of gradients
    combine                  the rows of the ids that peers sent to it

For prices, ids are independent draws from a uniform distribution: of x draws from V ids, V (1 - (1 - 1/V)^x) are
distinct on average. No other distribution has more, so skewed ids (Zipf) send fewer bytes in total, though the owners
of frequent rows send more of them than other ranks.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from terrace.plan.in_block_messages import RoutedMessage
from terrace.plan.wire import FORMATS, MessageClass, WireFormat

if TYPE_CHECKING:
    from terrace.model.spec import BlockSpec
    from terrace.plan.tensor_traffic import TensorTraffic

ID_BYTES = 4  # of an id in a message, and of a count
MOST_ROWS = 2 ** (8 * ID_BYTES - 1) - 1  # of a table: ids are signed


@dataclass(frozen=True, kw_only=True)
class TableTraffic:
    """Sizes of one look-up on a rank; degrees and formats are by tier, innermost first."""

    tokens: int  # that a rank looks up in a micro-batch
    rows: int  # of the whole table
    width: int  # elements of a row
    item_bytes: int  # per element, in the compute dtype
    degrees: tuple[int, ...]
    dispatch: tuple[WireFormat, ...]
    combine: tuple[WireFormat, ...]
    trains: bool

    @staticmethod
    def of(tensor: "TensorTraffic", block: "BlockSpec") -> "TableTraffic":
        """The traffic of a block's look-ups; `NO_LOOK_UPS` if it has none, or if every rank has all rows."""
        mesh = tensor.rows.mesh
        tables = [param for param in block.params if param.is_spread]
        if not tables or mesh is None or mesh.tables is None:
            return NO_LOOK_UPS
        (table,), plan, tiers = tables, tensor.plan, tensor.rows.tiers
        return TableTraffic(
            tokens=tensor.tokens,
            rows=(table.whole or table.shape)[0],
            width=table.shape[1],
            item_bytes=FORMATS[plan.compute].element_bytes,
            degrees=mesh.tables.group("expert"),
            dispatch=tuple(plan.wire_format(MessageClass.DISPATCH, tier) for tier in tiers),
            combine=tuple(plan.wire_format(MessageClass.COMBINE, tier) for tier in tiers),
            trains=table.trainable,
        )

    @cached_property
    def tiers(self) -> tuple[int, ...]:
        return tuple(tier for tier, degree in enumerate(self.degrees) if degree > 1)

    def degree(self, message: RoutedMessage) -> int:
        return self.degrees[message.tier]

    def wire(self, message: RoutedMessage) -> WireFormat:
        """Wire format of a message's rows; ids and counts are never encoded."""
        return (self.dispatch if message.message_class is MessageClass.DISPATCH else self.combine)[message.tier]

    def sends(self, message: RoutedMessage) -> tuple[tuple[int, int], ...]:
        """(Tier index, mean bytes that a rank sends over it) of a message."""
        degree = self.degrees[message.tier]
        if message.message_class is MessageClass.ROUTE:
            return ((message.tier, ID_BYTES * degree * (degree - 1)),)
        return ((message.tier, round(self._passed(message.tier) * (1 - 1 / degree) * self._row_bytes(message))),)

    def coding_bytes(self, message: RoutedMessage) -> float:
        """Memory traffic in bytes of encoding and decoding a message; 0 for a dtype."""
        if message.message_class is MessageClass.ROUTE or self._is_ids(message) or not self.wire(message).block:
            return 0.0
        return 2 * self._passed(message.tier) * (self.width * self.item_bytes + self._row_bytes(message))

    def used(self, num_micros: int) -> float:
        """Mean number of a rank's rows that a step of `num_micros` micro-batches uses; 0 if the table is frozen."""
        ranks = math.prod(self.degrees)
        return distinct(self.rows, num_micros * self.tokens * ranks) / ranks if self.trains else 0.0

    def gradient_bytes(self, num_micros: int, sums: str) -> int:
        """Mean bytes of a step's gradients on a rank, and of the int64 ids of their rows."""
        return round(self.used(num_micros) * (self.width * FORMATS[sums].element_bytes + 2 * ID_BYTES))

    @cached_property
    def moving_bytes(self) -> int:
        """Most bytes that a hop reads and writes at once, of vectors or of gradients in at least fp32."""
        most = max((self._passed(tier) for tier in self.tiers), default=0.0)
        return round(2 * most * self.width * max(4, self.item_bytes))

    def _passed(self, tier: int) -> float:
        """Mean number of distinct ids that a rank holds before the hop over a tier: its share of those of its unit."""
        inside = math.prod(self.degrees[:tier])
        return distinct(self.rows, self.tokens * inside) / inside

    def _row_bytes(self, message: RoutedMessage) -> int:
        return ID_BYTES if self._is_ids(message) else self.wire(message).message_bytes(self.width)

    @staticmethod
    def _is_ids(message: RoutedMessage) -> bool:
        return message.message_class is MessageClass.DISPATCH and not message.backward


# Of blocks without look-ups, and of those that look up in a table that every rank has whole.
NO_LOOK_UPS = TableTraffic(tokens=0, rows=1, width=0, item_bytes=0, degrees=(), dispatch=(), combine=(), trains=False)


def distinct(rows: int, draws: float) -> float:
    """Mean number of distinct ids among `draws` independent draws from `rows` equally likely ids."""
    return rows * -math.expm1(draws * math.log1p(-1 / rows)) if rows > 1 else min(1.0, draws)
