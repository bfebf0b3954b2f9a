"""Cost of a micro-step's documents under different balancing policies: one layer, forward and backward.

    tokens        whole documents packed so that all ring ranks have similar numbers of tokens; rows are padded
                  to the longest
    even ring     every document cut over all ring ranks, two chunks each (zig-zag); keys go around one flat ring that
                  crosses the slowest tier in every round: context parallelism as in Transformer Engine, the baseline of
                  Zeppelin (2509.21841). Documents are padded to two chunks a rank, as there
    tiered ring   the same in the order of a segment (terrace.sequence.segments), which rarely crosses slow tiers
    cost          rings chosen by cost, tokens held evenly and moved to the ranks that attend to them
                  (terrace.sequence.dealt)

A layer's time is the sum of the linear layers on local tokens, the attention of the slowest rank, and the moves of the
rank that moves most: an overestimate, as if moves and attention never overlapped. Left out are the exchange among
Ulysses ranks, which is equal under all policies, launch costs, and the inefficiency of kernels on short documents.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from terrace.base.errors import PlanError
from terrace.plan.context import tier_between
from terrace.sequence.candidate_rings import CandidateRings
from terrace.sequence.cost import WorkCost, crossings, ring_tokens
from terrace.sequence.dealt import deal

_HALVINGS = 40

POLICIES = ("tokens", "even ring", "tiered ring", "cost")


@dataclass(frozen=True, kw_only=True)
class PolicyCost:
    """Seconds of one layer, forward and backward, and bytes that one Ulysses rank of every ring rank sends."""

    policy: str
    attention_s: tuple[float, ...]  # of each ring rank
    linear_s: float
    moved_s: float
    sent_bytes: tuple[float, ...]  # by tier, innermost first
    bound_s: float  # lower bound of attention under any assignment

    @property
    def layer_s(self) -> float:
        return self.linear_s + max(self.attention_s) + self.moved_s

    @property
    def imbalance(self) -> float:
        """Attention of the slowest ring rank over the mean."""
        total = sum(self.attention_s)
        return max(self.attention_s) * len(self.attention_s) / total if total else 1.0


def policy_costs(
    lengths: Sequence[int], ring_degrees: Sequence[int], cost: WorkCost, capacity: int
) -> tuple[PolicyCost, ...]:
    """Cost of every policy, in the order of `POLICIES`; arguments and errors as in `assign`."""
    dealt = deal(lengths, ring_degrees, cost, capacity)
    bound_s = makespan_bound_s(lengths, ring_degrees, cost, capacity)
    return (
        _tokens(lengths, math.prod(ring_degrees), cost, bound_s),
        _ring("even ring", *_flat_rounds(ring_degrees), lengths, cost, bound_s),
        _ring("tiered ring", *_tiered_rounds(ring_degrees), lengths, cost, bound_s),
        PolicyCost(
            policy="cost",
            attention_s=dealt.attention_s,
            linear_s=-(-sum(lengths) // math.prod(ring_degrees)) * cost.token_s,
            moved_s=dealt.moved_s,
            sent_bytes=dealt.sent_bytes,
            bound_s=bound_s,
        ),
    )


def _tokens(lengths: Sequence[int], num_ring_ranks: int, cost: WorkCost, bound_s: float) -> PolicyCost:
    rows, seconds = [0] * num_ring_ranks, [0.0] * num_ring_ranks
    for length in sorted(lengths, reverse=True):
        ring_rank = rows.index(min(rows))
        rows[ring_rank] += length
        seconds[ring_rank] += cost.whole_s(length)
    return PolicyCost(
        policy="tokens",
        attention_s=tuple(seconds),
        linear_s=max(rows) * cost.token_s,
        moved_s=0.0,
        sent_bytes=(0.0,) * len(cost.links),
        bound_s=bound_s,
    )


_Messages = tuple[int, ...]  # number of ring ranks that send over each tier


def _flat_rounds(ring_degrees: Sequence[int]) -> tuple[list[_Messages], _Messages]:
    # Every round is the same: each rank sends to the next one, over the outermost tier between them.
    num_ring_ranks, once = math.prod(ring_degrees), [0] * len(ring_degrees)
    for ring_rank in range(num_ring_ranks if num_ring_ranks > 1 else 0):
        once[tier_between(ring_degrees, ring_rank, (ring_rank + 1) % num_ring_ranks)] += 1
    return [tuple(once)] * (num_ring_ranks - 1), tuple(once)


def _tiered_rounds(ring_degrees: Sequence[int]) -> tuple[list[_Messages], _Messages]:
    num_ring_ranks, tiers = math.prod(ring_degrees), range(len(ring_degrees))
    # In a round of a tiered ring all ranks cross the same tier.
    crossed = [tier for tier, number in enumerate(crossings(ring_degrees)) for _ in range(number)]
    rounds = [tuple(num_ring_ranks * (tier == here) for tier in tiers) for here in crossed]
    return rounds, rounds[-1] if rounds else (0,) * len(ring_degrees)


def _ring(
    policy: str, rounds: Sequence[_Messages], home: _Messages, lengths: Sequence[int], cost: WorkCost, bound_s: float
) -> PolicyCost:
    num_ring_ranks = len(rounds) + 1
    tokens = sum(ring_tokens(length, num_ring_ranks) for length in lengths)
    padded = (ring_tokens(length, num_ring_ranks) * num_ring_ranks for length in lengths)
    forward = sum(cost.round_s(length, num_ring_ranks) for length in padded)
    backward = cost.backward * forward
    attention_s = cost.forwards * forward + backward
    num_messages: list[float] = list(home)
    # Keys are sent in every forward and again in the backward, there with gradients except before the first round.
    for step, sent in enumerate(rounds):
        key_s, both_s = _slowest_s(cost, sent, tokens), _slowest_s(cost, sent, 2 * tokens)
        attention_s += cost.forwards * max(forward, key_s) + max(backward, both_s if step else key_s)
        num_messages = [
            before + cost.key_messages(1, is_first=step == 0) * number
            for before, number in zip(num_messages, sent, strict=True)
        ]
    attention_s += _slowest_s(cost, home, tokens)
    return PolicyCost(
        policy=policy,
        attention_s=(attention_s,) * num_ring_ranks,
        linear_s=tokens * cost.token_s,
        moved_s=0.0,
        sent_bytes=tuple(number * tokens * cost.key_bytes for number in num_messages),
        bound_s=bound_s,
    )


def _slowest_s(cost: WorkCost, sent: _Messages, num_tokens: int) -> float:
    links = (link for link, number in zip(cost.links, sent, strict=True) if number)
    return max((link.seconds(num_tokens * cost.key_bytes) for link in links), default=0.0)


def makespan_bound_s(lengths: Sequence[int], ring_degrees: Sequence[int], cost: WorkCost, capacity: int) -> float:
    """Lower bound in seconds of the makespan over all assignments of documents to groups of ring ranks; arguments as in
    `assign`.

    Let w_j(g) be the seconds of document j on each of the |g| ranks of a group g with room for it, and P the number of
    ring ranks. In an assignment with makespan t, every document runs on a group with w_j(g) <= t, and the total time,
    the sum of |g| w_j(g), is at most P t. So t belongs to

        { t : every j has a group with w_j(g) <= t, and  sum over j of min { |g| w_j(g) : w_j(g) <= t }  <=  P t }

    The left side falls with t and the right side rises, so the set is an interval without upper end; its least element
    is the bound. It is at least the total work over P and at least the time of each document on its fastest group, and
    accounts for narrow groups being too slow and wide ones wasteful (the argument for malleable jobs, Turek, Wolf and
    Yu 1992). It ignores that documents cannot be split freely to fill ranks.

    Raises `PlanError` if no group has room for a document.
    """
    rings = CandidateRings(tuple(ring_degrees), cost, capacity)
    # A ring never takes less work in total than one ring rank.
    low = sum(map(cost.whole_s, lengths)) / rings.num_ring_ranks
    choices = [(_choices(length, rings, low), count) for length, count in sorted(Counter(lengths).items())]
    low = max([low, *(each[-1][0] for each, _ in choices)])  # every sequence has a group
    if _is_possible(choices, low, rings.num_ring_ranks):
        return low
    high = 2 * low
    while not _is_possible(choices, high, rings.num_ring_ranks):
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _is_possible(choices, middle, rings.num_ring_ranks):
            high = middle
        else:
            low = middle
    return low


_Choices = list[tuple[float, float]]


def _choices(length: int, rings: CandidateRings, least_s: float) -> _Choices:
    # (Seconds, total seconds of all ranks), by ascending total. Groups that are slower and cost more are dropped. If
    # one rank finishes within `least_s`, below which the bound cannot fall, it is the only choice.
    if rings.fits(length, 0) and rings.seconds(length, 0) <= least_s:
        return [(rings.seconds(length, 0),) * 2]
    found = []
    for index, shape in enumerate(rings.shapes):
        if rings.fits(length, index):
            seconds = rings.seconds(length, index)
            found.append((seconds * shape.num_ring_ranks, seconds))
    if not found:
        raise PlanError(
            f"a document of {length} tokens fits on none of {rings.num_ring_ranks} ring ranks of {rings.capacity} "
            "tokens: shorten it, add ranks to the context axis or give a ring rank more tokens"
        )
    kept: _Choices = []
    for total, seconds in sorted(found):
        if not kept or seconds < kept[-1][0]:
            kept.append((seconds, total))
    return kept


def _is_possible(choices: Sequence[tuple[_Choices, int]], seconds: float, num_ring_ranks: int) -> bool:
    total = 0.0
    for each, count in choices:
        total += count * next(work for alone, work in each if alone <= seconds)
    return total <= num_ring_ranks * seconds
