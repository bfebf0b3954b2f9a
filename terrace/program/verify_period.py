"""The verifier of a period: checks its programs one by one, then against each other.

1. Each turn runs at least once and has the programs of all stages, which pass `verify_stages`.
2. All programs are for the same cluster, plan, blocks and stages, so that each finds the states it reads where another
   left them.
3. A restoring program has no place in a period: no state is loaded there, and it would send values that are up to date.
4. With islands, a period of steps is a cycle: in the order of its steps, and again from the first, each fragment
   starts one exchange and applies it `delay` steps later, before it starts another; fragments take turns. An exchange
   of its own ends a run and has no place in a period.
"""

from terrace.base.errors import ProgramError
from terrace.plan.outer import NO_EXCHANGE, Exchange
from terrace.program.period import Period, Turn
from terrace.program.phase import Phase
from terrace.program.verify_ranks import verify_stages


def verify_period(period: Period) -> None:
    """Check a period; raises `ProgramError` at the first broken rule."""
    if not period.turns:
        raise ProgramError("a period has at least one turn")
    first = period.turns[0]
    verified: set[tuple[int, ...]] = set()
    for number, turn in enumerate(period.turns):
        where = f"turn {number} of the period ({turn.phase.value})"
        if turn.times < 1:
            raise ProgramError(f"{where} runs {turn.times} times: at least once, or leave it out")
        _check_alike(where, turn, first)
        if turn.phase is Phase.RESTORE:
            raise ProgramError(f"{where}: a restoring program follows a loaded state, and none is loaded in a period")
        # The programs of a turn may come again in a later one.
        if turn.key not in verified:
            verify_stages(turn.programs)
            verified.add(turn.key)
    _check_islands(period)


def _check_islands(period: Period) -> None:
    outer = period.turns[0].programs[0].plan.outer
    turns = [turn for turn in period.turns if turn.phase is Phase.TRAIN]
    if any(turn.phase is Phase.OUTER for turn in period.turns):
        raise ProgramError("an outer program ends a run, and a period goes on: give steps their exchanges")
    if not turns:
        return
    for turn in turns:
        if len({program.exchange for program in turn.programs}) > 1:
            raise ProgramError("the stages of a step exchange other fragments of the islands: build all for one")
    found = [turn.programs[0].exchange for turn in turns for _ in range(turn.times)]
    if len(found) % outer.every:
        raise ProgramError(
            f"the period has {len(found)} steps, and each fragment of the islands has its turn in {outer.every}: give "
            "whole cycles"
        )
    for step, exchange in enumerate(found):
        expected = outer.exchange(step, range(outer.fragments))
        if exchange != expected:
            raise ProgramError(
                f"step {step} of the period ends with {_words(exchange)}, but outer.every = {outer.every}, fragments = "
                f"{outer.fragments}, delay = {outer.delay} ask for {_words(expected)}"
            )


def _words(exchange: Exchange) -> str:
    if exchange == NO_EXCHANGE:
        return "no exchange of islands"
    parts = (("the arrival of", exchange.arrives), ("the start of", exchange.starts))
    words = [f"{what} fragment {', '.join(map(str, fragments))}" for what, fragments in parts if fragments]
    return " and ".join(words) + (", waited for" if exchange.waits and exchange.starts else "")


def _check_alike(where: str, turn: Turn, first: Turn) -> None:
    if len(turn.programs) != len(first.programs):
        raise ProgramError(f"{where} has {len(turn.programs)} stages, the first {len(first.programs)}: give all stages")
    for stage, (one, other) in enumerate(zip(turn.programs, first.programs, strict=True)):
        if one.phase is not turn.phase:
            raise ProgramError(f"{where}: the program of stage {stage} is for another phase, {one.phase.value}")
        for name in ("cluster", "plan", "blocks", "layout"):
            if getattr(one, name) != getattr(other, name):
                raise ProgramError(f"{where}: stage {stage} has another {name} than the first turn: build all for one")
        if (one.stage.index, one.stage.held) != (stage, other.stage.held):
            raise ProgramError(f"{where}: stage {stage} holds other blocks than in the first turn: build all for one")
