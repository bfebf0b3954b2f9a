"""Copies of checkpoint parts in the memory of other machines: which rank keeps whose. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

TAIL_BYTES = 16  # number of updates and checksum, after the part
SLOTS = 2  # the copy being written and the one before
MEMORY, TIME = "peer copies", "peer copy"  # categories


@dataclass(frozen=True, kw_only=True)
class Partners:
    """Each rank's copy goes `shift` places on along tier number `tier`, around a ring of `size` ranks."""

    tier: int
    stride: int  # between the numbers of neighbours
    size: int
    shift: int

    def keeper(self, rank: int) -> int:
        """The rank whose machine keeps this rank's part."""
        return self._moved(rank, self.shift)

    def kept(self, rank: int) -> int:
        """The rank whose part this rank's machine keeps."""
        return self._moved(rank, -self.shift)

    def members(self, rank: int) -> tuple[int, ...]:
        return tuple(sorted(self._moved(rank, place) for place in range(self.size)))

    def _moved(self, rank: int, places: int) -> int:
        place = rank // self.stride % self.size
        return rank + ((place + places) % self.size - place) * self.stride


def find_partners(sizes: Sequence[int], machines: Sequence[str]) -> Partners | None:
    """Partners on the outermost tier on which no rank's partner is on its own machine; None: no tier is such.

    `sizes` are the tiers' from the innermost one, `machines` the ranks' in order.
    """
    for tier in reversed(range(len(sizes))):
        for shift in range(1, sizes[tier]):
            found = Partners(tier=tier, stride=math.prod(sizes[:tier]), size=sizes[tier], shift=shift)
            if all(machines[found.keeper(rank)] != machine for rank, machine in enumerate(machines)):
                return found
    return None


def one_machine(machines: Sequence[str]) -> str:
    """Error of a run whose ranks have no partners."""
    where = "all ranks are on one machine" if len(set(machines)) < 2 else "on no tier do all ranks meet other machines"
    return (
        f"train.peer_copies = 1 would not outlive a lost machine, since {where}: leave it out, or start on two or more"
    )
