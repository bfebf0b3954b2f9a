"""What a program sends and keeps in all, held against the closed formulas of its plan."""

from terrace.base.errors import ProgramError
from terrace.plan import step_bytes
from terrace.plan.memory import accumulates_in_place
from terrace.plan.wire import FORMATS
from terrace.program.instruction import PASSES, Op
from terrace.program.program import Program


def check_bytes(program: Program, rank: int) -> None:
    """Raise `ProgramError` where the program does not send exactly the bytes that the plan declares."""
    sent = program.sent_bytes
    stage = program.stage if program.stage.num_stages > 1 else None
    declared = step_bytes(program.cluster, program.plan, program.blocks, program.num_micros, program.sequence, stage)
    for key in sorted(sent.keys() | declared.keys()):
        if sent.get(key, 0) != declared.get(key, 0):
            raise ProgramError(
                f"rank {rank}: the program sends {sent.get(key, 0)} bytes of {key[0]} on tier {key[1]!r}, "
                f"but the plan declares {declared.get(key, 0)}"
            )


def check_memory(program: Program, rank: int, peak_resident: int) -> None:
    """Raise `ProgramError` where the program keeps more than the memory formula counts, or a device has.

    `peak_resident` is the most elements of gathered blocks that the program holds at once.
    """
    memory, element_bytes = program.state_bytes, FORMATS[program.plan.compute].element_bytes
    held = peak_resident * element_bytes
    if held > memory["gathered"]:
        raise ProgramError(
            f"rank {rank}: {held} bytes of gathered blocks are held at once, but the memory formula counts "
            f"{memory['gathered']}: FREE blocks earlier or GATHER them later"
        )
    held = _peak_gradients(program) * element_bytes
    if held > memory["grads_full"]:
        raise ProgramError(
            f"rank {rank}: {held} bytes of gradients that are not reduced are held at once, but the memory formula "
            f"counts {memory['grads_full']}: REDUCE blocks earlier"
        )
    needed, limit = sum(memory.values()), program.cluster.device.memory_bytes
    if needed > limit:
        raise ProgramError(
            f"rank {rank}: the model state needs {needed / 1e9:.3g} GB a rank but the device has {limit / 1e9:.3g} GB: "
            "place states further out, or use a device with more memory"
        )


def _peak_gradients(program: Program) -> int:
    """Return the most elements of gradient buffers at once: open ones, and those on their way to be reduced.

    A backward that opens one waits for all reductions but the newest, a TIE for all.
    """
    buffered = [
        sum(flat.padded for flat in parts if flat.trainable and not accumulates_in_place(program.plan, flat.layout))
        for parts in program.flats
    ]
    opened: dict[int, int] = {}
    in_flight: list[int] = []
    peak = 0
    for instruction in program.instructions:
        op, block = instruction.op, instruction.block
        if op in PASSES and op is not Op.FORWARD:
            for needed in (block, *program.blocks[block].borrows):
                if buffered[needed] and needed not in opened:
                    in_flight = in_flight[-1:]
                    opened[needed] = buffered[needed]
                    peak = max(peak, sum(in_flight) + sum(opened.values()))
        elif op is Op.REDUCE and block in opened:
            in_flight.append(opened.pop(block))
        elif op is Op.TIE:
            in_flight.clear()
    return peak
