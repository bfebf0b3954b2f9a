"""The share of a run's time that becomes progress where parts fail, in closed form.

Failures of the job arrive at random with mean M seconds between them. T seconds of work are followed by a save that
stalls C seconds and counts W later; a failure costs a restart of R, which may fail as well. docs/failures.md derives

    goodput = T exp(-W/M) / (M exp(R/M) (exp((T + C)/M) - 1))

which for W = 0 is the complete cost of Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps" (2006), and to first order that of Young, "A first order approximation to the optimum checkpoint interval" (1974)
and of Kokolis et al. 2410.21680 (2024). `tests/support/failure_events.py` plays the same events one by one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

DEAD_S = 5.0  # after which a silent member counts as dead: torchft 0.2, measured; all others stand still for as long
_MOST = 700.0  # exponents beyond overflow: no work is ever done
_BELOW_ONE = 1 - 1e-12  # the logarithm of the interval ends at 1


@dataclass(frozen=True, kw_only=True)
class Save:
    """Seconds of a save: training stands still for `stall_s`, and `write_s` later a restart can use it."""

    stall_s: float
    write_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that any failure stops: `mean_s` between failures, `restart_s` until steps run again."""

    mean_s: float
    restart_s: float

    def goodput(self, work_s: float, save: Save) -> float:
        """Share of the time that becomes progress with a save after every `work_s` seconds of work."""
        lost = (save.write_s + self.restart_s) / self.mean_s
        segment = (work_s + save.stall_s) / self.mean_s
        if lost + segment > _MOST:
            return 0.0
        return work_s / self.mean_s * math.exp(-lost) / math.expm1(segment)

    def best_work_s(self, save: Save) -> float:
        """The seconds of work between saves with the highest goodput; 0 for a save without a stall.

        Newton's method on log(1 - x) + x + C/M = 0 for x = T/M, from Daly's series (2006) for it.
        """
        stall = save.stall_s / self.mean_s
        if not stall:
            return 0.0
        series = math.sqrt(2 * stall) * (1 + math.sqrt(stall / 2) / 3 + stall / 18) - stall
        # Above two means between failures the optimum is close to one mean.
        x = series if 0 < series < 1 else min(-math.expm1(-1 - stall), _BELOW_ONE)
        for _ in range(50):
            change = (math.log1p(-x) + x + stall) * (1 - x) / x
            x = min(x + change, (1 + x) / 2, _BELOW_ONE)
            if abs(change) <= 1e-12 * x:
                break
        return x * self.mean_s

    def best_steps(self, step_s: float, save: Save) -> int:
        """The number of steps between saves with the highest goodput; a save counts before the next is due."""
        least = max(1, math.ceil(save.write_s / step_s))
        below = max(least, math.floor(self.best_work_s(save) / step_s))
        return max((below, below + 1), key=lambda number: (self.goodput(number * step_s, save), -number))


def waits(mean_s: float, repair_s: float) -> Iterator[float]:
    """Share of the time in which a job waits for a repaired machine, with 0, 1, 2, ... spares: Erlang's loss formula.

    `mean_s` is between failures while the job runs, `repair_s` of one machine. The job waits while all spares and one
    machine more are in repair (Erlang 1917).
    """
    load, found = repair_s / mean_s, 1.0
    for places in count(1):
        found = load * found / (places + load * found)
        yield found


def waiting(mean_s: float, repair_s: float, spares: int) -> float:
    """The share of `waits` with this number of spares."""
    return next(islice(waits(mean_s, repair_s), spares, None))


def member_wait_s(num_members: int, member_s: float, repair_s: float, spares: int) -> float:
    """Mean seconds that a failed member of `num_members` waits for a machine while the others go on.

    `member_s` is the mean time between failures of a member. A birth-death chain over the machines in repair: members
    that are present fail, and each machine is repaired in `repair_s` in the mean.
    """
    state, total, absent, failing = 1.0, 0.0, 0.0, 0.0
    for broken in range(num_members + spares + 1):
        missing = max(0, broken - spares)
        total += state
        absent += state * missing
        failing += state * (num_members - missing) / member_s
        state *= (num_members - missing) / member_s * repair_s / (broken + 1)
        # Only the ratios of states matter.
        if total > 1e200:
            state, total, absent, failing = (each / total for each in (state, total, absent, failing))
    return absent / failing


def members_goodput(
    num_members: int, member_s: float, absent_s: float, lost_s: float = 0.0, dead_s: float = DEAD_S
) -> float:
    """Share of the members' time that becomes progress where each fails by itself and the others go on.

    A member fails after `member_s` in the mean, loses its last `lost_s` seconds of work and is absent for `absent_s`;
    all others stand still for `dead_s` at each leave and at each return (docs/failures.md).
    """
    cycle_s = member_s + absent_s
    return max(0.0, member_s - lost_s) / cycle_s * max(0.0, 1 - 2 * num_members * dead_s / cycle_s)
