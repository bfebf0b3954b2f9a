"""The verifier of a period: its programs one by one, then against each other.

1. Each turn runs at least once and has the programs of all stages, which pass `verify_stages`.
2. All programs are for the same cluster, plan, blocks and stages, so that each finds the states it reads where another
   left them.
3. A restoring program has no place in a period: no state is loaded there, and it would send what is up to date.
4. With islands, a period that trains has an outer program. The last program before an outer one is a step; the last
   before a program of forwards, other forwards left out, is not, since islands then have different parameters. Before
   the first turn comes the last, because a period repeats.
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
    if period.turns[0].programs[0].layout.num_islands == 1:
        return  # no program is an outer one
    phases = {turn.phase for turn in period.turns}
    if Phase.TRAIN in phases and Phase.OUTER not in phases:
        raise ProgramError("the islands of the plan never exchange their changes: add a turn of outer programs")
    changes = [turn.phase for turn in period.turns if turn.phase is not Phase.FORWARD]
    last = changes[-1] if changes else None  # a period repeats
    for number, turn in enumerate(period.turns):
        if turn.phase is Phase.OUTER and (last is not Phase.TRAIN or turn.times > 1):
            raise ProgramError("an outer program follows another, or nothing: no step has changed a parameter between")
        if turn.phase is not Phase.FORWARD:
            last = turn.phase
        elif last is Phase.TRAIN:
            raise ProgramError(
                f"turn {number} of the period (forward) follows steps of islands, whose parameters differ: "
                "put it after an outer program"
            )


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
