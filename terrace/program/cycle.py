"""Programs of islands: a step with an exchange at its end, a separate exchange, and a cycle of steps as a period."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from terrace.base.errors import PlanError
from terrace.base.repeated import Repeated
from terrace.plan.outer import Exchange, Outer
from terrace.plan.stage import idle_stage
from terrace.program.exchange import exchange_instructions
from terrace.program.instruction import Instruction
from terrace.program.lowering import step_end
from terrace.program.period import Period, Turn
from terrace.program.phase import Phase
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
    found, given = program.with_exchange(exchange), program.instructions
    old, new = tuple(step_end(program)), tuple(step_end(found))
    end = len(given) - len(old)
    if isinstance(given, Repeated):
        instructions: Sequence[Instruction] = replace(given, suffix=(*given.suffix[: -len(old)], *new))
    elif isinstance(given, Segments) and given.bodies[-1] == old:
        instructions = Segments((*given.bodies[:-1], new), given.order)
    else:
        instructions = (*given[:end], *new)
    return found.of_stage(found.stage, instructions)


def outer_program(program: Program, exchange: Exchange) -> Program:
    """A program with only an exchange between islands, run after the last step, for the stage of `program`."""
    frame = program.of_stage(idle_stage(program.stage), phase=Phase.OUTER).with_exchange(exchange)
    return frame.of_stage(frame.stage, tuple(exchange_instructions(frame)))


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
