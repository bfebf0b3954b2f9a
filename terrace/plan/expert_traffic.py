"""Mean bytes of the messages of a layer's experts under even routing, for predictions.

A run declares its bytes batch by batch (terrace.runtime.experts.route). A token chooses k of E experts; of q equal
units

    D(q) = q (1 - C(E - E/q, k) / C(E, k))

have one of them on average, if every choice is as likely. With degrees e_0 .. e_t of the expert axis by tier, the
outermost last, w_i of the rows, and T tokens of a rank, a rank sends over tier i, in rows

    experts   T D(e_i ... e_t) (1 - 1/e_i)                   on the way to them; on the way back the same
    rows      T D(e_0 ... e_t) (w_(i+1) ... w_t) (w_i - 1)   where every expert is cut, to every peer; the same back

Where experts choose, each unit has none of them with the likelihood (1 - k/E)^(E/q).

A row has H elements in the format of its class and tier, coded by itself. To the experts it also has k weights, in fp32
at least, and k numbers of experts, or E of each where experts choose; gradients of weights come back with the gradients
of tokens. These are never coded.
Before a dispatch the ranks gather a table: for each rank, piece of its tokens and prefix of units, the number of tokens
that go there, in 4 bytes. The second forward of a recomputed block needs none.

On the way to the experts a row is coded once for neighbouring tiers of one format, a rank's own too, and decoded where
the format ends. On the way back rows are coded anew on every tier, and arriving rows are summed in fp32 at least.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from terrace.base.errors import PlanError
from terrace.model.experts.even import rows_to_units
from terrace.model.spec import BlockSpec
from terrace.plan.hops import number_bytes
from terrace.plan.in_block_messages import ExpertMessage
from terrace.plan.wire import FORMATS, MessageClass, WireFormat

if TYPE_CHECKING:
    from terrace.plan.tensor_traffic import TensorTraffic

NUMBER_BYTES = 4  # of a count in a table, and of an expert's number in a row


@dataclass(frozen=True, kw_only=True)
class ExpertTraffic:
    """The sizes of a mixture on one rank; degrees by tier, innermost first."""

    tokens: int  # of a rank and micro-batch
    num_experts: int
    per_token: int
    num_choices: int  # weights and numbers of experts that go with a row
    hidden: int
    item_bytes: int  # of an element of a row where it is computed with
    weight_bytes: int
    dispatch: tuple[WireFormat, ...]  # by tier, as `combine`
    combine: tuple[WireFormat, ...]
    expert: tuple[int, ...]
    rows: tuple[int, ...]
    is_even: bool = False  # whether choices are those of terrace.model.experts.even, so that bytes are exact
    chunks: tuple[int, int] = (1, 1)  # of tokens, in a forward and in a backward
    ahead: int = 1  # chunks that come over inner tiers before the products of another (terrace.program.block_program)
    shares: bool = False  # whether every token also passes a shared expert
    has_gaps: bool = False  # whether gradients travel between the messages of a backward

    @staticmethod
    def of(tensor: "TensorTraffic", block: BlockSpec) -> "ExpertTraffic | None":
        """The experts of a block; None where it has none, or every rank of a stage has all of them."""
        mixture = block.declared.mixture
        experts = mixture.experts
        of_experts = None if tensor.rows.mesh is None else tensor.rows.mesh.experts
        if not mixture.each or of_experts is None or not block.has_stacks:
            return None
        plan, tiers = tensor.plan, tensor.rows.tiers
        tokens = tensor.padded_tokens // tensor.rows.degree  # each tensor row routes a part
        at_once = experts.num_experts * max(plan.num_chunks)
        if experts.route == "even" and (tokens % at_once or tensor.padded_tokens != tensor.tokens):
            raise PlanError(
                f"route = 'even' deals with {at_once} tokens at a time, one for each expert in each chunk, and a "
                f"micro-batch of a rank has {tokens}: change plan.micro_batch or train.sequence"
            )
        return ExpertTraffic(
            tokens=tokens,
            num_experts=experts.num_experts,
            per_token=experts.per_token,
            num_choices=experts.num_choices,
            hidden=mixture.hidden.numel,
            item_bytes=FORMATS[plan.compute].element_bytes,
            weight_bytes=number_bytes(plan),
            dispatch=tuple(plan.wire_format(MessageClass.DISPATCH, tier) for tier in tiers),
            combine=tuple(plan.wire_format(MessageClass.COMBINE, tier) for tier in tiers),
            expert=of_experts.group("expert"),
            rows=of_experts.group("rows"),
            is_even=experts.route == "even",
            chunks=plan.num_chunks,
            ahead=plan.expert_chunks.get("ahead", 1),
            # A shared expert cut by tensor rows has messages of its own, which come after those of the others.
            shares=bool(mixture.shared) and tensor.degree == 1,
            has_gaps=bool(plan.expert_gaps),
        )

    @property
    def num_units(self) -> int:
        """Ranks that hold different experts."""
        return math.prod(self.expert)

    @property
    def num_rows(self) -> int:
        """Ranks that every expert is cut over."""
        return math.prod(self.rows)

    @property
    def pieces(self) -> int:
        """Pieces that a micro-batch's tokens are cut into; a chunk of a forward or a backward is one or several."""
        return max(self.chunks)

    def units_of(self, num_units: int) -> float:
        """How many of `num_units` equal units the choices of a token fall on, on average: D(q)."""
        if self.is_even:
            return rows_to_units(self.tokens, self.num_experts, self.per_token, num_units) / self.tokens
        if self.num_choices > self.per_token:  # experts choose, each k of E tokens
            nowhere = (1 - self.per_token / self.num_experts) ** (self.num_experts // num_units)
            return num_units * (1 - nowhere)
        return mean_units(self.num_experts, self.per_token, num_units)

    def sends(self, message: ExpertMessage) -> tuple[tuple[int, int], ...]:
        """(Tier index, bytes that a rank sends over it) of a message."""
        if message.message_class is MessageClass.ROUTE:
            return tuple(self._table(message.copies))
        row_bytes = self.wire(message).message_bytes(self.hidden)
        row_bytes += uncoded_bytes(message, self.num_choices, self.weight_bytes)
        return ((message.tier, round(self._sent(message) * row_bytes)),)

    def wire(self, message: ExpertMessage) -> WireFormat:
        """The format of a row."""
        return (self.dispatch if message.message_class is MessageClass.DISPATCH else self.combine)[message.tier]

    def coding_bytes(self, message: ExpertMessage) -> float:
        """Bytes of memory that coding and decoding in a block format reads and writes for a message; 0 for a dtype."""
        if message.message_class is MessageClass.ROUTE or not self.wire(message).block:
            return 0.0
        wire, tokens = self.wire(message), self._tokens(message)
        held, coded = self.hidden * self.item_bytes, wire.message_bytes(self.hidden)
        if message.message_class is MessageClass.COMBINE:
            # As many rows arrive as leave; arriving rows are added to sums, which are read and written.
            wide = self.hidden * self.weight_bytes
            return self._sent(message) * (wide + coded + coded + 2 * wide)
        at = self.way.index((message.tier, message.copies))
        before, after = ([self.dispatch[each] for each, _ in hops] for hops in (self.way[:at], self.way[at + 1 :]))
        encoded = 0.0 if before and before[-1] == wire else self._held(self.way[:at], tokens)
        decoded = 0.0 if after and after[0] == wire else self._held(self.way[: at + 1], tokens)
        return (encoded + decoded) * (held + coded)

    def degree(self, message: ExpertMessage) -> int:
        """Ranks among which a message goes on its tier."""
        return (self.rows if message.copies else self.expert)[message.tier]

    @property
    def way(self) -> tuple[tuple[int, bool], ...]:
        """(Tier, whether every row goes to every peer) of the hops to the experts, in order."""
        lines = ((self.expert, False), (self.rows, True))
        return tuple((tier, copies) for line, copies in lines for tier in reversed(range(len(line))) if line[tier] > 1)

    def _tokens(self, message: ExpertMessage) -> tuple[int, int]:
        """First and last token, exclusive, of a message's chunk."""
        return spans_of(self.tokens, self.chunks[message.backward])[message.chunk]

    def _sent(self, message: ExpertMessage) -> float:
        tier, tokens = message.tier, self._tokens(message)
        at = self.way.index((tier, message.copies))
        if message.copies:
            return self._held(self.way[:at], tokens) * (self.rows[tier] - 1)
        return self._held(self.way[: at + 1], tokens) * (1 - 1 / self.expert[tier])

    def _held(self, way: Sequence[tuple[int, bool]], tokens: tuple[int, int]) -> float:
        """Rows on a rank after these hops, of some of the tokens of each rank."""
        units = math.prod(self.expert[tier] for tier, copies in way if not copies)
        copied, (start, stop) = math.prod(self.rows[tier] for tier, copies in way if copies), tokens
        if self.is_even:
            before, rows = (rows_to_units(each, self.num_experts, self.per_token, units) for each in (start, stop))
            return (rows - before) * copied
        return (stop - start) * self.units_of(units) * copied

    def _table(self, copies: bool) -> Iterator[tuple[int, int]]:
        units = [degree for degree in reversed(self.expert) if degree > 1]
        prefixes = sum(math.prod(units[:length]) for length in range(len(units) + 1))
        # Rows gather first, and the tables of all of them go on.
        num_bytes = self.pieces * prefixes * NUMBER_BYTES * (1 if copies else math.prod(self.rows))
        for tier, degree in enumerate(self.rows if copies else self.expert):
            if degree > 1:
                yield tier, (degree - 1) * num_bytes
            num_bytes *= degree


@lru_cache(maxsize=1024)
def mean_units(num_experts: int, per_token: int, num_units: int) -> float:
    """How many of `num_units` equal units of experts an even choice of `per_token` falls on, on average: D(q)."""
    elsewhere = math.comb(num_experts - num_experts // num_units, per_token)
    return num_units * (1 - elsewhere / math.comb(num_experts, per_token))


def uncoded_bytes(message: ExpertMessage, num_choices: int, weight_bytes: int) -> int:
    """Bytes of a row besides its elements: weights and numbers of experts, and in a backward gradients of weights."""
    if message.message_class is MessageClass.DISPATCH and not message.backward:
        return num_choices * (weight_bytes + NUMBER_BYTES)
    return num_choices * weight_bytes if message.message_class is MessageClass.COMBINE and message.backward else 0


def spans_of(tokens: int, number: int) -> list[tuple[int, int]]:
    """First and last token, exclusive, of each of `number` parts of `tokens`; of more parts some are empty."""
    return [(tokens * part // number, tokens * (part + 1) // number) for part in range(number)]
