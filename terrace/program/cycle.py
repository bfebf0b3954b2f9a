"""Programs of islands: a step with an exchange at its end, a separate exchange, and a cycle of steps as a period."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from terrace.base.errors import PlanError
from terrace.plan.outer import Exchange, Outer
from terrace.plan.stage import idle_stage
from terrace.program.exchange import exchange_instructions
from terrace.program.instruction import Phase
from terrace.program.lowering import step_end
from terrace.program.period import Period, Turn
from terrace.program.program import Program
from terrace.program.segments import Segments


def exchanging(program: Program, exchange: Exchange) -> Program:
    """The training program `program` with another exchange between islands at its end; everything else is shared.

    Raises `PlanError` if the plan has no islands.
    """
    if exchange == program.exchange:
        return program
    if not program.plan.outer.has_islands:
        raise PlanError("a plan without islands has nothing to exchange: give it a table outer")
    found, segments = replace(program, exchange=exchange), program.segments
    old, new = tuple(step_end(program)), tuple(step_end(found))
    last, _ = segments.order[-1]
    passes = segments.bodies[last][: -len(old)]  # none where the end is a body of its own
    bodies = (*segments.bodies[:last], (*passes, *new), *segments.bodies[last + 1 :])
    return replace(found, instructions=Segments(bodies, segments.order))


def outer_program(program: Program, exchange: Exchange) -> Program:
    """A program with only an exchange between islands, run after the last step, for the stage of `program`."""
    found = replace(program, stage=idle_stage(program.stage), phase=Phase.OUTER, exchange=exchange)
    return replace(found, instructions=tuple(exchange_instructions(found)))


def exchanges(outer: Outer) -> list[Exchange]:
    """The exchange at the end of each step of a steady cycle."""
    every = range(outer.fragments)
    return [outer.exchange(step, every) for step in range(outer.every)]


def cycle(programs: Sequence[Program]) -> Period:
    """The steady cycle of the training programs of all stages; a period of one step if there is one island."""
    known: dict[Exchange, tuple[Program, ...]] = {}
    turns = []
    for exchange, steps in groupby(exchanges(programs[0].plan.outer)):
        if exchange not in known:
            known[exchange] = tuple(exchanging(each, exchange) for each in programs)
        turns.append(Turn(known[exchange], len(list(steps))))
    return Period(tuple(turns))
