"""Rows of timelines (terrace.program.timeline) from recordings, from played passes, and from a cycle of islands."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from terrace.plan.stage import Pass, Stage
from terrace.program.instruction import COLLECTIVES, Instruction, Op
from terrace.program.program import Program
from terrace.program.recording import COMPUTE, Recording, Span
from terrace.program.schedules.orders import StageTask
from terrace.program.timeline import Stretch, TimedSpan, Timeline, TimelineRow, Words
from terrace.simulate.critical import CriticalPath
from terrace.simulate.stages import Passed
from terrace.simulate.step import WAITS_ON_STAGES

if TYPE_CHECKING:
    from terrace.simulate.recorded import RecordedStep

_MAX_NAMED = 3  # messages named per wait; a guess
_PASSES = {Op[pass_.name]: pass_ for pass_ in Pass}
_CATEGORIES = {
    Pass.FORWARD: "forward",
    Pass.BACKWARD: "backward",
    Pass.BACKWARD_INPUT: "backward",
    Pass.BACKWARD_WEIGHT: "weight",
}
_CLOSE = 64  # spans of the fullest row in a close-up


@dataclass(frozen=True)
class _Recorded:
    """A recorded span: its instruction, the messages that a wait is for, and in a trace its block and bytes."""

    recording: Recording
    span: Span

    @property
    def instruction(self) -> Instruction:
        return self.recording.program.instructions[self.span.position]

    def __str__(self) -> str:
        words = str(self.instruction)
        if not self.span.category.startswith("wait "):
            return words
        # The first one is on the wire.
        names = [str(message) for message in self.recording.awaited(self.span)]
        if names == [words]:  # CLIP waits for its own message
            return f"{self.span.category}: {words}"
        if len(names) > _MAX_NAMED:
            names[1:-1] = [f"{len(names) - 2} more"]
        return f"{self.span.category}: {words} waits for {', then '.join(names)}"

    @property
    def facts(self) -> Mapping[str, object]:
        program, instruction = self.recording.program, self.instruction
        facts: dict[str, object] = {"instruction": str(instruction), "position": self.span.position}
        if instruction.block >= 0:
            facts["block"] = program.blocks[instruction.block].name
        if self.span.lane != COMPUTE and instruction.op in (*COLLECTIVES, Op.SEND, Op.TIE):
            sent = dict[str, int]()
            for tier, num_bytes in program.message(instruction).sends:
                key = f"bytes on {program.layout.tiers[tier]}"
                sent[key] = sent.get(key, 0) + num_bytes
            facts |= sent
        return facts


@dataclass(frozen=True)
class _Pass:
    instruction: Instruction
    block: str

    def __str__(self) -> str:
        return str(self.instruction)

    @property
    def facts(self) -> Mapping[str, object]:
        return {"instruction": str(self.instruction), "block": self.block}


def recording_rows(recording: Recording, group: str = "", begin_s: float = 0.0) -> list[TimelineRow]:
    """A row for the compute stream, then one for each lane. Messages of the step before are cut at the start.

    Times are from `begin_s` on.
    """
    spans: dict[int, list[TimedSpan]] = {lane: [] for lane in recording.lanes}  # lanes without spans get a row, too
    for _, span in recording.visible():
        start_s = begin_s + max(0.0, span.start_s)
        spans[span.lane].append(TimedSpan(start_s, begin_s + span.end_s, span.category, _Recorded(recording, span)))
    return [
        TimelineRow(recording.lane_name(lane), found, group, is_main=lane == COMPUTE) for lane, found in spans.items()
    ]


def passes_row(program: Program, passes: Iterable[Passed], group: str = "") -> TimelineRow:
    spans = []
    for instruction, start_s, end_s in passes:
        category = "forward" if instruction.op is Op.FORWARD else "backward"
        what = _Pass(instruction, program.blocks[instruction.block].name)
        spans.append(TimedSpan(start_s, end_s, category, what))
    return TimelineRow("compute", spans, group)


def step_timeline(recorded: "RecordedStep") -> Timeline:
    """A recorded step: of one stage its compute stream and lanes, of a pipeline a row for every stage."""
    if len(recorded.recordings) == 1:
        return recording_timeline(recorded.recordings[0], recorded.path)
    critical = []
    for piece in recorded.path.pieces:
        recording = recorded.recordings[piece.stage]
        # Rows of stages show compute alone.
        if recording.spans[piece.number].lane == COMPUTE:
            critical.append(Stretch(piece.stage, recording.begin_s + piece.start_s, recording.begin_s + piece.end_s))
    rows = [_stage_row(recorded, stage) for stage in range(len(recorded.recordings))]
    return Timeline(title="Timeline of all stages", rows=rows, end_s=recorded.end_s, critical=critical)


def recording_timeline(recording: Recording, path: CriticalPath | None = None) -> Timeline:
    """The steady step of one rank."""
    number_of = {lane: number for number, lane in enumerate(recording.lanes)}
    pieces = () if path is None else path.pieces
    critical = [Stretch(number_of[recording.spans[each.number].lane], each.start_s, each.end_s) for each in pieces]
    rows, step_s = recording_rows(recording), recording.report.step_s
    return Timeline(title="Timeline of a steady step", rows=rows, end_s=step_s, critical=critical)


def close_up(timeline: Timeline) -> Timeline:
    """The middle of a timeline, short enough to tell spans apart."""
    most = max(len(row.spans) for row in timeline.rows)
    half_s = min(0.5, _CLOSE / 2 / most) * timeline.length_s
    middle_s = (timeline.start_s + timeline.end_s) / 2
    return timeline.between(middle_s - half_s, middle_s + half_s)


def task_spans(stage: Stage, passes: Sequence[Passed]) -> Iterator[tuple[StageTask, float, float]]:
    """(Task, start, end) of a stage's played program; in a task a micro-batch passes all blocks of a chunk.

    A task includes its waits between blocks and its wait for the first block's parameters.
    """
    chunk_of = {block: chunk for chunk, blocks in enumerate(stage.chunks) for block in blocks}

    def task(passed: Passed) -> StageTask:
        instruction = passed.instruction
        return StageTask(_PASSES[instruction.op], chunk_of[instruction.block], instruction.micro)

    for each, group in groupby(passes, task):
        together = list(group)
        yield each, together[0].start_s, together[-1].end_s


def _stage_row(recorded: "RecordedStep", stage: int) -> TimelineRow:
    spans = []
    for task, start_s, end_s in task_spans(recorded.whole.programs[stage].stage, recorded.passes[stage]):
        label = task.pass_.letter + (f"{task.chunk}." if task.chunk else "") + str(task.micro)
        spans.append(TimedSpan(start_s, end_s, _CATEGORIES[task.pass_], Words(f"stage {stage}: {task}"), label))
    # Computation and waits for data ranks follow the last pass. Waits for other stages stay blank: they are the bubble.
    recording = recorded.recordings[stage]
    last_s = recorded.passes[stage][-1].end_s - recording.begin_s
    for _, span in recording.visible():
        # The tolerance absorbs rounding.
        if span.lane == COMPUTE and span.end_s > last_s + 1e-12 and span.category not in WAITS_ON_STAGES:
            start_s, category = recording.begin_s + max(span.start_s, last_s), span.category.removeprefix("wait ")
            words = Words(f"stage {stage}: {category}")
            spans.append(TimedSpan(start_s, recording.begin_s + span.end_s, category, words))
    return TimelineRow(f"stage {stage}", spans)
