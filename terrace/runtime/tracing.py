"""Measures the time of each instruction of a step, as a recording that can be compared with a simulated one.

    with tracer.step():
        engine.step(batches, lr)
    recordings = tracer.recordings()

Other steps are unaffected. While a step is traced, instance attributes of the runner and the clock override methods
of their classes, to record each mark of the clock, each piece of work on a lane and each message to another stage;
afterwards they are deleted. Each mark also reads the memory in use.

On a CPU times are the host's; on CUDA they are events on the streams, read at the end, so that tracing never makes the
host wait. A message between stages is recorded when it is sent; with NCCL, where torch sends it on its own stream, only
the wait for it is recorded. Pieces of states below the device, and updates on
the host's cores, are recorded on a CPU, each on its lane at the instruction that asked for it.

Compute spans are the time between two marks: a wait, or a pass up to its end. Routed messages appear on the lanes
that they use, at the position of their pass. Messages of tensor and context ranks inside a block appear as the waits
for them.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from terrace.accelerator import bytes_in_use, has_streams
from terrace.comm.lane import DONE, Ticket
from terrace.plan.layout import INSIDE
from terrace.program.block_program.steps import InBlockMessage
from terrace.program.instruction import COLLECTIVES
from terrace.program.recording import COMPUTE, MemorySample, Recording, Span, below_lane
from terrace.program.report import StepReport
from terrace.runtime.clock import timed_event, wait_for
from terrace.runtime.in_block import InBlockComm, InFlight
from terrace.runtime.messages import Pending

if TYPE_CHECKING:
    from terrace.runtime.engine import Engine

Stamp = Any  # seconds of the host's clock, or a CUDA event
Work = Callable[[], None]


@dataclass
class _Step:
    # marks: (end, category, position, awaited position, number of the awaited routed message)
    # messages: (lane, start, end, position, category, number), whose number is -1 unless it is routed

    origin: Stamp = None
    marks: list[tuple[Stamp, str, int, int, int]] = field(default_factory=list)
    memory: list[tuple[Stamp, dict[str, int], int]] = field(default_factory=list)  # at each mark
    messages: list[tuple[int, Stamp, Stamp, int, str, int]] = field(default_factory=list)


class Tracer:
    def __init__(self, engine: "Engine") -> None:
        self._engine, self._program = engine, engine.program
        self._steps: list[tuple[_Step, StepReport]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        step = _Step()
        hidden = self._hide(step)
        try:
            yield
        finally:
            # Deleting the instance attributes uncovers the class' methods again.
            for owner, name in hidden:
                del vars(owner)[name]
            self._engine.runner.messages.progress = self._progress
            self._engine.comm.stages.around = None
            self._engine.below.trace()
        self._steps.append((step, self._engine.report(self._engine.clock.totals())))

    def recordings(self) -> list[Recording]:
        """A recording of every traced step, including messages that the previous step left in flight.

        Call once, after `Engine.drain`, when the last step's messages have completed.
        """
        wait_for(self._engine.device)
        before, found = _Step(), list[Recording]()
        for step, report in self._steps:
            found.append(self._recording(before, step, report))
            before = step
        return found

    def _hide(self, step: _Step) -> list[tuple[object, str]]:
        messages, clock, program = self._engine.runner.messages, self._engine.clock, self._program
        start, mark, submit, self._progress = clock.start, clock.mark, messages.submit, messages.progress
        progress, awaited, expected = self._progress, [-1], [-1]

        # Each wrapper calls the hidden method and then stamps; the step itself runs unchanged.
        def started() -> None:
            start()
            step.origin = self._stamp()

        def marked(category: str) -> None:
            mark(category)
            stamp = self._stamp()
            step.marks.append((stamp, category, messages.counter, awaited[0], expected[0]))
            step.memory.append((stamp, self._engine.comm.meter.now(), bytes_in_use(self._engine.device)))
            awaited[0] = -1

        def recorded(counter: int, instruction: object, waiting_on: tuple[int, ...]) -> None:
            # A wait's mark follows its progress call, which names the awaited message.
            awaited[0] = counter if waiting_on else -1
            progress(counter, instruction, waiting_on)

        def around(work: Work) -> Work:
            position = messages.counter
            message = program.message(program.instructions[position])
            return self._timed(step, work, message.lane, position, message.message_class.value)

        def submitted(work: Work, after: Ticket = DONE) -> Pending:
            return submit(around(work), after)

        hidden: list[tuple[object, str, Callable[..., Any]]] = [
            (clock, "start", started),
            (clock, "mark", marked),
            (messages, "submit", submitted),
            (messages, "part", around),
        ]
        for inside in {id(axis.in_block): axis.in_block for axis in self._engine.axes}.values():
            hidden += self._hide_inside(step, inside, expected)
        for owner, name, function in hidden:
            # Set on the instance, so that classes and other engines stay as they are.
            vars(owner)[name] = function
        # On a device the ring's threads have no stream whose events would tell when they ran.
        if not has_streams(self._engine.device):

            def passed(work: Work, category: str, lane: str) -> Work:
                return self._timed(step, work, below_lane(program, lane), messages.counter, category)

            self._engine.below.trace(passed)
        messages.progress = recorded
        self._engine.comm.stages.around = around
        return [(owner, name) for owner, name, _ in hidden]

    def _hide_inside(
        self, step: _Step, inside: InBlockComm, expected: list[int]
    ) -> list[tuple[object, str, Callable[..., Any]]]:
        # Routed messages as they are submitted, and which of them a wait is for.
        submit, wait, issued = inside.submit, inside.wait, self._engine.runner.messages
        numbers, sent = count(), dict[int, tuple[InFlight, int]]()  # held, so that no id comes twice

        def submitted(work: Work, *messages: InBlockMessage, after: InFlight | None = None) -> InFlight:
            message = messages[0]
            if message.lane == INSIDE:
                return submit(work, *messages, after=after)
            number = next(numbers)
            timed = self._timed(step, work, message.lane, issued.counter, message.message_class.value, number)
            flight = submit(timed, *messages, after=after)
            sent[id(flight)] = flight, number
            return flight

        def waited(flight: InFlight, ranks: tuple[int, ...]) -> None:
            expected[0] = sent[id(flight)][1] if id(flight) in sent else -1
            wait(flight, ranks)
            expected[0] = -1

        return [(inside, "submit", submitted), (inside, "wait", waited)]

    def _timed(self, step: _Step, work: Work, lane: int, position: int, category: str, number: int = -1) -> Work:
        def timed() -> None:
            begin = self._stamp()
            work()
            step.messages.append((lane, begin, self._stamp(), position, category, number))

        return timed

    def _stamp(self) -> Stamp:
        device = self._engine.device
        return timed_event(device) if has_streams(device) else time.perf_counter()

    def _seconds(self, origin: Stamp, stamp: Stamp) -> float:
        if isinstance(stamp, float):
            return stamp - float(origin)
        return float(origin.elapsed_time(stamp)) / 1e3

    def _recording(self, before: _Step, step: _Step, measured: StepReport) -> Recording:
        # Messages of the previous step may still run in this one: they are included, with negative times.
        spans: list[Span] = []
        first = 0
        known: dict[int, list[int]] = {}  # position of a message in the program -> the numbers of its spans
        inside: dict[int, int] = {}  # number of a routed message -> of its span
        # The step before comes first, so that its spans precede `first`.
        for each in (before, step):
            first = len(spans)
            for lane, begin, end, position, category, number in each.messages:
                start_s, end_s = (self._seconds(step.origin, stamp) for stamp in (begin, end))
                if number < 0:
                    known.setdefault(position, []).append(len(spans))
                elif each is step:
                    inside[number] = len(spans)
                spans.append(Span(max(lane, 0), start_s, end_s, position, category, -1))
        size = len(self._program.instructions)
        started_s, done_s = [-1.0] * size, [0.0] * size
        now_s = 0.0
        for stamp, category, position, awaited, expected in step.marks:
            # Spans of compute must not overlap, even if two stamps are slightly out of order.
            end_s = max(now_s, self._seconds(step.origin, stamp))
            # A wait may be for what the step before sent: it is for the newest that had begun.
            begun = [number for number in known.get(awaited, ()) if spans[number].start_s <= end_s]
            after = begun[-1] if begun else inside.get(expected, -1)
            after = after if category.startswith("wait ") else -1
            if end_s > now_s:
                spans.append(Span(COMPUTE, now_s, end_s, position, category, after))
            if not category.startswith("wait "):
                started_s[position] = now_s if started_s[position] < 0 else started_s[position]
                done_s[position] = end_s
            now_s = end_s
        begun_s: dict[int, float] = {}  # of messages: in gaps each part has a span
        for span in spans[first:]:
            if (
                COMPUTE < span.lane < below_lane(self._program)
                and self._program.instructions[span.position].op in COLLECTIVES
            ):
                started_s[span.position] = begun_s.setdefault(span.position, span.start_s)
                done_s[span.position] = span.end_s
        time_s: dict[str, float] = {}
        for span in spans[first:]:
            if span.lane == COMPUTE:
                time_s[span.category] = time_s.get(span.category, 0.0) + span.end_s - span.start_s
        report = StepReport(time_s=time_s, sent_bytes=measured.sent_bytes, memory_bytes=measured.memory_bytes)
        return Recording(
            program=self._program,
            report=report,
            spans=tuple(spans),
            first=first,
            started_s=tuple(max(0.0, moment_s) for moment_s in started_s),
            done_s=tuple(done_s),
            slowed_s=0.0,
            memory=tuple(
                MemorySample(self._seconds(step.origin, stamp), held, in_use) for stamp, held, in_use in step.memory
            ),
        )
