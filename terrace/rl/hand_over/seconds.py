"""Seconds and bytes of a hand-over to generation, from the programs of all ranks (terrace.rl.hand_over.program).

An instruction starts on a rank when its lane is free, the instruction of the same blocks on the next outer tier is
done, and its peers have reached it. All its messages start together, so it takes one latency plus the larger of the
bytes sent and received: links are full duplex. It is done when its peers are done, too.
"""

from collections import Counter
from dataclasses import dataclass

from terrace.cluster.cluster import Cluster
from terrace.rl.hand_over.program import hand_over_programs
from terrace.rl.hand_over.transition import Transition
from terrace.simulate.links import exchange_tiers


@dataclass(frozen=True, kw_only=True)
class HandOverCost:
    """Seconds of a hand-over, bytes sent by all ranks per tier, and the most bytes received by one rank."""

    seconds: float
    sent_bytes: dict[str, int]
    received_bytes: int


def predict_hand_over(cluster: Cluster, transition: Transition) -> HandOverCost:
    """Cost of a hand-over on the cluster for which the transition was built."""
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
