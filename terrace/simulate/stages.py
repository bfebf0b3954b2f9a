"""Event simulation of a pipeline: the programs of all stages, played together.

Each stage is a rank with the clocks of terrace.simulate.events. One of its data and tensor ranks stands for all, since
they run the same program at the same time. Between stages

    a message leaves at its SEND, after the rank's earlier messages, and a pass that reads it waits for it;
    TIE ends for both stages at the same time, CLIP for all;

and waits are `wait pipeline`, `wait tie` or `wait control`. The reported step starts where the step before it
ends (terrace.simulate.events).
"""

from collections import defaultdict, deque
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from terrace.base.collection import no_collection
from terrace.base.errors import ProgramError
from terrace.plan.wire import MessageClass
from terrace.program.instruction import Instruction
from terrace.program.recording import COMPUTE, Recording
from terrace.program.report import StepReport
from terrace.simulate.cost import Costs
from terrace.simulate.events import drain, price_distinct
from terrace.simulate.moves import Channels, Reader, Role, passes_of
from terrace.simulate.priced_instruction import Event
from terrace.simulate.rank import Passes, Rank
from terrace.simulate.recording import Recorder, record

if TYPE_CHECKING:
    from terrace.program.program import Program

WAIT_PIPELINE = f"wait {MessageClass.PIPELINE.value}"

_Place = tuple[str, int]  # where stages meet: its word, and the tied block


class Passed(NamedTuple):
    """A pass of a stage's step: start and end in seconds from the step's start."""

    instruction: Instruction
    start_s: float
    end_s: float


class StagesStep(NamedTuple):
    """A steady step of every stage: its report, and its passes in order."""

    reports: list[StepReport]
    passes: list[list[Passed]]


def simulate_stages(programs: "Sequence[Program]", costs: Sequence[Costs]) -> StagesStep:
    """Predicted step of a pipeline, from the program and the costs of every stage, with the times of its passes.

    Linear in the number of instructions. Raises `ProgramError` if stages deadlock.
    """
    with no_collection():
        pipeline = Pipeline(programs, costs, _Noting)
        stages = zip(programs, pipeline.run(), strict=True)
        return StagesStep([program.report(time_s) for program, time_s in stages], pipeline.noted())


def stages_seconds(programs: "Sequence[Program]", costs: Sequence[Costs]) -> list[dict[str, float]]:
    """Seconds by category, as in `simulate_stages`, in less time."""
    return Pipeline(programs, costs).run()


def record_stages(programs: "Sequence[Program]", costs: Sequence[Costs]) -> list[Recording]:
    """Recordings of a steady step, one per stage; their reports equal the reports of `simulate_stages`.

    Without a pipeline, the one recording of `record`.
    """
    if len(programs) == 1:
        return [record(programs[0], costs[0])]
    with no_collection():
        pipeline = Pipeline(programs, costs, Recorder)
        pipeline.run()
        return pipeline.recordings()


def record_stage(programs: "Sequence[Program]", costs: Sequence[Costs], stage: int) -> Recording:
    """The recording of one stage as in `record_stages`, in less time; its spans name no causes on other stages."""
    if len(programs) == 1:
        return record(programs[0], costs[0])
    with no_collection():
        pipeline = Pipeline(programs, costs, Recorder, only=stage)
        pipeline.run()
        (found,) = pipeline.recordings()
        return found


class _Noting(Rank):
    """A rank that records when each pass of a step begins and ends, in wall time."""

    __slots__ = ("begun_s", "ends_s", "notes", "starts_s")

    def __init__(self, program: "Program") -> None:
        super().__init__(program)
        self.begun_s, self.notes = 0.0, False
        self.starts_s: list[float] = []
        self.ends_s: list[float] = []

    def run_all(self, passes: Passes) -> None:
        number, plays = 0, passes.plays
        is_alone = len(plays) == 1
        if not self.notes:
            if is_alone:
                act, event = plays[0]
                act(self, event)
            else:
                super().run_all(passes)
            return
        begun_s, spent_s = self.begun_s, self.time_s.values()
        while number < len(plays) and (is_alone or self.is_held(passes)):
            self.starts_s.append(begun_s + sum(spent_s))
            act, event = plays[number]
            act(self, event)
            self.ends_s.append(begun_s + sum(spent_s))
            number += 1
        if number < len(plays):
            self._note_sums(passes.behind(number))

    def _note_sums(self, passes: Passes) -> None:
        time_s = self.time_s
        for category in passes.by_category:
            time_s[category] += 0.0
        seconds, places = list(time_s.values()), {category: place for place, category in enumerate(time_s)}
        walls_s = [self.begun_s + sum(seconds)]
        for _, event in passes.plays:
            seconds[places[event.category]] += event.seconds
            for category, each in event.inside:
                seconds[places[category]] += each
            walls_s.append(self.begun_s + sum(seconds))
        self.starts_s += walls_s[:-1]
        self.ends_s += walls_s[1:]
        super().run_all(passes)


class _Clock(NamedTuple):
    """Messages and meeting points that stages share, and the stages that wait for them."""

    arrived_s: dict[int, float]  # of every message
    met_s: dict[_Place, dict[int, tuple[float, int]]]  # where stages meet: when each came, its last span
    spans: dict[int, tuple[int, int]]  # where stages are recorded: (sender, span) of every message
    readers: dict[int, int]  # the stage that waits for a message
    waiting: dict[int, int | tuple[str, int]]  # the message that a stage waits for, or a place and how many meet there
    ready: deque[int]  # stages that can go on


class Pipeline:
    """The programs of all stages and the clocks of their ranks: `rank`s, with `only` of that stage alone."""

    def __init__(
        self, programs: "Sequence[Program]", costs: Sequence[Costs], rank: type[Rank] = Rank, only: int | None = None
    ) -> None:
        self.programs = programs
        kinds = [rank if only in (None, index) else Rank for index in range(len(programs))]
        self.ranks = [kind(program) for kind, program in zip(kinds, programs, strict=True)]
        self.begun_s = [0.0] * len(programs)  # the wall's time at which each stage began its step
        self.channels, self.drains = Channels(programs), costs[0].drains
        self.moves = []
        for program, cost, kind in zip(programs, costs, kinds, strict=True):
            # Every instruction is recorded.
            act = None if kind is Recorder else kind.run_all
            self.moves.append(Reader(program, price_distinct(program, cost), self.channels, act).moves())

    def run(self) -> list[dict[str, float]]:
        for is_last in (False, True):
            for index, rank in enumerate(self.ranks):
                # A stage's categories cover its step, so their sum is where its next step begins.
                self.begun_s[index] += sum(rank.time_s.values())
                rank.time_s = defaultdict(float)
                if isinstance(rank, Recorder):
                    rank.restart()
                elif isinstance(rank, _Noting):
                    rank.begun_s, rank.notes = self.begun_s[index], is_last
                if is_last and self.drains:
                    drain(rank)
            self.step(is_end=not is_last)
        return [dict(rank.time_s) for rank in self.ranks]

    def noted(self) -> list[list[Passed]]:
        """Passes of every stage's last step, relative to the start of the first stage."""
        first_s, found = min(self.begun_s), []
        for program, rank in zip(self.programs, self.ranks, strict=True):
            assert isinstance(rank, _Noting), "only these know when passes ran"
            each = zip(passes_of(program), rank.starts_s, rank.ends_s, strict=True)
            found.append([Passed(now, start_s - first_s, end_s - first_s) for now, start_s, end_s in each])
        return found

    def recordings(self) -> list[Recording]:
        first_s, found = min(self.begun_s), []
        for rank, begun_s in zip(self.ranks, self.begun_s, strict=True):
            if isinstance(rank, Recorder):
                found.append(rank.recording(begun_s - first_s))
        return found

    def step(self, *, is_end: bool = False) -> None:
        """Play the programs once; with `is_end`, only what follows CLIP. The caller resets all clocks."""
        clock = _Clock({}, defaultdict(dict), {}, {}, {}, deque(range(len(self.programs))))
        # Stages are coroutines: each runs until it needs a message that has not been sent yet.
        running = [self._stage(index, clock, is_end=is_end) for index in range(len(self.programs))]
        while clock.ready:
            next(running[clock.ready.popleft()], None)
        if clock.waiting:
            words = (f"stage {stage} {self._words(reason)}" for stage, reason in sorted(clock.waiting.items()))
            raise ProgramError(f"the stages wait in a circle: {'; '.join(words)}")

    def _stage(self, index: int, clock: _Clock, *, is_end: bool) -> Generator[None, None, None]:
        rank = self.ranks[index]
        recorder, stops = rank if isinstance(rank, Recorder) else None, rank.stops
        arrived_s, readers, begun_s, spent_s = clock.arrived_s, clock.readers, self.begun_s[index], rank.time_s.values()
        moves, begin = self.moves[index], 0
        if is_end:  # all of a program without CLIP
            begin = 1 + max([position for position, move in enumerate(moves) if move[0] is Role.CLIP], default=-1)
        for position, (role, act, event, message) in enumerate(moves[begin:], begin):
            if recorder is not None:
                recorder.begin(position)
            if role is Role.ALONE:
                act(rank, event)
            elif role is Role.READ:
                if message not in arrived_s:
                    readers[message], clock.waiting[index] = index, message
                    yield
                if recorder is not None:
                    recorder.cause = clock.spans.get(message)
                left_s = arrived_s[message] - (begun_s + sum(spent_s))
                if left_s > 0.0:
                    rank.wait((rank.now_s + (rank.clock_s(left_s) if stops else left_s), -1), WAIT_PIPELINE)
                elif recorder is not None:
                    # No wait came, so its cause must not stick to the next one.
                    recorder.cause = None
                act(rank, event)
            elif role is Role.SEND:
                assert isinstance(event, Event), "only passes are joined"
                done_s, number = rank.issue(event, (0.0, -1))
                if recorder is not None:
                    # A message without bytes has no span: its sender's compute is the cause.
                    clock.spans[message] = (index, number if number >= 0 else recorder.newest[COMPUTE])
                left_s = done_s - rank.now_s
                arrived_s[message] = begun_s + sum(spent_s) + (rank.wall_s(left_s) if stops else left_s)
                if message in readers:
                    self._resume(readers.pop(message), clock)
            else:
                assert isinstance(event, Event), "only passes are joined"
                rank.settle()
                if role is Role.TIE:
                    # Both holders of the tied block continue together.
                    yield from self._meet(index, clock, ("tie", event.block), 2, event.category)
                    rank.exchange(event)
                else:
                    yield from self._meet(index, clock, ("clip", -1), len(self.programs), event.category)
                    act(rank, event)

    def _words(self, reason: int | tuple[str, int]) -> str:
        if isinstance(reason, int):
            return f"for {self.channels.words(reason)}"
        return f"in {reason[0]} for {reason[1]} stages to come"

    def _resume(self, index: int, clock: _Clock) -> None:
        del clock.waiting[index]
        clock.ready.append(index)

    def _meet(
        self, index: int, clock: _Clock, place: _Place, number: int, category: str
    ) -> Generator[None, None, None]:
        rank, met_s = self.ranks[index], clock.met_s[place]
        newest = rank.newest[COMPUTE] if isinstance(rank, Recorder) else -1
        met_s[index] = self._now_s(index), newest
        if len(met_s) < number:
            clock.waiting[index] = place[0], number
            yield
        else:
            for other in met_s:
                if other != index:
                    self._resume(other, clock)
        # All continue when the last one arrives.
        (moment_s, newest), latest = max((there, stage) for stage, there in met_s.items())
        if isinstance(rank, Recorder):
            rank.cause = (latest, newest)
        self._wait_until(index, moment_s, category)

    def _now_s(self, index: int) -> float:
        return self.begun_s[index] + sum(self.ranks[index].time_s.values())

    def _wait_until(self, index: int, moment_s: float, category: str) -> None:
        rank, left_s = self.ranks[index], moment_s - self._now_s(index)
        if left_s > 0.0:
            rank.wait((rank.now_s + rank.clock_s(left_s), -1), category)
        elif isinstance(rank, Recorder):
            # No wait came, so its cause must not stick to the next one.
            rank.cause = None
