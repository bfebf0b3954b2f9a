"""Seconds and bytes of a hand-over to generation, as if the programs of all ranks were played.

An instruction (terrace.rl.hand_over.program) starts on a rank when its lane is free, the instruction of the same blocks
on the next outer tier is done, and its peers have reached it. All its messages start together, so it takes one latency
plus the larger of the bytes sent and received: links are full duplex. It is done when its peers are done, too.

Ranks that send and receive as many bytes in every instruction, with peers that do so in turn, reach and finish all
instructions at the same time. So one rank of each such group is played, with the same result as playing all
(tests/rl/test_hand_over_cost.py).
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from terrace.cluster.cluster import Cluster
from terrace.rl.hand_over.moves import Sends
from terrace.rl.hand_over.program import instructions_of
from terrace.rl.hand_over.transition import Transition
from terrace.simulate.links import exchange_tiers


@dataclass(frozen=True, kw_only=True)
class HandOverCost:
    """Seconds of a hand-over, bytes sent by all ranks per tier, and the most bytes received by one rank."""

    seconds: float
    sent_bytes: dict[str, int]
    received_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Ends:
    """Rank -> bytes that it sends and receives in an instruction, and its peers."""

    leaves: Counter[int] = field(default_factory=Counter)
    comes: Counter[int] = field(default_factory=Counter)
    peers: dict[int, set[int]] = field(default_factory=dict)

    @staticmethod
    def of(blocks: Iterable[Sends]) -> "_Ends":
        found = _Ends()
        for sends in blocks:
            for (source, target), num_bytes in sends.items():
                found.leaves[source] += num_bytes
                found.comes[target] += num_bytes
                found.peers.setdefault(source, set()).add(target)
                found.peers.setdefault(target, set()).add(source)
        return found

    def most_bytes(self, rank: int) -> int:
        return max(self.leaves[rank], self.comes[rank])


def predict_hand_over(cluster: Cluster, transition: Transition) -> HandOverCost:
    alike, world = transition.alike, cluster.world_size
    sends = {first: transition.sends(first) for first in dict.fromkeys(alike)}
    known = dict[tuple[int, ...], _Ends]()  # by the first equal blocks, and the tier
    turns = list[tuple[tuple[int, ...], int, _Ends]]()
    for blocks, tier in instructions_of(transition):
        firsts = [alike[block] for block in blocks]
        key = *firsts, tier
        if key not in known:
            known[key] = _Ends.of(sends[first][tier] for first in firsts)
        turns.append((blocks, tier, known[key]))
    groups = _groups(world, list(known.values()))
    sent, received = Counter[str](), [0] * world
    for _, tier, ends in turns:
        sent[cluster.tiers[tier].name] += ends.leaves.total()
        for rank, num_bytes in ends.comes.items():
            received[rank] += num_bytes
    return HandOverCost(
        seconds=_played_s(cluster, transition, turns, groups),
        sent_bytes={tier.name: sent[tier.name] for tier in cluster.tiers},
        received_bytes=max(received),
    )


def _played_s(
    cluster: Cluster, transition: Transition, turns: Sequence[tuple[tuple[int, ...], int, _Ends]], groups: Sequence[int]
) -> float:
    """Seconds until the last group has done all instructions (blocks, tier, ends)."""
    ranks = {group: rank for rank, group in enumerate(groups)}
    together = {id(ends): ends for _, _, ends in turns}
    peers = {
        key: {
            group: {group, *(groups[peer] for peer in ends.peers[rank])}
            for group, rank in ranks.items()
            if rank in ends.peers
        }
        for key, ends in together.items()
    }
    free: dict[tuple[int, int], float] = {}  # group, lane -> seconds
    done: dict[tuple[int, tuple[int, ...]], float] = {}  # group, blocks -> seconds
    for blocks, tier, ends in turns:
        own = peers[id(ends)]
        ready = {group: max(free.get((group, tier), 0.0), done.get((group, blocks), 0.0)) for group in own}
        after = dict[int, float]()
        for group, others in own.items():
            seconds = exchange_tiers(cluster, transition.tiers, [(tier, ends.most_bytes(ranks[group]))])
            after[group] = max(ready[each] for each in others) + sum(seconds.values())
        for group, others in own.items():
            free[group, tier] = done[group, blocks] = max(after[each] for each in others)
    return max(done.values(), default=0.0)


def _groups(world: int, instructions: Sequence[_Ends]) -> list[int]:
    """The group of each rank: equal bytes in every instruction, and peers of equal groups (colour refinement)."""
    found = _numbered([[(ends.leaves[rank], ends.comes[rank]) for ends in instructions] for rank in range(world)])
    while True:
        before = found
        seen = ([before[rank], *(_of_peers(before, ends, rank) for ends in instructions)] for rank in range(world))
        found = _numbered(seen)
        if max(found) == max(before):
            return found


def _of_peers(groups: Sequence[int], ends: _Ends, rank: int) -> frozenset[int]:
    return frozenset(groups[peer] for peer in ends.peers.get(rank, ()))


def _numbered(keys: Iterable[Sequence[Hashable]]) -> list[int]:
    numbers = dict[tuple[Hashable, ...], int]()
    return [numbers.setdefault(tuple(key), len(numbers)) for key in keys]
