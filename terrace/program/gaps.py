"""Which gradient messages are sent in gaps, and the resulting order of all messages on lanes.

A REDUCE or SYNC is in gaps if
- it uses a lane of routed rows (or, for a SYNC, if its REDUCE is in gaps); and
- the next pass is a backward, with gaps, of the previous block: until its end nothing else waits for a lane.

Only `BETWEEN` instructions come before that pass; a GATHER among them overtakes the queued parts. The choice is part of
the program (`Instruction.in_gaps`), so all ranks of a lane issue the same order.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

from terrace.base.errors import PlanError
from terrace.plan.layout import INSIDE, Layout
from terrace.plan.plan import Plan
from terrace.plan.stage import Group, Pass, Stage
from terrace.plan.wire import MessageClass
from terrace.program.block_program.steps import Gap, Send
from terrace.program.instruction import COLLECTIVES, PASSES, Instruction, Op

if TYPE_CHECKING:
    from terrace.program.program import Program
    from terrace.program.sharded_model import ShardedModel

T = TypeVar("T")


class Held(Generic[T]):
    """Messages with unsent parts, in the order of issue, as verifier, simulator and runtime keep them.

    Part 0 of a REDUCE or SYNC in gaps is sent where it is issued, part g in gap g of the backward that follows.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[tuple[T, int, int]] = []  # (message, next part, number of parts)

    def hold(self, message: T, num_parts: int) -> None:
        """Queue a message; `due` returns its parts."""
        self._waiting.append((message, 0, num_parts))

    def due(self, gap: int) -> list[tuple[T, int]]:
        """Remove and return the unsent (message, part) pairs up to gap `gap`, in sending order."""
        waiting = self._waiting
        self._waiting = [(message, gap + 1, parts) for message, _, parts in waiting if parts > gap + 1]
        return [
            (message, part)
            for part in range(min((left for _, left, _ in waiting), default=gap), gap + 1)
            for message, left, parts in waiting
            if left <= part < parts
        ]

    def rest(self) -> list[tuple[T, int]]:
        """Remove and return all unsent parts."""
        return self.due(max((parts for _, _, parts in self._waiting), default=0))


_CLASSES = {Op.REDUCE: MessageClass.REDUCE, Op.SYNC: MessageClass.SYNC}
BETWEEN = frozenset((Op.GATHER, Op.FREE, Op.FETCH, Op.REDUCE, Op.SYNC, Op.SEND, Op.RECV))


def may_be_in_gaps(model: "ShardedModel", op: Op, block: int) -> bool:
    """Whether a REDUCE or SYNC of `block` is sent in parts if a backward with gaps follows."""
    if not model.plan.gap_shares:
        return False
    message, lanes = model.message_of_block(_CLASSES[op], block), model.routed.lanes
    if message.sends and message.lane in lanes:
        return True
    return bool(message.sends) and op is Op.SYNC and may_be_in_gaps(model, Op.REDUCE, block)


def has_gaps(model: "ShardedModel", instruction: Instruction) -> bool:
    if not model.plan.gap_shares or instruction.op not in PASSES:
        return False
    steps = model.block_program(instruction.block).routed_steps(instruction.op)
    return any(isinstance(step, Gap) for step in steps)


def before_gaps(model: "ShardedModel", stage: Stage) -> frozenset[int]:
    """Indexes of the passes that are followed by a backward with gaps for their gradients."""
    if not model.plan.gap_shares:
        return frozenset()
    found = set[int]()
    gaps = {block: has_gaps(model, Instruction(Op.BACKWARD, block)) for block in stage.own}
    before: tuple[Group, int] | None = None
    for number, (group, _, block) in enumerate(stage.passes()):
        # In a pipeline, the chunk that follows a chunk varies within a step. Inside a chunk the order is fixed, so that
        # error feedback residuals always belong to the same part.
        if before is not None and (group is before[0] or stage.num_stages == 1):
            follows = before[0].pass_ is Pass.BACKWARD and group.pass_ is Pass.BACKWARD and block == before[1] - 1
            if follows and gaps[block]:
                found.add(number - 1)
        before = group, block
    return frozenset(found)


def refuse_open_shares(plan: Plan) -> None:
    """Raise `PlanError` if `expert_gaps` is still "auto"."""
    if plan.expert_gaps == "auto":
        raise PlanError('expert_gaps = "auto": a program needs shares in numbers, such as [0, 0.3, 0.7]; give them')


def no_gaps() -> PlanError:
    """The error for a plan with `expert_gaps` whose programs have no message in gaps."""
    return PlanError(
        "expert_gaps has no effect: behind no REDUCE or SYNC the next pass is a whole backward of a layer with "
        "experts; leave it out"
    )


class Issued:
    """Lists the collectives of a program on tier lanes; call `at` with its instructions in order."""

    def __init__(self, program: "Program") -> None:
        self._program, self._held = program, Held[Instruction]()

    def at(self, instruction: Instruction) -> Iterator[tuple[Instruction, int, Layout]]:
        """(Owning instruction, tier, ranks) of each collective issued at the next instruction, `instruction`."""
        program = self._program
        if instruction.op in COLLECTIVES:
            if instruction.in_gaps:
                self._held.hold(instruction, len(program.message(instruction).parts))
                yield from self._due(0)
            else:
                yield from ((instruction, *each) for each in program.message(instruction).collectives)
        elif instruction.op in PASSES and program.model.routed.transfers:
            messages = iter(program.messages_inside(instruction))
            for step in program.model.block_program(instruction.block).steps(instruction.op):
                if isinstance(step, Gap):
                    yield from self._due(step.number)
                for message in islice(messages, len(step.messages)) if isinstance(step, Send) else ():
                    if message.lane != INSIDE:
                        yield from ((instruction, *each) for each in message.collectives)

    def rest(self) -> Iterator[tuple[Instruction, int, Layout]]:
        """Collectives of all unsent parts."""
        return self._of(self._held.rest())

    def _due(self, gap: int) -> Iterator[tuple[Instruction, int, Layout]]:
        return self._of(self._held.due(gap))

    def _of(self, parts: Sequence[tuple[Instruction, int]]) -> Iterator[tuple[Instruction, int, Layout]]:
        for instruction, part in parts:
            yield from ((instruction, *each) for each in self._program.message(instruction).parts[part].collectives)


def meets(program: "Program", instruction: Instruction) -> list[tuple[int, Layout]]:
    """(Tier, ranks) of all collectives of an instruction on tier lanes, including parts sent in gaps."""
    issued = Issued(program)
    return [(tier, ranks) for _, tier, ranks in (*issued.at(instruction), *issued.rest())]
