"""How long a rank may wait before its watchdog looks for a culprit.

An exchange may take minutes on its link, and islands may be apart; both are in the predicted cycle. A rank that waits
for an exchange holds up its whole island: others may have nothing to wait for, and go on to the sums of the next step
before they miss it. So from the step that sends an exchange to the step after the one that applies it, every wait may
take some predicted cycles more than `train.timeout_s`. In other steps, and for a rank that computes, that alone holds.

Messages under islands have a limit far beyond that, so that the watchdog speaks first. Ranks outside a step it lets
wait; there, as in the save of a `Trainer`, that limit holds.
"""

from collections.abc import Callable, Collection
from datetime import timedelta

from terrace.plan.outer import Outer
from terrace.program.instruction import Instruction, Op
from terrace.runtime.exchanges import AwaitedExchange
from terrace.runtime.islands import Island

APART = timedelta(days=1)  # the most that islands may be apart: a guess, since no cycle is predicted yet
_CYCLES = 4  # links are shared, and islands are not equally fast: a guess
_OPS = (Op.OUTER_COUNT, Op.OUTER_START, Op.OUTER_APPLY)


class Patience:
    """Seconds beyond the timeout that a rank may wait; none before there is a prediction."""

    def __init__(self) -> None:
        self._extra_s, self._waits_anywhere = 0.0, False
        self._under_way: Callable[[], Collection[int]] = tuple
        self._step, self._last = -1, -2  # the newest step, and the last with an exchange

    def follow(self, island: Island, *, waits_anywhere: bool) -> None:
        """The island of this rank. With `waits_anywhere` a rank that says it computes may wait: a GPU's host does."""
        self._under_way, self._waits_anywhere = lambda: island.numbers.under_way, waits_anywhere

    def expect(self, outer: Outer, step_s: float) -> None:
        """The predicted mean step of a cycle takes `step_s`."""
        self._extra_s = _CYCLES * outer.every * step_s * outer.has_islands

    def seconds(self, step: int, doing: object, waiting_on: tuple[int, ...]) -> float:
        """Seconds beyond the timeout that a rank may be at `doing`, as it tells its watchdog."""
        exchanges = isinstance(doing, AwaitedExchange) or (isinstance(doing, Instruction) and doing.op in _OPS)
        # Once a step, since this is called at every instruction.
        if exchanges or (step != self._step and self._under_way()):
            self._last = step
        self._step = step
        is_near = step <= self._last + 1
        return self._extra_s if is_near and (waiting_on or self._waits_anywhere) else 0.0
