"""The verifier of a period: its programs one by one, then against each other.

1. Each turn runs at least once and has the programs of all stages, which pass `verify_stages`.
2. All programs are for the same cluster, plan, blocks and stages, so that each finds the states it reads where another
   left them.
3. A restoring program has no place in a period: no state is loaded there, and it would send what is up to date.
4. Steps of islands are followed by an outer program, before the period ends or begins again, and an outer program
   follows a step.
"""

from terrace.base.errors import ProgramError
from terrace.program.period import Period, Turn
from terrace.program.phase import Phase
from terrace.program.verify_ranks import verify_stages


def verify_period(period: Period) -> None:
    """Check a period; raises `ProgramError` at the first broken rule."""
    if not period.turns:
        raise ProgramError("a period has at least one turn")
    first = period.turns[0]
    verified: set[int] = set()
    for number, turn in enumerate(period.turns):
        where = f"turn {number} of the period ({turn.phase.value})"
        if turn.times < 1:
            raise ProgramError(f"{where} runs {turn.times} times: at least once, or leave it out")
        _check_alike(where, turn, first)
        if turn.phase is Phase.RESTORE:
            raise ProgramError(f"{where}: a restoring program follows a loaded state, and none is loaded in a period")
        # A turn may come again with the programs of another.
        if id(turn.programs[0]) not in verified:
            verify_stages(turn.programs)
            verified.add(id(turn.programs[0]))
    _check_islands(period)


def _check_islands(period: Period) -> None:
    # Two in a row stand for more.
    phases = [
        turn.phase
        for turn in period.turns
        for _ in range(min(turn.times, 2))
        if turn.phase in (Phase.TRAIN, Phase.OUTER)
    ]
    has_islands = period.turns[0].programs[0].layout.num_islands > 1
    if has_islands and Phase.TRAIN in phases and Phase.OUTER not in phases:
        raise ProgramError("the islands of the plan never exchange what they learn: add a turn of outer programs")
    # The turn before the first is the last: a period repeats.
    for number, phase in enumerate(phases):
        if phase is Phase.OUTER and phases[number - 1] is Phase.OUTER:
            raise ProgramError("an outer program follows another, or nothing: no step has changed a parameter between")


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
