"""Messages of the context axis in one layer, and their bytes, under `balance = "tokens"`.

Every rank sends the same amount. A rank holds T tokens of a micro-batch, padding included; its ring rank, u Ulysses
ranks together, attends to A tokens (terrace.plan.context: A <= u T, the rest is padding at the end of the last one).
A Ulysses rank attends with n of the N query heads and k of the K key-value heads of a tensor rank: n = N/u,
k = max(K/u, 1). In elements of one head, in the order of a pass:

    leg        forward               backward
    into       T (n + 2k)            T n             to every other Ulysses rank: queries, keys, values; output gradient
    keys       A 2k                  A 2k            before each round s = 1 ... r-1, during round s-1
    gradients                        A 2k            of the keys: after each round s = 1 ... r-2, during round s+1
    home                             A 2k            of the keys: after the last round, to the ring rank that owns them
    back       T n                   T (n + 2k)      to every other Ulysses rank: output; input gradients

A rank keeps only the queries and keys of its own tokens, so keys travel around the ring again in the backward. A ring
rank's own contribution to the gradients of its keys is added locally, so gradients make one ring step less. A
recomputed layer runs its forward, with its messages, twice. Blocks without attention send nothing.

A message counts on the outermost tier that it crosses. Of the other Ulysses ranks of a ring rank,
u_0 ... u_t - u_0 ... u_(t-1) are across tier t. Ring step s crosses the outermost tier t such that s is a multiple of
r_0 ... r_(t-1) (terrace.sequence.segments), so r/(r_0 ... r_(t-1)) - r/(r_0 ... r_t) steps cross tier t; `home` crosses
the outermost. If a tier has a format (`wire.context`), each row of a tensor (one token's heads) is encoded separately
and again for every message, so keys are encoded again in each ring step that crosses the tier. Rows that stay on a
rank are not encoded.

Forward and backward of one layer on a micro-batch of b rows of L tokens, hidden size d, K = N, over N ranks (Fang and
Zhao, 2405.07719, table 2, which omits the factors (N-1)/N):

    Ulysses    8/N b L d (N-1)/N
    ring       4 b L d (N-1)/N for keys, values and their gradients, plus 2 b L d (N-1)/N for keys in the backward,
               which the table omits. Grouped-query attention divides the ring's bytes by N/K

A linear layer (terrace.runtime.context.states) has a scan over the tiers in place of the ring. On tier t, with r_t ring
ranks or units, every rank sends to r_t - 1 others, forward and backward, for its two chunks of each of b rows

    halo       2 b (P - 1) F        in the compute dtype: the last inputs of convolutions of F features with P taps
    state      2 b N K (K + V)      in fp32 at least: the maps of N heads

whatever the length of a row.

Under `balance = "cost"` bytes depend on the batch, so there is no formula:
terrace.sequence.traffic counts them for one batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from terrace.model.operations import Delta
from terrace.model.spec import BlockSpec
from terrace.plan.context import (
    CHUNKS_PER_RING_RANK,
    Heads,
    attention_heads,
    attention_tokens,
    is_context_parallel,
    local_tokens,
)
from terrace.plan.dims import state_shapes
from terrace.plan.in_block_messages import ContextLeg, ContextMessage
from terrace.plan.mesh import Mesh, no_sequence
from terrace.plan.plan import Plan
from terrace.plan.wire import FORMATS, MessageClass, WireFormat

SCANNED = ContextLeg.HALO, ContextLeg.STATE  # between all ranks or units that a tier joins
_DEALT = ContextLeg.INTO, ContextLeg.BACK  # all-to-all among Ulysses ranks; the other legs go to one rank


class Sizes(NamedTuple):
    """Byte sizes of `AttentionBytes` in one tier's format; `is_coded` for a block format."""

    inputs: int
    outputs: int
    keys: int
    is_coded: bool


def sizes_by_tier(
    wires: Sequence[WireFormat], compute: str, *, held: int, attended: int, queries: int, keys: int
) -> tuple[Sizes, ...]:
    """Message sizes in every tier's format; empty if everything travels in the compute dtype.

    `held` and `attended` are numbers of tokens, `queries` and `keys` elements per token (values have as many as keys).
    Each token's row of a tensor is encoded separately.
    """
    if all(wire == FORMATS[compute] for wire in wires):
        return ()
    found = []
    for wire in wires:
        query, key = wire.message_bytes(queries), 2 * wire.message_bytes(keys)
        found.append(Sizes(held * (query + key), held * query, attended * key, wire.block > 0))
    return tuple(found)


@dataclass(frozen=True)
class AttentionBytes:
    """Message bytes of one layer's attention on a micro-batch; degrees are by tier, innermost first.

    All are for the heads of one Ulysses rank: `inputs` are queries, keys and values of the tokens that a rank holds,
    `outputs` their attention output, `keys` the keys and values of a ring rank. They are in the compute dtype;
    `formats` has the sizes for every tier if some tier uses another format.
    """

    ulysses: tuple[int, ...]
    ring: tuple[int, ...]
    inputs: int
    outputs: int
    keys: int
    formats: tuple[Sizes, ...] = ()
    halo: int = 0  # of a linear layer, to each of the other ranks that a tier joins
    state: int = 0

    def on(self, tier: int) -> Sizes:
        return self.formats[tier] if self.formats else self._plain

    @cached_property
    def _plain(self) -> Sizes:
        return Sizes(self.inputs, self.outputs, self.keys, False)

    @property
    def parts(self) -> int:
        return prod(self.ulysses)

    def sends(self, message: ContextMessage) -> tuple[tuple[int, int], ...]:
        """(Tier index, bytes that a rank sends over it) of a message, innermost tier first."""
        # Ring messages go to one rank, the others to every other Ulysses rank.
        if message.leg in SCANNED:
            size = self.halo if message.leg is ContextLeg.HALO else self.state
            return ((message.tier, (self.ring[message.tier] - 1) * size),)
        if message.leg not in _DEALT:
            return ((message.tier, self.on(message.tier).keys),)
        return tuple([(tier, peers * self._dealt(message, self.on(tier))) for tier, peers in _peers(self.ulysses)])

    def coding_bytes(self, message: ContextMessage) -> dict[int, float]:
        """Memory traffic in bytes of encoding and decoding a message, by tier index; no entry for dtypes."""
        ring = message.leg not in _DEALT
        counts = ((message.tier, 1),) if ring else _peers(self.ulysses)
        found = {}
        for tier, copies in counts:
            both = self._plain, self.on(tier)
            if self.on(tier).is_coded:
                found[tier] = 2.0 * copies * sum(each.keys if ring else self._dealt(message, each) for each in both)
        return found

    @staticmethod
    def _dealt(message: ContextMessage, sizes: Sizes) -> int:
        # In a backward INTO carries gradients of the outputs and BACK gradients of the inputs.
        return sizes.inputs if (message.leg is ContextLeg.INTO) is not message.backward else sizes.outputs


NO_ATTENTION = AttentionBytes(ulysses=(), ring=(), inputs=0, outputs=0, keys=0)  # ranks that attend alone send nothing


@dataclass(frozen=True)
class ContextTraffic:
    """Message bytes of the context axis under `balance = "tokens"`, for rows of `sequence` tokens."""

    plan: Plan
    mesh: Mesh
    sequence: int
    tiers: tuple[str, ...]

    @property
    def has_formula(self) -> bool:
        """Whether there are messages whose bytes follow from the plan alone."""
        return self.plan.balance == "tokens" and is_context_parallel(self.mesh, self.plan)

    def attention(self, block: BlockSpec) -> AttentionBytes:
        """Message bytes of a block's attention; `NO_ATTENTION` if it sends none, or if they depend on the batch.

        Raises `PlanError` if the sequence length is unknown.
        """
        heads = attention_heads(block, self.mesh.total("rows")) if self.has_formula else None
        if self.has_formula and self.sequence < 1:
            raise no_sequence("context")
        if self.has_formula and (delta := block.operations.delta).heads:
            return scan_bytes(
                delta, self.mesh.group("ring"), self.mesh.total("rows"), self.plan.micro_batch, self.plan.compute
            )
        return NO_ATTENTION if heads is None else self._attention(heads)

    def _attention(self, heads: Heads) -> AttentionBytes:
        head_bytes = heads.size * FORMATS[self.plan.compute].element_bytes
        part = heads.per_ulysses_rank(self.mesh.total("ulysses"))
        # Keys and values travel together.
        queries, keys = part.queries * head_bytes, 2 * part.keys * head_bytes
        held = local_tokens(self.plan, self.mesh, self.sequence)
        attended = attention_tokens(self.plan, self.mesh, self.sequence)
        wires = [self.plan.wire_format(MessageClass.CONTEXT, tier) for tier in self.tiers]
        numels = {"queries": part.queries * heads.size, "keys": part.keys * heads.size}
        return AttentionBytes(
            ulysses=self.mesh.group("ulysses"),
            ring=self.mesh.group("ring"),
            inputs=held * (queries + keys),
            outputs=held * queries,
            keys=attended * keys,
            formats=sizes_by_tier(wires, self.plan.compute, held=held, attended=attended, **numels),
        )


def scan_bytes(delta: Delta, ring: tuple[int, ...], rows: int, micro_batch: int, compute: str) -> AttentionBytes:
    """Message bytes of a linear layer on one of `rows` tensor rows, with `ring` degrees by tier."""
    item, runs = FORMATS[compute].element_bytes, CHUNKS_PER_RING_RANK * micro_batch
    tails, (heads, key_dim, value_dim) = state_shapes(delta, rows)
    return AttentionBytes(
        ulysses=(),
        ring=ring,
        inputs=0,
        outputs=0,
        keys=0,
        halo=runs * prod(tails) * item,
        state=runs * heads * key_dim * (key_dim + value_dim) * max(4, item),
    )


def same_bytes(message: ContextMessage) -> ContextMessage:
    """The representative of all messages whose tiers and bytes equal those of `message` under any degrees."""
    if message.leg not in _DEALT:
        return ContextMessage(ContextLeg.KEYS, tier=message.tier)
    # As `AttentionBytes._dealt`.
    return ContextMessage(ContextLeg.INTO, backward=(message.leg is ContextLeg.INTO) is message.backward)


@lru_cache(maxsize=4096)
def _peers(degrees: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(Tier, number of Ulysses ranks to which a message crosses it)."""
    # There are (degree - 1) other units on tier t, each with all Ulysses ranks of the inner tiers.
    found = ((tier, (degree - 1) * prod(degrees[:tier])) for tier, degree in enumerate(degrees))
    return tuple([(tier, peers) for tier, peers in found if peers])
