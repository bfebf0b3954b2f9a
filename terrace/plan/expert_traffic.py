"""Mean bytes of the messages of a layer's experts under even routing, for predictions.

A run declares its bytes batch by batch (terrace.runtime.experts.route). A token chooses k of E experts; of q equal
units

    D(q) = q (1 - C(E - E/q, k) / C(E, k))

have one of them on average, if every choice is as likely. With degrees e_0 .. e_t of the expert axis by tier, the
outermost last, w_i of the rows, and T tokens of a rank, a rank sends over tier i, in rows

    experts   T D(e_i ... e_t) (1 - 1/e_i)                   on the way to them; on the way back the same
    rows      T D(e_0 ... e_t) (w_(i+1) ... w_t) (w_i - 1)   where every expert is cut, to every peer; the same back

A row has H elements of the compute dtype. To the experts it also has k weights, in fp32 at least, and k numbers of
experts; gradients of weights come back with the gradients of tokens. Before a dispatch the ranks gather a table: of
each, the number of its tokens for every prefix of units, in 4 bytes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from terrace.model.config import DecoderBlock
from terrace.model.spec import BlockSpec
from terrace.plan.context import batch_shape
from terrace.plan.in_block_messages import ExpertMessage
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.wire import FORMATS, MessageClass

NUMBER_BYTES = 4  # of a count in a table, and of an expert's number in a row


@dataclass(frozen=True, kw_only=True)
class ExpertTraffic:
    """The sizes of a mixture on one rank; degrees by tier, innermost first."""

    tokens: int  # of a rank and micro-batch
    num_experts: int
    per_token: int
    hidden: int
    item_bytes: int  # of an element of a row
    weight_bytes: int
    expert: tuple[int, ...]
    rows: tuple[int, ...]

    @staticmethod
    def of(plan: Plan, mesh: Mesh, sequence: int, block: BlockSpec) -> "ExpertTraffic | None":
        """The experts of a block; None where it has none, or every rank of a stage has all of them."""
        experts = block.config.experts if isinstance(block, DecoderBlock) else None
        if experts is None or mesh.experts is None or not block.has_stacks:
            return None
        assert isinstance(block, DecoderBlock), "checked above"
        item_bytes = FORMATS[plan.compute].element_bytes
        return ExpertTraffic(
            tokens=math.prod(batch_shape(plan, mesh, sequence)),
            num_experts=experts.num_experts,
            per_token=experts.per_token,
            hidden=block.config.hidden_size,
            item_bytes=item_bytes,
            weight_bytes=max(item_bytes, FORMATS["fp32"].element_bytes),
            expert=mesh.experts.group("expert"),
            rows=mesh.experts.group("rows"),
        )

    @property
    def num_units(self) -> int:
        """Ranks that hold different experts."""
        return math.prod(self.expert)

    @property
    def num_rows(self) -> int:
        """Ranks that every expert is cut over."""
        return math.prod(self.rows)

    def units_of(self, num_units: int) -> float:
        """How many of `num_units` equal units the choices of a token fall on, on average: D(q)."""
        return mean_units(self.num_experts, self.per_token, num_units)

    def sends(self, message: ExpertMessage) -> tuple[tuple[int, int], ...]:
        """(Tier index, bytes that a rank sends over it) of a message."""
        if message.message_class is MessageClass.ROUTE:
            return tuple(self._table(message.copies))
        tier, extra = message.tier, 0
        # Weights and numbers of experts go to them with a row, gradients of weights come back.
        if message.message_class is MessageClass.DISPATCH and not message.backward:
            extra = self.per_token * (self.weight_bytes + NUMBER_BYTES)
        elif message.message_class is MessageClass.COMBINE and message.backward:
            extra = self.per_token * self.weight_bytes
        row_bytes = self.hidden * self.item_bytes + extra
        return ((tier, round(self._rows(tier, message.copies) * row_bytes)),)

    def degree(self, message: ExpertMessage) -> int:
        """Ranks among which a message goes on its tier."""
        return (self.rows if message.copies else self.expert)[message.tier]

    @property
    def way(self) -> tuple[tuple[int, bool], ...]:
        """(Tier, whether every row goes to every peer) of the hops to the experts, in order."""
        lines = ((self.expert, False), (self.rows, True))
        return tuple((tier, copies) for line, copies in lines for tier in reversed(range(len(line))) if line[tier] > 1)

    def _rows(self, tier: int, copies: bool) -> float:
        if copies:
            arrived = self.tokens * self.units_of(math.prod(self.expert))
            return arrived * math.prod(self.rows[tier + 1 :]) * (self.rows[tier] - 1)
        return self.tokens * self.units_of(math.prod(self.expert[tier:])) * (1 - 1 / self.expert[tier])

    def _table(self, copies: bool) -> Iterator[tuple[int, int]]:
        units = [degree for degree in reversed(self.expert) if degree > 1]
        prefixes = sum(math.prod(units[:length]) for length in range(len(units) + 1))
        # Rows gather first, and the tables of all of them go on.
        num_bytes = prefixes * NUMBER_BYTES * (1 if copies else math.prod(self.rows))
        for tier, degree in enumerate(self.rows if copies else self.expert):
            if degree > 1:
                yield tier, (degree - 1) * num_bytes
            num_bytes *= degree


@lru_cache(maxsize=1024)
def mean_units(num_experts: int, per_token: int, num_units: int) -> float:
    """How many of `num_units` equal units of experts an even choice of `per_token` falls on, on average: D(q)."""
    elsewhere = math.comb(num_experts - num_experts // num_units, per_token)
    return num_units * (1 - elsewhere / math.comb(num_experts, per_token))
