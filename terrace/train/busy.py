"""Detects other programs that used the CPU while the machine's constants, or steps, were measured. Needs no torch.

The kernel counts the busy time of each core over all programs. Subtracting the CPU time of our own ranks, summed
because ranks share cores, leaves the time of other programs.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from terrace.launch.machines import boot_id, num_cores

if TYPE_CHECKING:
    from terrace.runtime.engine import Engine

_STAT = Path("/proc/stat")
# Share of all cores. On a machine with two, this is a fifth of one core; every step waits for the rank on that core,
# and a verdict allows an error of a fifth.
_MOST = 0.1
MEASURING, STEPPING = "while the machine was measured", "while steps were timed"
_OF_PROGRAMS = (1, 2, 3, 8)  # columns: user, nice, system, and stolen by other machines on the same hardware


@dataclass(frozen=True)
class CoreSeconds:
    """CPU seconds so far: of all programs on a set of cores, of this process, and of the wall clock. `place` identifies
    the cores.
    """

    place: str
    num_cores: int
    all_s: float
    own_s: float
    clock_s: float

    @classmethod
    def now(cls, stat: Path = _STAT) -> Self | None:
        """Counters of the cores that this process may use; None if the system does not provide them."""
        if not hasattr(os, "sched_getaffinity"):
            return None
        cores = os.sched_getaffinity(0)
        try:
            rows = [line.split() for line in stat.read_text().splitlines()]
            all_ticks = sum(
                int(row[column])
                for row in rows
                if row[0] in {f"cpu{core}" for core in cores}
                for column in _OF_PROGRAMS
            )
        except (OSError, ValueError, IndexError):
            return None
        place = f"{boot_id()} {sorted(cores)}"
        return cls(place, num_cores(), all_ticks / os.sysconf("SC_CLK_TCK"), time.process_time(), time.monotonic())

    def since(self, before: Self) -> Self:
        spent = (getattr(self, name) - getattr(before, name) for name in ("all_s", "own_s", "clock_s"))
        return type(self)(self.place, self.num_cores, *spent)


def busy_since(before: CoreSeconds | None, engine: "Engine", when: str = MEASURING) -> str:
    """`busy_words` over all ranks since `before`; "" on CUDA, where host cores only launch work and wait.
    Collective.
    """
    now = CoreSeconds.now()
    spent = None if before is None or now is None else now.since(before)
    ranks = engine.comm.exchange(None if spent is None else astuple(spent))
    if engine.device.type != "cpu":
        return ""
    return busy_words([CoreSeconds(*each) if each else None for each in ranks], when)


def busy_words(ranks: Sequence[CoreSeconds | None], when: str = MEASURING) -> str:
    """The share of cores that other programs took, on the busiest machine, in words; "" if it is small or unknown."""
    shares = [0.0]
    for place in {each.place: each for each in ranks if each is not None}.values():
        here = [each for each in ranks if each is not None and each.place == place.place]
        # Every rank there has counted the same cores, for about as long.
        others_s = max(each.all_s for each in here) - sum(each.own_s for each in here)
        shares.append(others_s / (place.num_cores * max(max(each.clock_s for each in here), 1e-9)))
    if max(shares) < _MOST:
        return ""
    return f"other programs took {100 * max(shares):.0f} % of the cores {when}"
