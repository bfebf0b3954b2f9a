"""Messages of the context axis in a layer, and their bytes, with `balance = "tokens"`.

Every rank sends the same. Let it hold T tokens of a micro-batch, padding included, its place A tokens of the u parts
together (terrace.plan.context: A <= u T, which padding at the end of the last part makes even), and let a part attend
with n of the N query heads and k of the K key-value heads that a tensor rank has: n = N/u, k = max(K/u, 1). In elements
of one head, in the order of a pass:

    leg        forward               backward
    into       T (n + 2k)            T n             to every other part: queries, keys, values; gradient of the output
    keys       A 2k                  A 2k            before each round s = 1 ... r-1, during round s-1
    gradients                        A 2k            after each round s = 1 ... r-2, during round s+1: of the keys
    home                             A 2k            after the last round: of the keys, to the place that owns them
    back       T n                   T (n + 2k)      to every other part: output; gradients of queries, keys, values

A rank keeps only the queries and keys of its own tokens, so keys go round once more in the backward. Gradients of a
place's own keys from its own queries stay, so they go one step less than round the ring. A layer that is recomputed
does its forward twice. Blocks without attention send nothing.

A message counts on the outermost tier that it crosses. Of the other parts of a place u_0 ... u_t - u_0 ... u_(t-1) are
across tier t. A step s of the ring goes over the outermost tier t such that s is a multiple of r_0 ... r_(t-1)
(terrace.sequence.segments), so r/(r_0 ... r_(t-1)) - r/(r_0 ... r_t) steps cross tier t; `home` crosses the outermost.

Where a tier has a format (`wire.context`), each row of a tensor, one token's heads of it, is coded by itself, anew at
every message: by keys also in each step of the ring that crosses the tier. Rows that stay on a rank are as they are.

Per layer and micro-batch of b rows of L tokens of hidden size d, K = N, forward and backward, over N ranks (Fang and
Zhao, 2405.07719, table 2, without its factors (N-1)/N):

    Ulysses    8/N b L d (N-1)/N
    ring       4 b L d (N-1)/N: keys and values, and their gradients; and 2 b L d (N-1)/N of keys in the backward,
               which the table leaves out. Grouped queries divide a ring's by N/K

With `balance = "cost"` bytes depend on the batch, so there is no formula:
terrace.sequence.traffic counts them for one batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from terrace.model.spec import BlockSpec
from terrace.plan.context import Heads, attention_heads, attention_tokens, is_context_parallel, local_tokens
from terrace.plan.in_block_messages import ContextLeg, ContextMessage
from terrace.plan.mesh import Mesh, no_sequence
from terrace.plan.plan import Plan
from terrace.plan.wire import FORMATS, MessageClass, WireFormat

_DEALT = ContextLeg.INTO, ContextLeg.BACK  # to every other part of a place; the others go to one rank


class Sizes(NamedTuple):
    """Bytes of `AttentionBytes` in the format of one tier, and whether it is a block format."""

    inputs: int
    outputs: int
    keys: int
    is_coded: bool


def sizes_by_tier(
    wires: Sequence[WireFormat], compute: str, *, held: int, attended: int, queries: int, keys: int
) -> tuple[Sizes, ...]:
    """Sizes on every tier, for its format: of `held` and `attended` tokens, with elements of queries and of keys.

    Keys have as many elements as values. Empty where all travels in the compute dtype. A row of each tensor is coded by
    itself.
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
    """Bytes of the messages of a layer's attention on one micro-batch; degrees by tier, innermost first.

    `inputs` are the queries, keys and values of a rank's tokens in the heads of one part, `outputs` the attention
    output of the same; `keys` are the keys and values of a place in the heads of one part. These are in the compute
    dtype; `formats` has the format on each tier, if some tier has another one.
    """

    ulysses: tuple[int, ...]
    ring: tuple[int, ...]
    inputs: int
    outputs: int
    keys: int
    formats: tuple[Sizes, ...] = ()

    def on(self, tier: int) -> Sizes:
        """The sizes in the format of a tier."""
        return self.formats[tier] if self.formats else self._plain

    @property
    def _plain(self) -> Sizes:
        return Sizes(self.inputs, self.outputs, self.keys, False)

    @property
    def parts(self) -> int:
        """Ulysses ranks."""
        return prod(self.ulysses)

    def sends(self, message: ContextMessage) -> tuple[tuple[int, int], ...]:
        """(tier index, bytes sent over it) of a message, the innermost tier first."""
        # Ring messages go to one rank, dealt ones to every other Ulysses rank.
        if message.leg not in _DEALT:
            return ((message.tier, self.on(message.tier).keys),)
        return tuple((tier, peers * self._dealt(message, self.on(tier))) for tier, peers in _peers(self.ulysses))

    def coding_bytes(self, message: ContextMessage) -> dict[int, float]:
        """Bytes of memory that coding and decoding a message reads and writes, by tier index; none for dtypes."""
        ring = message.leg not in _DEALT
        counts = [(message.tier, 1)] if ring else _peers(self.ulysses)
        found = {}
        for tier, copies in counts:
            both = self._plain, self.on(tier)
            if self.on(tier).is_coded:
                found[tier] = 2.0 * copies * sum(each.keys if ring else self._dealt(message, each) for each in both)
        return found

    @staticmethod
    def _dealt(message: ContextMessage, sizes: Sizes) -> int:
        # A backward sends gradients the other way: into carries the output's, back the inputs'.
        return sizes.inputs if (message.leg is ContextLeg.INTO) is not message.backward else sizes.outputs


@dataclass(frozen=True)
class ContextTraffic:
    """Bytes of a context axis with `balance = "tokens"`, for rows of `sequence` tokens; `tiers` are their names."""

    plan: Plan
    mesh: Mesh
    sequence: int
    tiers: tuple[str, ...]

    @property
    def has_formula(self) -> bool:
        """Whether there are messages and the plan determines their bytes."""
        return self.plan.balance == "tokens" and is_context_parallel(self.mesh, self.plan)

    def attention(self, block: BlockSpec) -> AttentionBytes | None:
        """Bytes of a block's attention; None for a block without messages, or with messages that the batch decides.

        Raises `PlanError` where sequences have no length.
        """
        heads = attention_heads(block, self.mesh.total("rows")) if self.has_formula else None
        if self.has_formula and self.sequence < 1:
            raise no_sequence("context")
        return None if heads is None else self._attention(heads)

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


def _peers(degrees: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(Tier, number of other Ulysses ranks across it)."""
    for tier, degree in enumerate(degrees):
        if degree > 1:
            # Across tier t a rank meets (degree - 1) units, each with all Ulysses ranks of the tiers inside.
            yield tier, (degree - 1) * prod(degrees[:tier])
