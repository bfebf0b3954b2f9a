"""How long a rank may wait before its watchdog looks for a culprit.

An exchange between islands may take minutes, and islands may drift apart; both are part of the predicted cycle. A rank
that waits for an exchange holds up its whole island, and other ranks notice only at the sums of the next step. So from
the step that sends an exchange to the step after the one that applies it, every wait may take a few predicted cycles
more than `train.timeout_s`. In other steps, and while a rank computes, `train.timeout_s` alone holds.

Messages under islands have a far longer timeout, so that the watchdog reports first. Outside a step the watchdog does
not limit waits, so there (for example in the save of a `Trainer`) that timeout holds.
"""

from collections.abc import Callable, Collection
from datetime import timedelta

from terrace.plan.outer import Outer
from terrace.program.instruction import Instruction, Op
from terrace.runtime.islands import AwaitedExchange, Island

APART = timedelta(days=1)  # the most that islands may be apart: a guess, since no cycle is predicted yet
_CYCLES = 4  # links are shared, and islands are not equally fast: a guess
_OPS = (Op.OUTER_COUNT, Op.OUTER_START, Op.OUTER_APPLY)


class Patience:
    """Seconds beyond the timeout that a rank may wait; 0 until a prediction is known."""

    def __init__(self) -> None:
        self._extra_s, self._waits_anywhere = 0.0, False
        self._under_way: Callable[[], Collection[int]] = tuple
        self._step, self._last = -1, -2  # the newest step, and the last with an exchange

    def follow(self, island: Island, *, waits_anywhere: bool) -> None:
        """Sets this rank's island. With `waits_anywhere`, instructions reported as computing may wait as well, as on a
        GPU's host.
        """
        self._under_way, self._waits_anywhere = lambda: island.numbers.under_way, waits_anywhere

    def expect(self, outer: Outer, step_s: float) -> None:
        """Sets the predicted mean step time of a cycle."""
        self._extra_s = _CYCLES * outer.every * step_s * outer.has_islands

    def seconds(self, step: int, doing: object, waiting_on: tuple[int, ...]) -> float:
        """Extra seconds that a rank may spend at `doing`, the instruction reported to its watchdog."""
        exchanges = isinstance(doing, AwaitedExchange) or (isinstance(doing, Instruction) and doing.op in _OPS)
        # Once a step, since this is called at every instruction.
        if exchanges or (step != self._step and self._under_way()):
            self._last = step
        self._step = step
        is_near = step <= self._last + 1
        return self._extra_s if is_near and (waiting_on or self._waits_anywhere) else 0.0
