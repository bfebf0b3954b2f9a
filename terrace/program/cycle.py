"""The cycle of a plan with islands as a period: its steps in turns, by the exchange at the end of each."""

from collections.abc import Sequence
from itertools import groupby

from terrace.plan.outer import Exchange, Outer
from terrace.program.lowering import exchanging
from terrace.program.period import Period, Turn
from terrace.program.program import Program


def exchanges(outer: Outer) -> list[Exchange]:
    """The exchange at the end of each step of a steady cycle."""
    every = range(outer.fragments)
    return [outer.exchange(step, every) for step in range(outer.every)]


def cycle(programs: Sequence[Program]) -> Period:
    """The steady cycle of the training programs of all stages; a period of one step where all ranks are one island."""
    known: dict[Exchange, tuple[Program, ...]] = {}
    turns = []
    for exchange, steps in groupby(exchanges(programs[0].plan.outer)):
        if exchange not in known:
            known[exchange] = tuple(exchanging(each, exchange) for each in programs)
        turns.append(Turn(known[exchange], len(list(steps))))
    return Period(tuple(turns))
