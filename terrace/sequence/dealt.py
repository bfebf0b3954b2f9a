"""What `balance = "cost"` makes of a micro-step's documents: seconds of every ring rank, and the bytes that all send.

The assignment is the one that runs (terrace.sequence.assign), and bytes are those of the token layouts that are built
from it, without the exchange among Ulysses ranks. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from terrace.plan.context import tier_between
from terrace.sequence.assign import assign
from terrace.sequence.cost import WorkCost, crossings
from terrace.sequence.local_tokens import moves
from terrace.sequence.token_layout import num_rows


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """Attention of one layer, forwards and backward."""

    attention_s: tuple[float, ...]  # of each ring rank, with the messages of its rings that no round hides
    computed_s: tuple[float, ...]  # of it, computing
    moved_s: float  # of the ring rank that moves most tokens to where they are attended to, and back
    sent_bytes: tuple[float, ...]  # by tier, innermost first; of one Ulysses rank of every ring rank


def deal(lengths: Sequence[int], ring_degrees: Sequence[int], cost: WorkCost, capacity: int) -> Dealt:
    """Deal documents to ring ranks by cost; arguments and errors as in `assign`."""
    num_ring_ranks = math.prod(ring_degrees)
    found = assign(lengths, ring_degrees, cost, capacity)
    sent, attended = [0.0] * len(cost.links), [0] * num_ring_ranks
    computed = [0.0] * num_ring_ranks
    for segment in found.segments:
        length = segment.stop - segment.start
        computed_s = cost.computed_s(length, len(segment.ring_ranks))
        for index, ring_rank in enumerate(segment.ring_ranks):
            attended[ring_rank] += num_rows(segment.shard(index))
            computed[ring_rank] += computed_s
        key_bytes, home = length * cost.key_bytes, -1
        for tier, number in enumerate(crossings(_degrees(segment.ring_ranks, ring_degrees))):
            if number:
                sent[tier] += cost.key_messages(number, is_first=home < 0) * key_bytes
                home = tier
        if home >= 0:
            sent[home] += key_bytes
    room = -(-sum(lengths) // num_ring_ranks)
    gone = [[0] * num_ring_ranks for _ in cost.links]
    come = [[0] * num_ring_ranks for _ in cost.links]
    for source, to, number in moves(attended, ring_degrees, room):
        tier = tier_between(ring_degrees, source, to)
        gone[tier][source] += number
        come[tier][to] += number
        sent[tier] += (cost.forwards + 1) * number * (2 * cost.query_bytes + cost.key_bytes)
    moved_s = max(
        sum(cost.move_s(tier, max(gone[tier][ring_rank], come[tier][ring_rank])) for tier in range(len(cost.links)))
        for ring_rank in range(num_ring_ranks)
    )
    return Dealt(attention_s=found.seconds, computed_s=tuple(computed), moved_s=moved_s, sent_bytes=tuple(sent))


def _degrees(ring_ranks: Sequence[int], ring_degrees: Sequence[int]) -> list[int]:
    degrees, units = [], set(ring_ranks)
    for degree in ring_degrees:
        inside = len(units)
        units = {unit // degree for unit in units}
        degrees.append(inside // len(units))
    return degrees
