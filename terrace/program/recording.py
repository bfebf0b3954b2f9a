"""A recording: time, lane and predecessor of every instruction of a step, simulated or measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from terrace.program.instruction import Instruction
from terrace.program.report import StepReport

if TYPE_CHECKING:
    from terrace.program.program import Program

COMPUTE = -1  # the lane of the compute stream; the others are tier indexes


class Span(NamedTuple):
    """A timed event: compute, a wait of the compute stream, or a message on its lane.

    `after` is the index of the span that this one waited for (for a wait: that ended it), -1 if there is none. In a
    pipeline, that span may be on another stage, `stage`; -1 means the same stage.
    """

    lane: int
    start_s: float
    end_s: float
    position: int  # of the instruction in the program
    category: str  # as in `StepReport.time_s`; the message class for a message
    after: int
    stage: int = -1


def below_lane(program: "Program", medium: str = "") -> int:
    """The lane of a medium below the device or of the host's cores, after those of tiers and stages; "": the first."""
    lanes = program.plan.keep.lanes
    return len(program.layout.tiers) + 1 + (lanes.index(medium) if medium in lanes else 0)


class MemorySample(NamedTuple):
    """Measured bytes of a rank `moment_s` after the start of its step, on a device as the host had issued it by then.

    `states_bytes` has the model state and messages by category, `in_use_bytes` all that the device's allocator has
    handed out, or on a CPU the resident memory of the process.
    """

    moment_s: float
    states_bytes: Mapping[str, int]
    in_use_bytes: int


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A steady-state step of one rank. Times are relative to its start, which is `begin_s` after the first stage's.

    `spans` also contains the previous step, with negative times, because its last messages overlap this one; `first` is
    the index of this step's first span. By instruction, `started_s` is when the compute stream ran or issued it, and
    `done_s` when it finished or its message arrived. `slowed_s` is the extra compute time due to concurrent messages.
    """

    program: "Program"
    report: StepReport
    spans: tuple[Span, ...]
    first: int
    started_s: tuple[float, ...]
    done_s: tuple[float, ...]
    slowed_s: float
    begin_s: float = 0.0
    memory: tuple[MemorySample, ...] = ()  # of a measured step

    @property
    def lanes(self) -> tuple[int, ...]:
        """The lanes in use: the compute stream, then tiers from the innermost outward."""
        return (COMPUTE, *sorted({span.lane for span in self.spans} - {COMPUTE}))

    def lane_name(self, lane: int) -> str:
        """`compute`, a tier, `stages` for messages between stages, a medium below the device, or the host's cores."""
        if lane == COMPUTE:
            return "compute"
        return (*self.program.layout.tiers, "stages", *self.program.plan.keep.lanes)[lane]

    def awaited(self, wait: Span) -> list[Instruction]:
        """The messages that a wait of the compute stream depends on, in order.

        The first is in flight when the wait begins; each later one started after its predecessor, on the same lane or
        because it reads its data. So a wait for a GATHER may begin with the REFRESH of the block.
        """
        found, number = [], wait.after if wait.stage < 0 else -1
        while number >= 0:
            span = self.spans[number]
            found.append(self.program.instructions[span.position])
            # A message that began before the wait, or on another stage, ends the chain.
            if span.start_s <= wait.start_s or span.stage >= 0:
                break
            number = span.after
        return found[::-1]

    def visible(self) -> list[tuple[int, Span]]:
        """(Index, span) of the spans that overlap the step."""
        end_s = self.report.step_s
        return [
            (number, span)
            for number, span in enumerate(self.spans)
            if span.end_s > max(0.0, span.start_s) and span.start_s < end_s and (number >= self.first or span.lane >= 0)
        ]
