"""A recording: the time, the lane and the predecessor of every instruction of a step, simulated or measured.

The lane `COMPUTE` is the compute stream; the others are tier indexes.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from terrace.program.instruction import Instruction
from terrace.program.report import StepReport

if TYPE_CHECKING:
    from terrace.program.program import Program

COMPUTE = -1  # the lane of the compute stream; the others are tier indexes


class Span(NamedTuple):
    """A timed event: compute, a wait of the compute stream, or a message on its lane.

    `after` is the number of the span that this one started after (for a wait: that ended it); -1 if there is none. In a
    pipeline that span may be on another stage, named by `stage`; -1 is this span's own stage.
    """

    lane: int
    start_s: float
    end_s: float
    position: int  # of the instruction in the program
    category: str  # as in `StepReport.time_s`; on a lane the message class
    after: int
    stage: int = -1


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A steady step of one rank. Times are relative to its start, `begin_s` after the first stage's start.

    `spans` also holds the step before, because its last messages reach into this one: its times are negative, and
    `first` is the number of the first span of this step. `started_s` is the time at which the compute stream ran or
    issued an instruction; `done_s` the time at which it finished or its message arrived. `slowed_s` is the extra
    compute time of the step due to concurrent messages.
    """

    program: "Program"
    report: StepReport
    spans: tuple[Span, ...]
    first: int
    started_s: tuple[float, ...]
    done_s: tuple[float, ...]
    slowed_s: float
    begin_s: float = 0.0

    @property
    def lanes(self) -> tuple[int, ...]:
        """The lanes that carry anything, the compute stream first, then from the innermost tier outward."""
        return (COMPUTE, *sorted({span.lane for span in self.spans} - {COMPUTE}))

    def lane_name(self, lane: int) -> str:
        """`compute`, the name of the lane's tier, or `stages` for messages to other stages."""
        if lane == COMPUTE:
            return "compute"
        tiers = self.program.layout.tiers
        return tiers[lane] if lane < len(tiers) else "stages"

    def awaited(self, wait: Span) -> list[Instruction]:
        """The messages that a wait of the compute stream outlasts, in order: the message in flight when it begins, and
        messages that could only start after it, on its lane or because they read its data.

        A wait for a GATHER may therefore begin with the REFRESH of the block.
        """
        found, number = [], wait.after if wait.stage < 0 else -1
        while number >= 0:
            span = self.spans[number]
            found.append(self.program.instructions[span.position])
            # Messages that began before the wait, or on another stage, end the chain.
            if span.start_s <= wait.start_s or span.stage >= 0:
                break
            number = span.after
        return found[::-1]

    def visible(self) -> list[tuple[int, Span]]:
        """The numbered spans that take time between the start and the end of the step."""
        end_s = self.report.step_s
        return [
            (number, span)
            for number, span in enumerate(self.spans)
            if span.end_s > max(0.0, span.start_s) and span.start_s < end_s and (number >= self.first or span.lane >= 0)
        ]
