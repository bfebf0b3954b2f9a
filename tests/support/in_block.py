"""The order in which a rank issued the messages inside its blocks, against the blocks' own programs."""

from collections.abc import Iterator

from terrace.program.block_program.steps import Await, BlockStep, Compute, Gap, Send
from terrace.program.instruction import Instruction, Op
from terrace.program.program import Program
from terrace.runtime.engine import Engine


def record_in_block(engine: Engine) -> list[BlockStep]:
    """Steps that the in-block axes of an engine issue from now on; they share one lane."""
    recording: list[BlockStep] = []
    for axis in engine.axes:
        axis.in_block.recording = recording
    return recording


def complaint(program: Program, recording: list[BlockStep], num_steps: int) -> str:
    """The first step that was issued in another order than in the blocks' programs; empty where none was."""
    if program.plan.balance == "cost":  # the messages of attention depend on the batch
        return ""
    expected = list(issued(program)) * num_steps
    if recording == expected:
        return ""
    index = next((i for i, (a, b) in enumerate(zip(recording, expected, strict=False)) if a != b), -1)
    return (
        f"{len(recording)} steps inside blocks, {len(expected)} in their programs; step {index} of them: "
        f"{recording[index : index + 3]} issued, {expected[index : index + 3]} expected"
    )


def issued(program: Program) -> Iterator[BlockStep]:
    """Steps inside blocks of a rank's whole program, in order, without the work that hides them."""
    received = {
        (each.backward, each.block + (-1 if each.backward else 1), each.micro)
        for each in program.instructions
        if each.op is Op.RECV
    }
    for instruction in program.instructions:
        if (read := _reads(instruction)) in received and read is not None:
            backward, block, _ = read
            gathers = program.model.edge_behind(block + (1 if backward else -1), backward=backward).gathers
            if gathers is not None:
                send = Send((gathers,))  # parts of an activation of another stage
                yield from (send, Await(send))
        if instruction.block >= 0:
            for step in program.model.block_program(instruction.block).steps(instruction.op):
                yield _plain(step)


def _reads(instruction: Instruction) -> tuple[bool, int, int] | None:
    if instruction.op is Op.FORWARD:
        return False, instruction.block, instruction.micro
    if instruction.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        return True, instruction.block, instruction.micro
    return None


def _plain(step: BlockStep) -> BlockStep:
    if isinstance(step, Compute | Gap):
        return step
    return Send(step.messages) if isinstance(step, Send) else Await(Send(step.send.messages))
