"""Event simulation of a pipeline: the programs of all stages, played together.

Each stage is a rank with the clocks of terrace.simulate.events. One of its data and tensor ranks stands for all, since
they run the same program at the same time. Between stages

    a message leaves at its SEND, after the rank's earlier messages, and a pass that reads it waits for it;
    TIE is left by both stages together, CLIP by all;

and waits are `wait pipeline`, `wait tie` or `wait control`. Two steps are played and the second is reported.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from terrace.base.errors import ProgramError
from terrace.plan.wire import MessageClass
from terrace.program.instruction import PASSES, Instruction, Op
from terrace.program.report import StepReport
from terrace.simulate.cost import Costs
from terrace.simulate.events import Event, Play, Rank, price_distinct
from terrace.simulate.recording import COMPUTE, Recorder, Recording, record

if TYPE_CHECKING:
    from terrace.program.program import Program

WAIT_PIPELINE = f"wait {MessageClass.PIPELINE.value}"

_Key = tuple[int, int, bool, int, int]  # sender, receiver, whether a gradient, block, micro-batch


class Passed(NamedTuple):
    """A pass of a stage's step: when it began and ended, seconds from the step's start."""

    instruction: Instruction
    start_s: float
    end_s: float


class StagesStep(NamedTuple):
    """A steady step of every stage: its report, and its passes in order."""

    reports: list[StepReport]
    passes: list[list[Passed]]


def simulate_stages(programs: "Sequence[Program]", costs: Sequence[Costs]) -> StagesStep:
    """The predicted step of a pipeline, from the program and the costs of every stage, with the times of its passes.

    Linear in the number of instructions. Raises `ProgramError` where stages wait for each other in a circle.
    """
    pipeline = _Pipeline(programs, costs, timed=True)
    stages = zip(programs, pipeline.run(), strict=True)
    return StagesStep([program.report(time_s) for program, time_s in stages], pipeline.noted())


def stages_seconds(programs: "Sequence[Program]", costs: Sequence[Costs]) -> list[dict[str, float]]:
    """The seconds by category of `simulate_stages` alone, in less time."""
    return _Pipeline(programs, costs).run()


def record_stages(programs: "Sequence[Program]", costs: Sequence[Costs]) -> list[Recording]:
    """Recordings of a steady step, one per stage; their reports equal the reports of `simulate_stages`.

    Without a pipeline, the one recording of `record`.
    """
    if len(programs) == 1:
        return [record(programs[0], costs[0])]
    pipeline = _Pipeline(programs, costs, Recorder)
    pipeline.run()
    return pipeline.recordings()


def activation_bytes(program: "Program", by_block: Sequence[tuple[int, int]]) -> int:
    """Peak bytes of activations on a rank, the running block's working memory included.

    `by_block` has (bytes that a forward keeps, bytes that a backward takes on top) for each block and one micro-batch.
    After BACKWARD_INPUT all are taken as still kept: the inputs and output gradients of linear layers are most of them.
    """
    now = most = 0
    for instruction in program.short.instructions:
        if instruction.op in PASSES:
            kept, on_top = by_block[instruction.block]
            if instruction.op is Op.FORWARD:
                now += kept
            most = max(most, now + on_top)
            if instruction.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                now -= kept
    return most


class _Clock(NamedTuple):
    arrived_s: dict[_Key, float]
    met_s: dict[tuple[object, ...], dict[int, tuple[float, int]]]  # where stages meet: when each came, its last span
    spans: dict[_Key, tuple[int, int]]  # where stages are recorded: (sender, span) of every message


class _Role(IntEnum):
    """How an instruction stands to other stages."""

    ALONE = 0
    PASS = 1  # a pass that reads a message, or whose times are noted
    SEND = 2
    TIE = 3
    CLIP = 4


_ROLES = {Op.SEND: _Role.SEND, Op.TIE: _Role.TIE, Op.CLIP: _Role.CLIP}
_MESSAGES = (Op.SEND, Op.RECV)
_Move = tuple[_Role, Callable[[Rank, Event], None], Event, _Key | None]  # with the message that is sent or waited for


class _Pipeline:
    def __init__(
        self, programs: "Sequence[Program]", costs: Sequence[Costs], rank: type[Rank] = Rank, *, timed: bool = False
    ) -> None:
        self.programs = programs
        self.ranks = [rank(program) for program in programs]
        self.begun_s = [0.0] * len(programs)  # the wall's time at which each stage began its step
        self.passes: list[list[tuple[int, float, float]]] = [[] for _ in programs]  # position, start and end
        self.timed = timed  # whether passes are noted
        # Positions count where passes are noted or recorded; otherwise what does nothing is left out.
        self.everything = timed or rank is Recorder
        # A step is played twice, so what its instructions wait for is found once.
        self.moves = [
            self._moves(program, price_distinct(program, cost)) for program, cost in zip(programs, costs, strict=True)
        ]

    def _moves(self, program: "Program", plays: Sequence[Play]) -> list[_Move]:
        distinct, places = program.folded
        roles = [self._role(each) for each in distinct]
        received = {(each.backward, each.block) for each in distinct if each.op is Op.RECV}
        reads = [_reads(each) for each in distinct]
        # Most instructions neither send nor wait for other stages: all equal ones are one move.
        alone: list[_Move | None] = [
            None if each.op in _MESSAGES or of in received else (role, *play, None)
            for each, role, of, play in zip(distinct, roles, reads, plays, strict=True)
        ]
        found: list[_Move] = []
        index, read = program.stage.index, dict[tuple[bool, int, int], int]()
        for instruction, number in zip(program.instructions, places, strict=True):
            move = alone[number]
            if move is None:
                op, block, micro, backward, _, peer = instruction
                role, message = roles[number], None
                if op is Op.SEND:
                    message = (index, peer, backward, block, micro)
                elif op is Op.RECV:
                    read[backward, block, micro] = peer
                elif (of := reads[number]) is not None and (key := (*of, micro)) in read:
                    role, message = _Role.PASS, (read.pop(key), index, *key)
                move = (role, *plays[number], message)
            if self.everything or move[0] is not _Role.ALONE or move[1] is not Rank.nothing:
                found.append(move)
        return found

    def _role(self, instruction: Instruction) -> _Role:
        return _Role.PASS if self.timed and instruction.op in PASSES else _ROLES.get(instruction.op, _Role.ALONE)

    def run(self) -> list[dict[str, float]]:
        for _ in range(2):
            for index, rank in enumerate(self.ranks):
                # A stage's categories cover its step, so their sum is where its next step begins.
                self.begun_s[index] += sum(rank.time_s.values())
                rank.time_s = defaultdict(float)
                if isinstance(rank, Recorder):
                    rank.restart()
                self.passes[index] = []
            self._step()
        return [dict(rank.time_s) for rank in self.ranks]

    def noted(self) -> list[list[Passed]]:
        """The passes of every stage's last step, from the start of the first stage's."""
        first_s = min(self.begun_s)
        return [
            [
                Passed(program.instructions[position], start_s - first_s, end_s - first_s)
                for position, start_s, end_s in passed
            ]
            for program, passed in zip(self.programs, self.passes, strict=True)
        ]

    def recordings(self) -> list[Recording]:
        """The recording of every stage's last step."""
        first_s, found = min(self.begun_s), []
        for rank, begun_s in zip(self.ranks, self.begun_s, strict=True):
            assert isinstance(rank, Recorder), "only recorders have recordings"
            found.append(rank.recording(begun_s - first_s))
        return found

    def _step(self) -> None:
        clock = _Clock({}, defaultdict(dict), {})
        # Stages are coroutines: each runs until it needs a message that has not been sent yet.
        running = {index: self._stage(index, clock) for index in range(len(self.programs))}
        waiting: dict[int, object] = {}
        while running:
            before = dict(waiting)
            for index in list(running):
                if index in waiting and not self._is_there(waiting[index], clock):
                    continue
                waiting.pop(index, None)
                reason = next(running[index], None)
                if reason is None:
                    running.pop(index)
                else:
                    waiting[index] = reason
            # A round without progress: nobody can ever send the missing message.
            if waiting == before and running:
                raise ProgramError(f"the stages wait in a circle: {'; '.join(_words(waiting))}")

    def _is_there(self, reason: object, clock: _Clock) -> bool:
        assert isinstance(reason, tuple), "a stage waits for a message or for others"
        if reason[0] == "meet":
            return bool(len(clock.met_s[reason[1]]) == reason[2])
        return reason in clock.arrived_s

    def _stage(self, index: int, clock: _Clock) -> Generator[object, None, None]:
        rank, passes, timed = self.ranks[index], self.passes[index], self.timed
        recorder = rank if isinstance(rank, Recorder) else None
        for position, (role, act, event, message) in enumerate(self.moves[index]):
            if recorder is not None:
                recorder.begin(position)
            if role is _Role.ALONE:
                act(rank, event)
            elif role is _Role.PASS:
                if message is not None:
                    if message not in clock.arrived_s:
                        yield message
                    if recorder is not None:
                        recorder.cause = clock.spans[message]
                    self._wait_until(index, clock.arrived_s[message], WAIT_PIPELINE)
                if timed:
                    start_s = self._now_s(index)
                    act(rank, event)
                    passes.append((position, start_s, self._now_s(index)))
                else:
                    act(rank, event)
            elif role is _Role.SEND:
                assert message is not None, "a SEND leaves a message"
                done_s, number = rank.issue(event, (0.0, -1))
                if recorder is not None:
                    # A message without bytes has no span: its sender's computing is the cause.
                    clock.spans[message] = (index, number if number >= 0 else recorder.newest[COMPUTE])
                clock.arrived_s[message] = self._now_s(index) + done_s - rank.now_s
            elif role is _Role.TIE:
                rank.settle()
                # Both holders of the tied block leave together.
                yield from self._meet(index, clock, ("tie", event.block), 2, event.category)
                rank.exchange(event)
            else:
                rank.settle()
                yield from self._meet(index, clock, ("clip",), len(self.programs), event.category)
                act(rank, event)

    def _meet(
        self, index: int, clock: _Clock, place: tuple[object, ...], number: int, category: str
    ) -> Generator[object, None, None]:
        rank = self.ranks[index]
        newest = rank.newest[COMPUTE] if isinstance(rank, Recorder) else -1
        clock.met_s[place][index] = self._now_s(index), newest
        if len(clock.met_s[place]) < number:
            yield ("meet", place, number)
        # All leave when the last one has come.
        (moment_s, newest), latest = max((there, stage) for stage, there in clock.met_s[place].items())
        if isinstance(rank, Recorder):
            rank.cause = (latest, newest)
        self._wait_until(index, moment_s, category)

    def _now_s(self, index: int) -> float:
        return self.begun_s[index] + sum(self.ranks[index].time_s.values())

    def _wait_until(self, index: int, moment_s: float, category: str) -> None:
        rank, left_s = self.ranks[index], moment_s - self._now_s(index)
        if left_s > 0.0:
            rank.wait((rank.now_s + left_s, -1), category)
        elif isinstance(rank, Recorder):
            # No wait came, so its cause must not stick to the next one.
            rank.cause = None


def _reads(instruction: Instruction) -> tuple[bool, int] | None:
    """(Whether a gradient, block) of the message that a pass may read."""
    if instruction.op not in PASSES or instruction.op is Op.BACKWARD_WEIGHT:
        return None
    # A forward reads the output of the block before, a backward the gradient of the block after.
    backward = instruction.op is not Op.FORWARD
    return backward, instruction.block + (1 if backward else -1)


def _words(waiting: Mapping[int, object]) -> Iterator[str]:
    for stage, reason in waiting.items():
        assert isinstance(reason, tuple), "a stage waits for a message or for others"
        if reason[0] == "meet":
            yield f"stage {stage} in {reason[1][0]} for {reason[2]} stages to come"
        else:
            sender, _, is_gradient, block, micro = reason
            what = "gradient" if is_gradient else "output"
            yield f"stage {stage} for the {what} of b{block}, micro-batch {micro}, from stage {sender}"
