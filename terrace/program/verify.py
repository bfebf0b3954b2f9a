"""The verifier: a program is checked before it runs.

`verify` walks one rank's instructions and raises `ProgramError` naming the rank, the position, the instruction and the
rule; terrace.program.verify_ranks compares ranks. What is legal is declared in two tables: `SPECS`
(terrace.program.instruction) has the fields and phases of every op, `RULES` (terrace.program.rules) everything else.
In short:

 1. every micro-batch passes every block of the stage forward exactly once and, in a training program, backward exactly
    once, whole or in two halves, in dependency order; inputs from another stage are received before, and outputs for
    one are sent after;
 2. a block's parameters, and the tied ones, are gathered before use, not gathered twice, used, and freed;
 3. every gradient is reduced once per unit of micro-batches, after a unit of complete backwards and before the next
    one is complete; then added to the gradient of another stage which holds the block, and synchronised once;
 4. the end of a step runs once, in order, on every trainable block: COUNT, CLIP, ORTHOGONALISE, UPDATE, exchanges of
    islands, REFRESH;
 5. parts of a REDUCE or SYNC in gaps leave in the next pass, which has gaps (terrace.program.gaps);
 6. an input that is kept below the device is written after its forward, and read back before its backward;
 7. the model state fits the device.

Tests hold the bytes and the memory of programs to closed formulas of their plans.
"""

from collections.abc import Iterator

from terrace.base.errors import ProgramError
from terrace.plan.stage import SHORT
from terrace.program.instruction import SPECS, Instruction, Op, Phase
from terrace.program.program import Program
from terrace.program.rules import OF_OP, OF_OP_IN_GAPS
from terrace.program.verify_repeating import Marks, marks
from terrace.program.walk import Walk


def verify(program: Program, rank: int = 0) -> None:
    """Check one rank's program; raises `ProgramError` at the first broken rule."""
    if not _recurs(program, rank):
        program = program.whole()
        _walk(program, rank)
    needed, device = sum(program.state_bytes.values()), program.cluster.device
    if needed > device.usable_bytes:
        raise ProgramError(
            f"rank {rank}: the model state needs {needed / 1e9:.3g} GB a rank, and a plan may take {device.room_words} "
            "of the device: place states further out, or use a device with more memory"
        )
    _check_below(program, rank)


def _check_below(program: Program, rank: int) -> None:
    for name, resting in program.resting_bytes.items():
        medium = program.cluster.device.below[name]
        if resting > medium.share_bytes:
            raise ProgramError(
                f"rank {rank} keeps {resting / 1e9:.3g} GB on the {name}, and a device's share of it is "
                f"{medium.share_bytes / 1e9:.3g} GB: shard states over more ranks, store narrow optimizer_states, or "
                f"give device.below.{name}.memory_bytes more"
            )


def _recurs(program: Program, rank: int) -> bool:
    found = marks(program)
    try:
        return found is not None and _walk(program.short, rank, found)
    except ProgramError:
        # Positions and micro-batches of an error are those of the whole program.
        return False


def _walk(program: Program, rank: int, found: Marks | None = None) -> bool:
    """Raise at the first broken rule. Returns whether the states at the `ends` of the marks are equal."""
    walk, states, ends = Walk(program), [], found.ends if found else {}
    declared: set[tuple[object, ...]] = set()  # instructions, but for their micro-batch, that their op declares
    for position, now in enumerate(program.instructions):
        if position in ends:
            states.append(walk.state(ends[position], found.least if found else 0))
        form = (*now[:2], now.micro == -1, *now[3:])
        broken = "" if form in declared else _undeclared(program, now)
        declared.add(form)
        broken = broken or _broken(walk, now)
        if broken:
            raise ProgramError(f"rank {rank}, instruction {position} `{now}`: {broken}")
        walk.take(now)
    for broken in _unfinished(walk):
        raise ProgramError(f"rank {rank}, end of the program: {broken}")
    return len(states) == SHORT and states[0] == states[1]


_DEFAULTS = Instruction._field_defaults
_PHASES = {
    Phase.TRAIN: "trains",
    Phase.FORWARD: "runs forwards alone",
    Phase.OUTER: "exchanges changes of parameters alone",
    Phase.RESTORE: "refreshes parameters alone",
}


def _undeclared(program: Program, now: Instruction) -> str:
    """What an instruction has against the declaration of its op (`SPECS`)."""
    spec = SPECS[now.op]
    for name, default in _DEFAULTS.items():
        if name not in spec.fields and getattr(now, name) != default:
            return f"{now.op.value} does not use `{name}`, which is {getattr(now, name)!r}"
    if program.phase not in spec.phases or (now.backward and not program.trains):
        return f"the program {_PHASES[program.phase]}"
    if "block" in spec.fields and not 0 <= now.block < len(program.blocks):
        return f"there is no block {now.block}"
    return ""


def _broken(walk: Walk, now: Instruction) -> str:
    of_op = OF_OP_IN_GAPS if walk.has_gaps or now.in_gaps else OF_OP
    for _, words, broken in of_op[now.op]:
        found = broken(walk, now)
        if found is not None and found is not False:
            return words.format(found)
    return ""


def _unfinished(walk: Walk) -> Iterator[str]:
    """What is missing at the end of a program."""
    program, stage = walk.program, walk.program.stage
    if walk.waiting:
        yield f"parts of `{walk.waiting[0]}` never leave"
    for block in sorted(block for block in walk.resident if walk.frees[block]):
        yield f"block {block} is still gathered at the end: FREE it"
    for block in stage.held:
        if program.trains and block in walk.trainable and walk.reductions[block] != walk.num_units:
            yield f"block {block} is reduced {walk.reductions[block]} times, not {walk.num_units}"
    for wanted in _wanted(walk):
        if wanted[:4] not in walk.done:
            yield f"`{wanted}` never happens"
    # An unread message would occupy a receive buffer and shift every later message of its channel.
    for _, block, _ in sorted(walk.received - walk.read):
        yield f"the message of block {block}, which is on another stage, is received and never read"
    for backward, block, _ in sorted(walk.outgoing):
        for micro in range(program.num_micros):
            if (Op.SEND, block, micro, backward) not in walk.done:
                what = "gradient of the input" if backward else "output"
                yield f"the {what} of block {block}, micro-batch {micro}, is never sent"


def _wanted(walk: Walk) -> Iterator[Instruction]:
    program, stage = walk.program, walk.program.stage
    passes = [(block, micro) for block in stage.own for micro in range(program.num_micros)]
    for each in passes:
        yield Instruction(Op.FORWARD, *each)
    if program.trains:
        for each in passes:
            # Of a backward in two halves, the second completes the gradient.
            yield Instruction(Op.BACKWARD_WEIGHT if walk.has(Op.BACKWARD_INPUT, *each) else Op.BACKWARD, *each)
        if walk.counted:
            yield Instruction(Op.COUNT)
    for block in stage.held:
        if block in walk.trainable:
            yield from (Instruction(op, block) for op, spec in SPECS.items() if program.phase in spec.of_each_block)
            if block in walk.starts:
                yield Instruction(Op.OUTER_START, block)
            if block in walk.applies:
                yield Instruction(Op.OUTER_APPLY, block)
                yield Instruction(Op.REFRESH, block)
    if program.phase in (Phase.TRAIN, Phase.FORWARD):
        yield Instruction(Op.CLIP)
