"""The moves of a stage in a step, in order: alone, after a message, or together with other stages.

A stage repeats a few bodies of instructions (terrace.program.segments), so each body is parsed once for all
micro-batches.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from terrace.program.instruction import PASSES, Instruction, Op
from terrace.simulate.priced_instruction import Event
from terrace.simulate.rank import Act, Passes, Play, Rank

if TYPE_CHECKING:
    from terrace.program.program import Program


class Role(IntEnum):
    ALONE = 0
    READ = 1  # passes that wait for a message
    SEND = 2
    TIE = 3
    CLIP = 4


_ROLES = {Op.SEND: Role.SEND, Op.TIE: Role.TIE, Op.CLIP: Role.CLIP}
StageMove = tuple[Role, Act, Event | Passes, int]  # with the number of the message that is sent or waited for


class Channel(NamedTuple):
    """Messages between two stages that differ only in their micro-batch."""

    sender: int
    receiver: int
    is_gradient: bool
    block: int


class Channels:
    """Numbering of the messages of all stages."""

    def __init__(self, programs: "Sequence[Program]") -> None:
        self._numbers: dict[Channel, int] = {}
        # Greater than any micro-batch index in an instruction.
        self.size = 1 + max([program.segments.last_micro for program in programs], default=0)

    def first(self, channel: Channel) -> int:
        """Number of the message of micro-batch 0; later micro-batches follow consecutively."""
        return self._numbers.setdefault(channel, len(self._numbers)) * self.size

    def words(self, message: int) -> str:
        number, micro = divmod(message, self.size)
        sender, _, is_gradient, block = list(self._numbers)[number]
        return f"the {'gradient' if is_gradient else 'output'} of b{block}, micro-batch {micro}, from stage {sender}"


class _Step(NamedTuple):
    """An element of a body, with the numbers, at micro-batch 0, of its message and of the receive it waits for; -1
    for none.
    """

    role: Role | None  # None: a receive
    act: Act
    event: Event | Passes
    message: int = -1
    read: int = -1


class Reader:
    """Parser of the moves of a stage.

    `act` merges consecutive passes into one move; without it every instruction is its own move.
    """

    def __init__(self, program: "Program", plays: Sequence[Play], channels: Channels, act: Act | None) -> None:
        self.program, self.plays, self.channels, self.act = program, plays, channels, act
        self.index = program.stage.index
        received = dict.fromkeys(
            (each.backward, each.block) for each in program.segments.folded.distinct if each.op is Op.RECV
        )
        self.received = {of: number * channels.size for number, of in enumerate(received)}

    def moves(self) -> list[StageMove]:
        folded, segments = self.program.segments.folded, self.program.segments
        bodies = [
            self._steps(instructions, numbers)
            for instructions, numbers in zip(segments.bodies, folded.bodies, strict=True)
        ]
        found: list[StageMove] = []
        unread: dict[int, int] = {}
        for body, micro in segments.order:
            for role, act, event, message, read in bodies[body]:
                if role is None:
                    unread[read + micro] = message + micro
                    if self.act is None:
                        found.append((Role.ALONE, act, event, -1))
                elif role is Role.READ:
                    waited = unread.pop(read + micro, -1)
                    found.append((Role.ALONE if waited < 0 else role, act, event, waited))
                else:
                    found.append((role, act, event, message + micro))
        return found

    def _steps(self, instructions: Sequence[Instruction], numbers: Sequence[int]) -> list[_Step]:
        found: list[_Step] = []
        joined: list[Play] = []
        read = -1
        # A body that never runs has no numbers.
        for instruction, number in zip(instructions, numbers, strict=False):
            is_pass, (act, event) = instruction.op in PASSES, self.plays[number]
            if self.act is not None and is_pass:
                reads = self._read(instruction)
                # Merged passes wait for a message only before the first of them.
                if joined and reads >= 0:
                    found.append(self._joined(joined, read))
                    joined = []
                read = read if joined else reads
                joined.append((act, event))
                continue
            step = self._step(instruction, number)
            if self.act is not None and step.role is Role.ALONE and act is Rank.nothing:
                continue
            if joined:
                found.append(self._joined(joined, read))
                joined = []
            found.append(step)
        return [*found, self._joined(joined, read)] if joined else found

    def _step(self, instruction: Instruction, number: int) -> _Step:
        op, block, micro, backward, _, peer, _ = instruction
        act, event = self.plays[number]
        if op is Op.SEND:
            return _Step(Role.SEND, act, event, self.channels.first(Channel(self.index, peer, backward, block)) + micro)
        if op is Op.RECV:
            message = self.channels.first(Channel(peer, self.index, backward, block)) + micro
            return _Step(None, act, event, message, self.received[backward, block] + micro)
        read = self._read(instruction) if op in PASSES else -1
        return _Step(_ROLES.get(op, Role.ALONE) if read < 0 else Role.READ, act, event, read=read)

    def _joined(self, plays: Sequence[Play], read: int) -> _Step:
        assert self.act is not None, "every instruction is a move"
        role = Role.ALONE if read < 0 else Role.READ
        # Most bodies of a deep pipeline are one pass, which is run directly unless notes are taken.
        act, event = plays[0] if len(plays) == 1 and self.act is Rank.run_all else (self.act, Passes(plays))
        return _Step(role, act, event, read=read)

    def _read(self, instruction: Instruction) -> int:
        """The receive that a pass may wait for."""
        op, block, micro, *_ = instruction
        # Weight gradients read what their stage has kept.
        if op is Op.BACKWARD_WEIGHT:
            return -1
        # A forward reads the output of the block before, a backward the gradient of the block after.
        backward = op is not Op.FORWARD
        first = self.received.get((backward, block + (1 if backward else -1)))
        return -1 if first is None else first + micro


def passes_of(program: "Program") -> list[Instruction]:
    segments = program.segments
    bodies = [[each for each in body if each.op in PASSES] for body in segments.bodies]
    return [each.later(micro) for body, micro in segments.order for each in bodies[body]]
