"""Expected bytes of a layer's expert messages under uniform routing, for predictions.

A run declares its actual bytes batch by batch (terrace.runtime.routing.route). If a token chooses k of E experts, each
choice equally likely, it reaches on average D(q) of q equal units of experts:

    D(q) = q (1 - C(E - E/q, k) / C(E, k))

With degrees e_0 .. e_t of the expert axis by tier, innermost first, w_i of the rows, and T tokens on a rank, a rank
sends over tier i, counted in token rows

    experts   T D(e_i ... e_t) (1 - 1/e_i)                   to the experts; the same on the way back
    rows      T D(e_0 ... e_t) (w_(i+1) ... w_t) (w_i - 1)   to every peer, where rows cut every expert; the same back

Under expert choice, a token reaches no expert of a unit with probability (1 - k/E)^(E/q).

A row has H elements in the format of its class and tier, encoded separately. On the way to the experts it also carries
k weights, in fp32 or wider, and k expert indices (E of each under expert choice); gradients of weights return with the
gradients of tokens. Weights, their gradients and indices are never encoded.

Before a dispatch the ranks gather a table with a 4-byte token count for every rank, piece of its tokens and prefix of
units. The second forward of a recomputed block reuses it.

On the way to the experts a row, also one that stays on the rank, is encoded once for adjacent tiers with the same
format and decoded where the format ends. On the way back rows are encoded again on every tier, and arriving rows are
summed in fp32 or wider.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from terrace.base.errors import PlanError
from terrace.model.experts.even import rows_to_units
from terrace.model.spec import BlockSpec
from terrace.plan.hops import number_bytes
from terrace.plan.in_block_messages import RoutedMessage
from terrace.plan.wire import FORMATS, MessageClass, WireFormat

if TYPE_CHECKING:
    from terrace.plan.tensor_traffic import TensorTraffic

NUMBER_BYTES = 4  # of a count in a table, and of an expert index in a row


@dataclass(frozen=True, kw_only=True)
class ExpertTraffic:
    """Sizes of a mixture of experts on one rank; degrees are by tier, innermost first."""

    tokens: int  # per rank and micro-batch
    num_experts: int
    per_token: int
    num_choices: int  # weights and expert indices per row
    hidden: int
    item_bytes: int  # per element of a row in the compute dtype
    weight_bytes: int
    dispatch: tuple[WireFormat, ...]  # by tier, as `combine`
    combine: tuple[WireFormat, ...]
    expert: tuple[int, ...]
    rows: tuple[int, ...]
    is_even: bool = False  # whether terrace.model.experts.even routes, so that bytes are exact
    chunks: tuple[int, int] = (1, 1)  # token chunks in a forward and in a backward
    ahead: int = 1  # how many chunks are dispatched ahead of the matmuls (terrace.program.block_program)
    shares: bool = False  # whether every token also passes a shared expert
    has_gaps: bool = False  # whether gradients travel between the messages of a backward

    @staticmethod
    def of(tensor: "TensorTraffic", block: BlockSpec) -> "ExpertTraffic":
        """The traffic of a block's experts; `NO_TRAFFIC` if it has none, or if every rank holds all of them."""
        mixture = block.declared.mixture
        experts = mixture.experts
        of_experts = None if tensor.rows.mesh is None else tensor.rows.mesh.apart
        if not mixture.each or of_experts is None or not block.has_stacks:
            return NO_TRAFFIC
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
        """Number of ranks with different experts."""
        return math.prod(self.expert)

    @property
    def num_rows(self) -> int:
        """Number of ranks that every expert is cut over."""
        return math.prod(self.rows)

    @property
    def pieces(self) -> int:
        """Number of pieces of a micro-batch's tokens; a chunk of a forward or backward is one or more pieces."""
        return max(self.chunks)

    def units_of(self, num_units: int) -> float:
        """Average number of the `num_units` equal units that a token's choices fall on: D(q)."""
        if self.is_even:
            return rows_to_units(self.tokens, self.num_experts, self.per_token, num_units) / self.tokens
        if self.num_choices > self.per_token:  # experts choose, each k of E tokens
            nowhere = (1 - self.per_token / self.num_experts) ** (self.num_experts // num_units)
            return num_units * (1 - nowhere)
        return mean_units(self.num_experts, self.per_token, num_units)

    def sends(self, message: RoutedMessage) -> tuple[tuple[int, int], ...]:
        """(Tier index, bytes that a rank sends over it) for each tier of a message."""
        if message.message_class is MessageClass.ROUTE:
            return tuple(self._table(message.copies))
        row_bytes = self.wire(message).message_bytes(self.hidden)
        row_bytes += uncoded_bytes(message, self.num_choices, self.weight_bytes)
        return ((message.tier, round(self._sent(message) * row_bytes)),)

    def wire(self, message: RoutedMessage) -> WireFormat:
        return (self.dispatch if message.message_class is MessageClass.DISPATCH else self.combine)[message.tier]

    def coding_bytes(self, message: RoutedMessage) -> float:
        """Memory traffic in bytes of encoding and decoding a message; 0 for a dtype."""
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

    def degree(self, message: RoutedMessage) -> int:
        """Number of ranks that exchange a message on its tier."""
        return (self.rows if message.copies else self.expert)[message.tier]

    @cached_property
    def way(self) -> tuple[tuple[int, bool], ...]:
        """(Tier, whether every row goes to every peer) of each hop to the experts, in order."""
        lines = ((self.expert, False), (self.rows, True))
        return tuple((tier, copies) for line, copies in lines for tier in reversed(range(len(line))) if line[tier] > 1)

    def _tokens(self, message: RoutedMessage) -> tuple[int, int]:
        """(Start, stop) of the tokens in a message's chunk."""
        return spans_of(self.tokens, self.chunks[message.backward])[message.chunk]

    def _sent(self, message: RoutedMessage) -> float:
        tier, tokens = message.tier, self._tokens(message)
        at = self.way.index((tier, message.copies))
        if message.copies:
            return self._held(self.way[:at], tokens) * (self.rows[tier] - 1)
        return self._held(self.way[: at + 1], tokens) * (1 - 1 / self.expert[tier])

    def _held(self, way: Sequence[tuple[int, bool]], tokens: tuple[int, int]) -> float:
        """Rows on a rank after the hops `way`, from tokens [start, stop) of every rank."""
        units = math.prod(self.expert[tier] for tier, copies in way if not copies)
        copied, (start, stop) = math.prod(self.rows[tier] for tier, copies in way if copies), tokens
        if self.is_even:
            before, rows = (rows_to_units(each, self.num_experts, self.per_token, units) for each in (start, stop))
            return (rows - before) * copied
        return (stop - start) * self.units_of(units) * copied

    def _table(self, copies: bool) -> Iterator[tuple[int, int]]:
        units = [degree for degree in reversed(self.expert) if degree > 1]
        prefixes = sum(math.prod(units[:length]) for length in range(len(units) + 1))
        # The rows axis gathers first; the expert axis then carries the tables of all rows.
        num_bytes = self.pieces * prefixes * NUMBER_BYTES * (1 if copies else math.prod(self.rows))
        for tier, degree in enumerate(self.rows if copies else self.expert):
            if degree > 1:
                yield tier, (degree - 1) * num_bytes
            num_bytes *= degree


# For blocks whose tokens stay on their rank: no hops.
NO_TRAFFIC = ExpertTraffic(
    tokens=0, num_experts=1, per_token=1, num_choices=1, hidden=0, item_bytes=0, weight_bytes=0,
    dispatch=(), combine=(), expert=(), rows=(),
)  # fmt: skip


@lru_cache(maxsize=1024)
def mean_units(num_experts: int, per_token: int, num_units: int) -> float:
    """Average number of `num_units` equal units of experts that a uniform choice of `per_token` falls on: D(q)."""
    elsewhere = math.comb(num_experts - num_experts // num_units, per_token)
    return num_units * (1 - elsewhere / math.comb(num_experts, per_token))


def uncoded_bytes(message: RoutedMessage, num_choices: int, weight_bytes: int) -> int:
    """Bytes of a row besides its elements: weights and expert indices, or gradients of weights in a backward."""
    if message.message_class is MessageClass.DISPATCH and not message.backward:
        return num_choices * (weight_bytes + NUMBER_BYTES)
    return num_choices * weight_bytes if message.message_class is MessageClass.COMBINE and message.backward else 0


def spans_of(tokens: int, number: int) -> list[tuple[int, int]]:
    """(Start, stop) of each of `number` parts of `tokens`; some are empty if there are more parts than tokens."""
    return [(tokens * part // number, tokens * (part + 1) // number) for part in range(number)]
