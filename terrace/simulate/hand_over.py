"""Seconds and bytes of a hand-over to generation, from the programs of all ranks (terrace.program.hand_over).

An instruction starts on a rank when its lane is free, the instruction of the same blocks on the tier outside is done,
and the ranks that it exchanges with are as far. All its messages start together, so it takes one latency, and the bytes
that the rank sends or receives, whichever are more: links carry both directions at once. It is done when it is done on
the ranks that it exchanges with, too.
"""

from collections import Counter
from dataclasses import dataclass

from terrace.cluster.cluster import Cluster
from terrace.plan.transition import Transition
from terrace.program.hand_over import hand_over_programs
from terrace.simulate.links import exchange_tiers


@dataclass(frozen=True, kw_only=True)
class HandOverCost:
    """A hand-over: its seconds, the bytes that all ranks send over each tier, and the most that one receives."""

    seconds: float
    sent_bytes: dict[str, int]
    received_bytes: int


def predict_hand_over(cluster: Cluster, transition: Transition) -> HandOverCost:
    """The cost of a hand-over among the ranks of `cluster`, for which it was made."""
    programs = hand_over_programs(cluster, transition)
    sent, received = Counter[str](), [0] * len(programs)
    free: dict[tuple[int, int], float] = {}  # rank, lane -> seconds
    done: dict[tuple[int, tuple[int, ...]], float] = {}  # rank, blocks -> seconds
    for position, instruction in enumerate(programs[0].instructions):
        blocks, tier = instruction
        ends = {program.rank: program.ends(position) for program in programs if program.moves[position]}
        ready = {rank: max(free.get((rank, tier), 0.0), done.get((rank, blocks), 0.0)) for rank in ends}
        after = dict[int, float]()
        for rank, (leaving, coming) in ends.items():
            leaves, comes = sum(leaving.values()), sum(coming.values())
            start_s = max(ready[each] for each in (rank, *leaving, *coming))
            seconds = exchange_tiers(cluster, transition.tiers, [(tier, max(leaves, comes))])
            after[rank] = start_s + sum(seconds.values())
            sent[cluster.tiers[tier].name] += leaves
            received[rank] += comes
        for rank, both in ends.items():
            free[rank, tier] = done[rank, blocks] = max(after[each] for each in (rank, *both[0], *both[1]))
    return HandOverCost(
        seconds=max(done.values(), default=0.0),
        sent_bytes={tier.name: sent[tier.name] for tier in cluster.tiers},
        received_bytes=max(received),
    )
