"""Other programs that used the machine while its constants were measured. Needs no torch.

The kernel counts what each core did for all programs, and a process knows its own part: what remains on the cores of
the ranks was others'. Ranks share cores, so their own seconds are added up first.
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
_MOST = 0.2  # of the cores: a share that shows in a measurement; a guess
_OF_PROGRAMS = (1, 2, 3, 8)  # columns: user, nice, system, and stolen by other machines on the same hardware


@dataclass(frozen=True)
class CoreSeconds:
    """Seconds so far: of all programs on some cores, of this process, and of a clock. `place` names the cores."""

    place: str
    num_cores: int
    all_s: float
    own_s: float
    clock_s: float

    @classmethod
    def now(cls, stat: Path = _STAT) -> Self | None:
        """Of the cores that this process may use; None where the system does not count."""
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
        """The seconds since `before`."""
        spent = (getattr(self, name) - getattr(before, name) for name in ("all_s", "own_s", "clock_s"))
        return type(self)(self.place, self.num_cores, *spent)


def busy_since(before: CoreSeconds | None, engine: "Engine") -> str:
    """As `busy_words`, of all ranks since `before`; on CUDA "", since cores only issue work and wait. Every rank calls
    this.
    """
    now = CoreSeconds.now()
    spent = None if before is None or now is None else now.since(before)
    ranks = engine.comm.exchange(None if spent is None else astuple(spent))
    return busy_words([CoreSeconds(*each) if each else None for each in ranks]) if engine.device.type == "cpu" else ""


def busy_words(ranks: Sequence[CoreSeconds | None]) -> str:
    """The largest share of a machine's cores that other programs took, in words; "" if it is small or unknown."""
    shares = [0.0]
    for place in {each.place: each for each in ranks if each is not None}.values():
        here = [each for each in ranks if each is not None and each.place == place.place]
        # Every rank there has counted the same cores, for about as long.
        others_s = max(each.all_s for each in here) - sum(each.own_s for each in here)
        shares.append(others_s / (place.num_cores * max(max(each.clock_s for each in here), 1e-9)))
    if max(shares) < _MOST:
        return ""
    return f"other programs took {100 * max(shares):.0f} % of the cores while the machine was measured"
