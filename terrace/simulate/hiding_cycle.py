"""Search for the nearest cycle that hides the exchanges of a plan's islands."""

import math
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from terrace.base.errors import PlanError
from terrace.plan.outer import Outer
from terrace.simulate.cycle import Cycle
from terrace.simulate.step import Prediction, predict_step

_HIDDEN = 1e-3  # part of a cycle in which exchanges may be waited for
_WORTH_IT = 1e-3  # part of a step by which hiding must shorten it: on a CPU messages take cores all the same
_TRIES = 4


class Hidden(NamedTuple):
    """The outer loop with the delay and cycle length that hide exchanges, and its prediction."""

    outer: Outer
    prediction: Prediction


def is_hidden(cycle: Cycle) -> bool:
    """Whether waits for exchanges are negligible."""
    return cycle.waited_s <= _HIDDEN * cycle.cycle_s


def steps_of_exchange(cycle: Cycle) -> float:
    """Duration of the longest exchange, in steps without exchanges."""
    return cycle.exchange_s / cycle.plain_s if cycle.plain_s else math.inf


def hiding(base: Prediction) -> Hidden | None:
    """The least delay that hides the exchanges of a prediction, with the shortest cycle at least as long as its own.

    None if they are hidden already, or if no delay within a few steps of the estimate hides them and shortens the
    step.
    """
    cycle, step = base.cycle, base.step
    if cycle is None or is_hidden(cycle):
        return None
    outer, needed = cycle.outer, max(1, math.ceil(steps_of_exchange(cycle)))
    for delay in range(max(needed, outer.delay + 1), max(needed, outer.delay + 1) + _TRIES):
        # Exchanges of all fragments share one link, one at a time.
        every = max(outer.every, delay, outer.fragments * needed)
        every = math.ceil(every / outer.fragments) * outer.fragments
        longer = replace(outer, delay=delay, every=every)
        with suppress(PlanError):
            found = predict_step(replace(step, plan=replace(step.plan, outer=longer)))
            if found.cycle is not None and is_hidden(found.cycle):
                return Hidden(longer, found) if found.step_s < (1 - _WORTH_IT) * base.step_s else None
    return None
