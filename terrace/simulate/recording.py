"""Recording of a simulated step.

It is played by the rules of `terrace.simulate.events`, so a recording and a plain simulation cannot differ.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING

from terrace.base.collection import no_collection
from terrace.plan.keep import CORES
from terrace.plan.wire import MessageClass
from terrace.program.instruction import Op
from terrace.program.recording import COMPUTE, Recording, Span, below_lane
from terrace.simulate.below import ROWS, STATES, TABLE, WAIT, Moment
from terrace.simulate.events import behind_clip, check_alone, drain, price
from terrace.simulate.priced_instruction import Event
from terrace.simulate.rank import Rank

if TYPE_CHECKING:
    from terrace.program.program import Program
    from terrace.simulate.cost import Costs

_Noted = tuple[int, float, float, int, str, int, int]  # a span, by the rank's clock


def record(program: "Program", costs: "Costs") -> Recording:
    """Recording of a steady step; its report equals `simulate`'s.

    Raises `ProgramError` for a program that exchanges messages with other stages.
    """
    check_alone(program)
    with no_collection():
        plays = price(program, costs)
        rank = Recorder(program)
        nothing, started, done = Rank.nothing, rank.started_s.append, rank.done_s.append
        # Spans of the end of the step before are kept, since its messages may overlap this one.
        for is_last, begin in enumerate((behind_clip(plays), 0)):
            rank.restart()
            if is_last and costs.drains:
                rank.position = 0
                drain(rank)
            for position, (act, event) in enumerate(plays[begin:], begin):
                # As `begin`.
                started(now_s := rank.now_s)
                done(now_s)
                if act is not nothing:
                    rank.position = position
                    act(rank, event)
        return rank.recording()


_NEARLY = 1 - 1e-12  # sums of the same seconds in another order


class Recorder(Rank):
    """A rank that records its spans. It calls `Rank` by name, since `super()` takes as long as the call itself."""

    RECORDS = True

    __slots__ = (
        "cause",
        "done_s",
        "first",
        "halts",
        "issued",
        "longer_s",
        "newest",
        "origin",
        "passed",
        "position",
        "program",
        "sending",
        "spans",
        "started_s",
    )

    def __init__(self, program: "Program") -> None:
        super().__init__(program)
        self.program = program
        self.sending = len(program.layout.tiers)  # the lane of messages to other stages
        # The last span of every lane; COMPUTE is the last, the media below the device are before it.
        self.newest = [-1] * (self.sending + 2 + len(program.plan.keep.lanes))
        self.first, self.origin = 0, 0.0  # of the step: its first span, and the clock at its start
        self.cause: tuple[int, int] | None = None  # (stage, span) of another stage that the next wait is for
        self.spans: list[_Noted] = []
        self.started_s: list[float] = []
        self.done_s: list[float] = []
        self.position = 0
        self.longer_s = 0.0  # by how much computing outlasted its own seconds
        self.issued: dict[tuple[Op, int], int] = {}  # of messages in gaps: their positions
        self.passed: dict[tuple[int, MessageClass], int] = {}  # the last span in each direction of a medium
        self.halts: list[tuple[float, float, float]] = []  # from, to and by how long the clock stood still on the way

    def restart(self) -> None:
        self.first, self.origin = len(self.spans), self.now_s
        self.time_s = defaultdict(float)
        self.started_s.clear()
        self.done_s.clear()
        self.longer_s = 0.0

    def begin(self, position: int) -> None:
        self.position, now_s = position, self.now_s
        self.started_s.append(now_s)
        self.done_s.append(now_s)

    def recording(self, begin_s: float = 0.0) -> Recording:
        spans, started_s, done_s, origin_s = self.spans, self.started_s, self.done_s, self.origin
        # Spans were noted by the rank's clock, which stands still while cores are shared (terrace.simulate.rank).
        if self.halts:
            wall_s = self.wall()
            spans = [(each[0], wall_s(each[1]), wall_s(each[2]), *each[3:]) for each in spans]
            started_s, done_s, origin_s = [*map(wall_s, started_s)], [*map(wall_s, done_s)], wall_s(origin_s)
        new = tuple.__new__  # a step has hundreds of thousands of spans
        return Recording(
            program=self.program,
            report=self.program.report(self.time_s),
            spans=tuple(
                [
                    new(Span, (lane, start_s - origin_s, end_s - origin_s, position, category, after, stage))
                    for lane, start_s, end_s, position, category, after, stage in spans
                ]
            ),
            first=self.first,
            started_s=tuple([moment_s - origin_s for moment_s in started_s]),
            done_s=tuple([moment_s - origin_s for moment_s in done_s]),
            slowed_s=self.longer_s,
            begin_s=begin_s,
        )

    def wall(self) -> Callable[[float], float]:
        """Conversion from the rank's clock to wall time."""
        starts = [start_s for start_s, _, _ in self.halts]
        before = [0.0, *accumulate(longer_s for _, _, longer_s in self.halts)]

        def wall_s(moment_s: float) -> float:
            # Halts are in order of time; inside one, the wall's clock runs at an even, faster rate.
            number = bisect_right(starts, moment_s) - 1
            if number < 0:
                return moment_s
            start_s, end_s, longer_s = self.halts[number]
            return moment_s + before[number] + longer_s * min(1.0, (moment_s - start_s) / (end_s - start_s))

        return wall_s

    def issue(self, event: Event, ready: Moment) -> Moment:
        """Issue a message and record which of issue, lane and input came last."""
        now_s, lane = self.now_s, event.lane
        free_s = self.lanes_s[lane]
        done_s, number = Rank.issue(self, event, ready)
        self.started_s[-1], self.done_s[-1] = now_s, done_s
        # A message without bytes takes no lane and leaves no span.
        if not event.seconds:
            return done_s, number
        if lane < 0:
            lane = self.sending
        # Issue, free lane or ready input: the latest of the three is the cause.
        start_s, after = ready
        if free_s >= start_s:
            start_s, after = free_s, self.newest[lane]
        if now_s >= start_s:
            start_s, after = now_s, self.newest[COMPUTE]
        return done_s, self._add(lane, start_s, done_s, event.message, after)

    def pass_pieces(self, event: Event) -> None:
        """Record when the lane of the medium passes the pieces of an event, and the wait for it."""
        free_s, now_s = self.slots.ring.busy_s, self.now_s
        self.wait((self.slots.passed_s(event.stream, now_s), self.newest[COMPUTE]), WAIT)
        # What is read ahead for this event has passed with those before it, and what passes now is for those behind.
        if event.stream.number:
            self._add(
                below_lane(self.program, self.program.plan.keep.optimizer),
                max(free_s, now_s),
                self.slots.ring.busy_s,
                MessageClass.KEEP_WRITE,
                self.newest[COMPUTE],
            )

    def updated_on_cores(self, event: Event, begin_s: float, there: Moment) -> Moment:
        lane, done_s = below_lane(self.program, CORES), self.slots.cores_s
        after = self.newest[COMPUTE]
        for number in (there[1], self.newest[lane]):
            if number >= 0 and self.spans[number][2] >= max(begin_s, self.now_s):
                after = number
        return done_s, self._add(lane, begin_s, done_s, event.category, after)

    def read_below(self, state: str, seconds: float, ready: Moment) -> Moment:
        done_s, _ = Rank.read_below(self, state, seconds, ready)
        return self._moved(state, done_s, seconds, 0, ready[1])

    def write_below(self, state: str, seconds: float, ready: Moment) -> Moment:
        done_s, _ = Rank.write_below(self, state, seconds, ready)
        return self._moved(state, done_s, seconds, 1, ready[1])

    def _moved(self, state: str, done_s: float, seconds: float, way: int, ready: int) -> Moment:
        message = (ROWS if state == TABLE else STATES)[way]
        lane = below_lane(self.program, getattr(self.program.plan.keep, state))
        start_s, after = done_s - seconds, self.newest[COMPUTE]
        # Its cause is the later of its input and the span before it in its direction, unless both end before its issue.
        for number in (ready, self.passed.get((lane, message), -1)):
            if number >= 0 and self.spans[number][2] >= max(start_s, self.now_s) * _NEARLY:
                after = number
        self.passed[lane, message] = self._add(lane, start_s, done_s, message, after)
        return done_s, self.passed[lane, message]

    def note(self, event: Event) -> None:
        self.issued[event.op, event.block] = self.position

    def part(self, event: Event, part: Event) -> None:
        # A part belongs to the instruction that issued it, whatever the position of its gap.
        here, newest = self.position, (self.started_s[-1], self.done_s[-1])
        self.position = self.issued[event.op, event.block]
        Rank.part(self, event, part)
        self.done_s[self.position] = self.done_s[-1]
        if self.position != here:
            self.started_s[-1], self.done_s[-1] = newest
        self.position = here

    def exchange(self, event: Event) -> None:
        """Wait for an exchange with another stage, which takes no lane."""
        done_s = self.now_s + event.seconds
        number = self._add(self.sending, self.now_s, done_s, event.message, self.newest[COMPUTE])
        self.wait((done_s, number), event.category)

    def wait(self, moment: Moment, category: str) -> None:
        # A cause on another stage is set by the pipeline and holds for one wait.
        (stage, after), self.cause = self.cause or (-1, moment[1]), None
        start_s = self.now_s
        if moment[0] <= start_s:
            return
        before_s = self.time_s.get(category, 0.0)
        Rank.wait(self, moment, category)
        if self.stops:
            self._halted(start_s, self.time_s[category] - before_s)
        self._add(COMPUTE, start_s, self.now_s, category, after, stage)

    def compute(self, event: Event) -> None:
        time_s, category, start_s = self.time_s, event.category, self.now_s
        before_s = time_s[category]
        Rank.compute(self, event)
        taken_s, now_s = time_s[category] - before_s, self.now_s
        if self.stops:
            self._halted(start_s, taken_s)
        # Seconds beyond the instruction's own are the slow-down by messages.
        self.longer_s += taken_s - event.seconds
        self.started_s[-1], self.done_s[-1] = start_s, now_s
        # As `_add`; most spans are of computing.
        newest, spans = self.newest, self.spans
        spans.append((COMPUTE, start_s, now_s, self.position, category, newest[COMPUTE], -1))
        newest[COMPUTE] = len(spans) - 1

    def play_steps(self, event: Event) -> None:
        # A pass spans its first compute to its last step.
        started_s = self.started_s[-1]
        Rank.play_steps(self, event)
        self.started_s[-1], self.done_s[-1] = started_s, self.now_s

    def _halted(self, start_s: float, taken_s: float) -> None:
        longer_s = taken_s - (self.now_s - start_s)
        if self.now_s > start_s and longer_s > 0.0:
            self.halts.append((start_s, self.now_s, longer_s))

    def inside(self, category: str, seconds: float) -> None:
        start_s = self.now_s
        Rank.inside(self, category, seconds)
        if self.stops:
            self._halted(start_s, seconds)
        self.done_s[-1] = self.now_s
        self._add(COMPUTE, start_s, self.now_s, category, self.newest[COMPUTE])

    def _add(self, lane: int, start_s: float, end_s: float, category: str, after: int, stage: int = -1) -> int:
        spans = self.spans
        self.newest[lane] = number = len(spans)
        spans.append((lane, start_s, end_s, self.position, category, after, stage))
        return number
