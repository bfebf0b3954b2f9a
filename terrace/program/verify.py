"""The verifier: a program is checked before it runs.

`verify` walks one rank's instructions and raises `ProgramError` naming the rank, the position, the
instruction and the rule; terrace.program.verify_ranks compares ranks. The rules:

 1. every (block, micro-batch) runs forward exactly once and backward exactly once, in dependency order;
 2. a block's parameters, and those it borrows, are gathered before use, not gathered twice, used, and freed;
 3. a gather from the secondary copy comes after one from the primary copy;
 4. every gradient is reduced exactly once per unit of micro-batches, after the unit's last backward and
    before the next unit's first; synchronised once, after its last reduction; CLIP once, after every SYNC;
    UPDATE then REFRESH once for each block, after CLIP;
 5. an instruction sets only the fields its op uses;
 6. the program sends exactly the bytes that the plan declares, never holds more gathered blocks than the
    memory formula counts, and the model state fits the device.
"""

from collections import defaultdict
from dataclasses import dataclass, field, fields
from functools import cached_property

from terrace.base.errors import ProgramError
from terrace.plan import MessageClass, step_bytes
from terrace.plan.layout import DEVICE
from terrace.plan.memory import model_state_bytes
from terrace.plan.residency import units
from terrace.plan.wire import FORMATS
from terrace.program.instruction import COLLECTIVES, Instruction, Op
from terrace.program.program import Program


def verify(program: Program, rank: int = 0) -> None:
    """Check one rank's program; raises `ProgramError` at the first broken rule."""
    walker = _Walker(program, rank)
    for position, instruction in enumerate(program.instructions):
        walker.step(position, instruction)
    walker.finish()
    _check_bytes(program, rank)
    memory = model_state_bytes(program.cluster, program.plan, program.blocks, program.num_micros, program.sequence)
    held = walker.peak_resident * FORMATS[program.plan.compute].element_bytes
    if held > memory["gathered"]:
        raise ProgramError(
            f"rank {rank}: {held} bytes of gathered blocks are held at once, but the memory formula counts "
            f"{memory['gathered']}: FREE blocks earlier or GATHER them later"
        )
    needed, limit = sum(memory.values()), program.cluster.device.memory_bytes
    if needed > limit:
        raise ProgramError(
            f"rank {rank}: the model state needs {needed / 1e9:.3g} GB a rank but the device has {limit / 1e9:.3g} GB: "
            "place states further out, or use a device with more memory"
        )


def _check_bytes(program: Program, rank: int) -> None:
    sent: dict[tuple[MessageClass, str], int] = defaultdict(int)
    for instruction in program.instructions:
        if instruction.op in COLLECTIVES:
            for tier, num_bytes in program.sends(instruction):
                sent[program.message(instruction), program.layout.tiers[tier]] += num_bytes
        elif instruction.op in (Op.FORWARD, Op.BACKWARD):
            for message in program.inside(instruction):
                for tier, num_bytes in program.tensor.sends(message):
                    sent[MessageClass.TENSOR, program.layout.tiers[tier]] += num_bytes
    declared = step_bytes(program.cluster, program.plan, program.blocks, program.num_micros, program.sequence)
    for key in sorted(sent.keys() | declared.keys()):
        if sent.get(key, 0) != declared.get(key, 0):
            raise ProgramError(
                f"rank {rank}: the program sends {sent.get(key, 0)} bytes of {key[0]} on tier {key[1]!r}, "
                f"but the plan declares {declared.get(key, 0)}"
            )


# The fields an op uses; a SEND or RECV uses all but `secondary`.
_FIELDS = {
    Op.GATHER: {"block", "backward", "secondary"},
    Op.FORWARD: {"block", "micro"},
    Op.BACKWARD: {"block", "micro"},
    Op.REDUCE: {"block", "micro"},
    Op.CLIP: set(),
    Op.SEND: {"block", "micro", "backward", "peer"},
    Op.RECV: {"block", "micro", "backward", "peer"},
}


@dataclass
class _Walker:
    """The state of one rank as its instructions are read."""

    program: Program
    rank: int
    position: int = 0
    now: Instruction = field(default_factory=lambda: Instruction(Op.CLIP))
    resident: set[int] = field(default_factory=set)
    opened: set[int] = field(default_factory=set)  # blocks gathered from the primary copy
    received: set[tuple[bool, int, int]] = field(default_factory=set)  # (backward, block, micro)
    unreduced: dict[int, int] = field(default_factory=dict)  # block -> last micro-batch of the unit it holds
    unused: set[int] = field(default_factory=set)  # gathered and not read yet
    peak_resident: int = 0  # most elements of gathered blocks at once
    done: set[Instruction] = field(default_factory=set)

    def step(self, position: int, instruction: Instruction) -> None:
        self.position, self.now = position, instruction
        self._fields(instruction)
        if instruction.op is not Op.CLIP and not 0 <= instruction.block < len(self.program.blocks):
            self._fail(f"there is no block {instruction.block}")
        check = {
            Op.GATHER: self._gather,
            Op.FREE: self._free,
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.REDUCE: self._reduce,
            Op.SYNC: self._sync,
            Op.CLIP: self._clip,
            Op.UPDATE: self._update,
            Op.REFRESH: self._refresh,
            Op.SEND: self._send,
            Op.RECV: self._recv,
        }[instruction.op]
        check(instruction)

    def finish(self) -> None:
        program = self.program
        self.position = len(program.instructions)
        self.now = Instruction(Op.CLIP)
        if self.resident:
            self._fail_end(f"block {min(self.resident)} is still gathered at the end: FREE it")
        micros = range(program.num_micros)
        for block, spec in enumerate(program.blocks):
            wanted = [Instruction(op, block, m) for op in (Op.FORWARD, Op.BACKWARD) for m in micros]
            if spec.num_trainable:
                wanted += [Instruction(Op.REDUCE, block, unit[-1]) for unit in self._units]
                wanted += [Instruction(op, block) for op in (Op.SYNC, Op.UPDATE, Op.REFRESH)]
            for instruction in wanted:
                if instruction not in self.done:
                    self._fail_end(f"`{instruction}` never happens")
        if Instruction(Op.CLIP) not in self.done:
            self._fail_end("`CLIP` never happens")

    def _fields(self, now: Instruction) -> None:
        used = _FIELDS.get(now.op, {"block"})
        for item in fields(now):
            if item.name not in {"op", *used} and getattr(now, item.name) != item.default:
                self._fail(f"{now.op.value} does not use `{item.name}`, which is {getattr(now, item.name)!r}")

    def _once(self) -> None:
        if self.now in self.done:
            self._fail("it runs twice")
        self.done.add(self.now)

    def _after(self, op: Op, block: int, micro: int = -1) -> None:
        earlier = Instruction(op, block, micro)
        if earlier not in self.done:
            self._fail(f"it needs `{earlier}` before it")

    def _micro(self) -> None:
        if not 0 <= self.now.micro < self.program.num_micros:
            self._fail(f"there is no micro-batch {self.now.micro}")

    @cached_property
    def _units(self) -> list[range]:
        return units(self.program.num_micros, self.program.plan.unit)

    def _unit(self, micro: int) -> range:
        return self._units[micro // self.program.plan.unit]

    def _trains(self) -> None:
        if not self.program.blocks[self.now.block].num_trainable:
            self._fail("the block has nothing to train")

    def _needs_parameters(self, block: int) -> None:
        if self.program.layout.params == DEVICE:
            return
        for needed in (block, *self.program.blocks[block].borrows):
            if needed not in self.resident:
                self._fail(f"the parameters of block {needed} are not gathered")
            self.unused.discard(needed)

    def _gather(self, now: Instruction) -> None:
        if self.program.layout.params == DEVICE:
            self._fail("the parameters are replicated: there is nothing to gather")
        if now.block in self.resident:
            self._fail("the block is already gathered")
        if now.secondary and not self.program.has_secondary:
            self._fail("the plan keeps no secondary copy")
        if now.secondary and now.block not in self.opened:
            self._fail("the secondary copy is only written by a gather from the primary copy")
        if not now.secondary:
            self.opened.add(now.block)
        if Instruction(Op.UPDATE, now.block) in self.done:
            self._fail("the parameters are being updated")
        self.resident.add(now.block)
        self.unused.add(now.block)
        held = sum(flat.padded for block in self.resident for flat in self.program.flats[block])
        self.peak_resident = max(self.peak_resident, held)

    def _free(self, now: Instruction) -> None:
        if now.block not in self.resident:
            self._fail("the block is not gathered")
        if now.block in self.unused:
            self._fail("the block is gathered for nothing: no instruction read it")
        self.resident.remove(now.block)

    def _forward(self, now: Instruction) -> None:
        self._micro()
        self._once()
        self._needs_parameters(now.block)
        if now.block > 0 and (False, now.block - 1, now.micro) not in self.received:
            self._after(Op.FORWARD, now.block - 1, now.micro)

    def _backward(self, now: Instruction) -> None:
        self._micro()
        self._once()
        self._needs_parameters(now.block)
        self._after(Op.FORWARD, now.block, now.micro)
        is_last = now.block == len(self.program.blocks) - 1
        if not is_last and (True, now.block + 1, now.micro) not in self.received:
            self._after(Op.BACKWARD, now.block + 1, now.micro)
        held, last = self.unreduced.get(now.block), self._unit(now.micro)[-1]
        if held not in (None, last):
            self._fail(f"the gradient of the unit that ends with micro-batch {held} is not reduced yet")
        if self.program.blocks[now.block].num_trainable:
            self.unreduced[now.block] = last

    def _reduce(self, now: Instruction) -> None:
        self._micro()
        self._once()
        self._trains()
        unit = self._unit(now.micro)
        if now.micro != unit[-1]:
            self._fail(f"the unit of micro-batch {now.micro} is reduced once, after its last one, {unit[-1]}")
        for micro in unit:
            self._after(Op.BACKWARD, now.block, micro)
        self.unreduced.pop(now.block, None)

    def _sync(self, now: Instruction) -> None:
        self._once()
        self._trains()
        for unit in self._units:
            self._after(Op.REDUCE, now.block, unit[-1])

    def _clip(self, now: Instruction) -> None:
        self._once()
        for block, spec in enumerate(self.program.blocks):
            if spec.num_trainable:
                self._after(Op.SYNC, block)

    def _update(self, now: Instruction) -> None:
        self._once()
        self._trains()
        if Instruction(Op.CLIP) not in self.done:
            self._fail("it needs `CLIP` before it")
        if now.block in self.resident:
            self._fail("the block is still gathered: its full parameters would go stale")

    def _refresh(self, now: Instruction) -> None:
        self._once()
        self._after(Op.UPDATE, now.block)

    def _send(self, now: Instruction) -> None:
        self._once()
        self._after(Op.BACKWARD if now.backward else Op.FORWARD, now.block, now.micro)

    def _recv(self, now: Instruction) -> None:
        self._once()
        self.received.add((now.backward, now.block, now.micro))

    def _fail(self, rule: str) -> None:
        raise ProgramError(f"rank {self.rank}, instruction {self.position} `{self.now}`: {rule}")

    def _fail_end(self, rule: str) -> None:
        raise ProgramError(f"rank {self.rank}, end of the program: {rule}")
