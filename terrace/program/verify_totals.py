"""Totals of a program, bytes sent and memory held, against the closed formulas of its plan."""

from collections import Counter

from terrace.base.errors import ProgramError
from terrace.plan.memory import model_state_bytes
from terrace.plan.traffic import Bytes, block_bytes, outer_bytes, step_bytes
from terrace.plan.wire import MessageClass
from terrace.program.exchange import exchanged
from terrace.program.phase import Phase
from terrace.program.program import Program


def check_bytes(program: Program, rank: int) -> None:
    """Raise `ProgramError` where the program does not send exactly the bytes that the plan declares."""
    sent = program.sent_bytes
    if program.phase is Phase.FORWARD:  # no closed formula: what is left of a step follows from its residencies
        return
    declared = _declared(program)
    # Both directions: bytes sent but not declared, and declared but not sent.
    for key in sorted(sent.keys() | declared.keys()):
        if sent.get(key, 0) != declared.get(key, 0):
            raise ProgramError(
                f"rank {rank}: the program sends {sent.get(key, 0)} bytes of {key[0]} on tier {key[1]!r}, "
                f"but the plan declares {declared.get(key, 0)}"
            )


def _declared(program: Program) -> Bytes:
    cluster, plan, blocks = program.cluster, program.plan, program.blocks
    exchange, held = program.exchange, program.stage.held
    if program.trains:
        # Without a pipeline the closed formula makes its own stage: an independent count.
        stage = program.stage if program.stage.num_stages > 1 else None
        found = step_bytes(cluster, plan, blocks, program.num_micros, program.sequence, stage)
    else:
        applied = exchanged(program, exchange.applies) if program.phase is Phase.OUTER else held
        found = block_bytes(cluster, plan, blocks, applied, [MessageClass.REFRESH])
    return Counter(found) + Counter(outer_bytes(cluster, plan, blocks, held, exchange))


_HELD = {  # category -> (its name, how to hold less)
    "gathered": ("of gathered blocks", "FREE blocks earlier or GATHER them later"),
    "grads_full": ("of gradients that are not reduced", "REDUCE blocks earlier"),
    "buffers": ("of message buffers", "UPDATE a block before the next ORTHOGONALISE"),
}


def check_memory(program: Program, rank: int) -> None:
    """Raise `ProgramError` where the program keeps more than the memory formula counts, or a device has."""
    held = program.state_bytes
    declared = model_state_bytes(
        program.cluster, program.plan, program.blocks, program.num_micros, program.sequence, program.stage
    )
    # Only these categories depend on the order of instructions; the others follow from the plan.
    for category, (words, fix) in _HELD.items():
        if held[category] > declared[category]:
            raise ProgramError(
                f"rank {rank}: {held[category]} bytes {words} are held at once, but the memory formula counts "
                f"{declared[category]}: {fix}"
            )
    needed, device = sum(held.values()), program.cluster.device
    if needed > device.usable_bytes:
        raise ProgramError(
            f"rank {rank}: the model state needs {needed / 1e9:.3g} GB a rank, and a plan may take {device.room_words} "
            "of the device: place states further out, or use a device with more memory"
        )
