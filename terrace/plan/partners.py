"""Which rank keeps a copy of which rank's checkpoint shard in another machine's memory. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

TAIL_BYTES = 16  # number of updates and checksum, after the shard
SLOTS = 2  # the copy being written and the previous one
MEMORY, TIME = "peer copies", "peer copy"  # categories


@dataclass(frozen=True, kw_only=True)
class Partners:
    """Each rank's copy goes `shift` positions further on tier `tier`, around a ring of `size` ranks."""

    tier: int
    stride: int  # difference between neighbouring ranks
    size: int
    shift: int

    def keeper(self, rank: int) -> int:
        return self._moved(rank, self.shift)

    def kept(self, rank: int) -> int:
        return self._moved(rank, -self.shift)

    def members(self, rank: int) -> tuple[int, ...]:
        return tuple(sorted(self._moved(rank, place) for place in range(self.size)))

    def _moved(self, rank: int, places: int) -> int:
        place = rank // self.stride % self.size
        return rank + ((place + places) % self.size - place) * self.stride


def find_partners(sizes: Sequence[int], machines: Sequence[str]) -> Partners | None:
    """Partners on the outermost tier where every rank's partner is on another machine; None if there is none.

    `sizes` are tier sizes, innermost first; `machines` is the machine of each rank.
    """
    for tier in reversed(range(len(sizes))):
        for shift in range(1, sizes[tier]):
            found = Partners(tier=tier, stride=math.prod(sizes[:tier]), size=sizes[tier], shift=shift)
            if all(machines[found.keeper(rank)] != machine for rank, machine in enumerate(machines)):
                return found
    return None


def one_machine(machines: Sequence[str]) -> str:
    """Error message for a run whose ranks have no partners."""
    where = "all ranks are on one machine" if len(set(machines)) < 2 else "on no tier do all ranks meet other machines"
    return (
        f"train.peer_copies = 1 would not outlive a lost machine, since {where}: leave it out, or start on two or more"
    )
