"""What ranks of the context axis send one another in a layer, in closed form, with `balance = "tokens"`.

Every rank sends the same. Let it hold T tokens of a micro-batch, padding included, its place A tokens of the u parts
together (terrace.plan.context: A <= u T, which padding at the end of the last part makes even), and let a part attend
with n of the N query heads and k of the K key-value heads that a tensor rank has: n = N/u, k = max(K/u, 1). In elements
of one head, in the order of a pass:

    leg        forward               backward
    into       T (n + 2k)            T n             to every other part: queries, keys, values; gradient of the output
    keys       A 2k                  A 2k            before each round s = 1 ... r-1, beside round s-1
    gradients                        A 2k            after each round s = 1 ... r-2, beside round s+1: of the keys
    home                             A 2k            after the last round: of the keys, to the place that owns them
    back       T n                   T (n + 2k)      to every other part: output; gradients of queries, keys, values

A rank keeps the queries and keys of its own tokens alone, so keys go round once more in the backward. Gradients of a
place's own keys from its own queries stay, so they go one step less than round the ring. A layer that is recomputed
does its forward twice. Blocks without attention send nothing.

A message counts on the outermost tier that it crosses. Of the other parts of a place u_0 ... u_t - u_0 ... u_(t-1) are
across tier t. A step s of the ring goes over the outermost tier t such that s is a multiple of r_0 ... r_(t-1)
(terrace.sequence.segments), so r/(r_0 ... r_(t-1)) - r/(r_0 ... r_t) steps cross tier t; `home` crosses the outermost.

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
from enum import StrEnum
from itertools import chain
from math import prod

from terrace.base.errors import PlanError
from terrace.model.spec import BlockSpec
from terrace.plan.context import Heads, attention_heads, is_spread, local_tokens, place_tokens
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.wire import FORMATS


class ContextLeg(StrEnum):
    """What a message carries, and where to."""

    INTO = "into"  # what is attended to, to the parts that attend to it
    KEYS = "keys"  # keys and values of a round, to the place whose next round they are
    GRADIENTS = "gradients"  # of keys and values of a round, after those keys
    HOME = "home"  # gradients of the keys and values of the last round, to the place that they are of
    BACK = "back"  # what attention made, to the part that holds the tokens


@dataclass(frozen=True)
class ContextMessage:
    """What a rank sends at one moment of a layer's attention: to one rank for each number of a tier."""

    leg: ContextLeg
    sends: tuple[tuple[int, int], ...]  # (tier index, bytes), the innermost tier first
    beside: int | None  # the round that is computed meanwhile; None: it is waited for


LayerMessages = tuple[tuple[ContextMessage, ...], tuple[ContextMessage, ...]]  # of a forward; of a backward by itself


@dataclass(frozen=True)
class ContextTraffic:
    """What a context axis sends with `balance = "tokens"` of micro-batches whose rows have `sequence` tokens."""

    plan: Plan
    mesh: Mesh
    sequence: int

    @property
    def has_formula(self) -> bool:
        """Whether messages follow from the plan alone, and there are any."""
        return self.plan.balance == "tokens" and is_spread(self.mesh, self.plan)

    def messages(self, blocks: Sequence[BlockSpec]) -> list[LayerMessages]:
        """Return what every block sends for a micro-batch, in order; of whole blocks or of a tensor rank's."""
        if self.has_formula and self.sequence < 1:
            raise PlanError("a plan with a context axis needs the length of a sequence: its messages are activations")
        known: dict[Heads | None, LayerMessages] = {None: ((), ())}
        found = []
        for block in blocks:
            heads = attention_heads(block, self.mesh.total("rows")) if self.has_formula else None
            if heads not in known:
                assert heads is not None
                known[heads] = self._attention(heads)
            found.append(known[heads])
        return found

    def _attention(self, heads: Heads) -> LayerMessages:
        head_bytes = heads.size * FORMATS[self.plan.compute].element_bytes
        part = heads.of_part(self.mesh.total("ulysses"))
        queries, keys = part.queries * head_bytes, 2 * part.keys * head_bytes
        held = local_tokens(self.plan, self.mesh, self.sequence)
        ring_bytes = place_tokens(self.plan, self.mesh, self.sequence) * keys

        def dealt(leg: ContextLeg, token_bytes: int) -> ContextMessage:
            return ContextMessage(leg, tuple(_dealt(self.mesh.group("ulysses"), held * token_bytes)), None)

        def passed(leg: ContextLeg, tier: int, beside: int | None) -> ContextMessage:
            return ContextMessage(leg, ((tier, ring_bytes),), beside)

        tiers = list(_step_tiers(self.mesh.group("ring")))  # of the exchanges before rounds 1, 2, ...
        rounds = [[passed(ContextLeg.KEYS, tier, beside)] for beside, tier in enumerate(tiers)]
        forward = list(chain(*rounds))
        if tiers:
            rounds.append([passed(ContextLeg.HOME, max(tiers), None)])
        for beside, messages in enumerate(rounds[2:], start=2):  # of round beside - 1, with the exchange after it
            messages.insert(0, passed(ContextLeg.GRADIENTS, tiers[beside - 1], beside))
        return (
            _sent(dealt(ContextLeg.INTO, queries + keys), *forward, dealt(ContextLeg.BACK, queries)),
            _sent(dealt(ContextLeg.INTO, queries), *chain(*rounds), dealt(ContextLeg.BACK, queries + keys)),
        )


def _sent(*messages: ContextMessage) -> tuple[ContextMessage, ...]:
    return tuple(message for message in messages if message.sends)


def _dealt(degrees: Sequence[int], num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield what goes to all other parts, so many bytes to each."""
    for tier, degree in enumerate(degrees):
        if degree > 1:
            yield tier, (degree - 1) * prod(degrees[:tier]) * num_bytes


def _step_tiers(degrees: Sequence[int]) -> Iterator[int]:
    """Yield the tier that every step of a ring goes over."""
    for step in range(1, prod(degrees)):
        crossed, stride = 0, 1
        for tier, degree in enumerate(degrees):
            if degree > 1 and step % stride == 0:
                crossed = tier
            stride *= degree
        yield crossed
