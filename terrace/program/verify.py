"""The verifier: a program is checked before it runs.

`verify` walks one rank's instructions and raises `ProgramError` naming the rank, the position, the instruction and the
rule; terrace.program.verify_ranks compares ranks. The rules:

 1. every micro-batch passes every block of the stage forward exactly once and, in a training program, backward exactly
    once, whole or in two halves, in dependency order; inputs from another stage are received before, and outputs for
    one are sent after; a program of another phase has only the ops of its phase (terrace.program.phase);
 2. a block's parameters, and the tied ones, are gathered before use, not gathered twice, used, and freed;
 3. a gather from the secondary copy comes after one from the primary copy;
 4. every gradient is reduced once per unit of micro-batches, each time after another unit of complete backwards and
    before the next unit is complete, the last time after every backward that adds to it; then added to the gradient of
    the other stage which holds the block, if one does; synchronised once; COUNT once, after every forward, where the
    stage has routers; CLIP once, after COUNT and every SYNC; ORTHOGONALISE, where the optimizer needs whole
    matrices, UPDATE, REFRESH once for each block; a restoring program has a REFRESH of each block; an exchange of
    islands has an OUTER_COUNT, then an OUTER_START of each block that starts, after its UPDATE and after the
    OUTER_APPLY of its last exchange; an OUTER_APPLY of each block that arrives or is waited for, then its REFRESH;
 5. an instruction sets only the fields its op uses; parts of a REDUCE or SYNC in gaps are held for the next pass, which
    has gaps, and for one REDUCE at a time, since there are two gradient buffers (terrace.program.gaps);
 6. the model state fits the device.

Tests hold the bytes and the memory of programs to closed formulas of their plans.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from terrace.base.errors import ProgramError
from terrace.plan.stage import SHORT
from terrace.program.instruction import SPECS, Instruction, Op
from terrace.program.phase import FOR_EACH_BLOCK, PHASE_OPS, Phase
from terrace.program.program import Program
from terrace.program.verify_exchange import ExchangeWalk
from terrace.program.verify_repeating import Marks, marks


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


def _recurs(program: Program, rank: int) -> bool:
    found = marks(program)
    try:
        return found is not None and _walk(program.short, rank, found)
    except ProgramError:
        # Positions and micro-batches of an error are those of the whole program.
        return False


def _walk(program: Program, rank: int, found: Marks | None = None) -> bool:
    """Raise at the first broken rule. Returns whether the states at the `ends` of the marks are equal."""
    walker, states, ends = _Walker(program, rank), [], found.ends if found else {}
    for position, instruction in enumerate(program.instructions):
        if found and position in ends:
            states.append(walker.state(ends[position], found.least))
        walker.step(position, instruction)
    walker.finish()
    return len(states) == SHORT and states[0] == states[1]


_WORDS = {
    Phase.TRAIN: "trains",
    Phase.FORWARD: "runs forwards alone",
    Phase.OUTER: "exchanges changes of parameters alone",
    Phase.RESTORE: "refreshes parameters alone",
}


@dataclass
class _Walker(ExchangeWalk):
    resident: set[int] = field(default_factory=set)
    opened: set[int] = field(default_factory=set)  # blocks gathered from the primary copy
    received: set[tuple[bool, int, int]] = field(default_factory=set)  # (backward, block, micro)
    read: set[tuple[bool, int, int]] = field(default_factory=set)  # those that were read
    sent: set[tuple[bool, int, int]] = field(default_factory=set)
    finished: Counter[int] = field(default_factory=Counter)  # block -> backwards complete since its last reduction
    newest: dict[int, int] = field(default_factory=dict)  # block -> micro-batch that was completed last
    reductions: Counter[int] = field(default_factory=Counter)  # block -> how often it was reduced
    stale: set[int] = field(default_factory=set)  # blocks with something to reduce
    tied: set[int] = field(default_factory=set)
    unused: set[int] = field(default_factory=set)  # gathered and not read yet
    directions: int = 0  # layers whose matrices are gathered for the optimizer

    def step(self, position: int, instruction: Instruction) -> None:
        self.position, self.now = position, instruction
        self._fields(instruction)
        phase = self.program.phase
        if instruction.op not in PHASE_OPS[phase] or (instruction.backward and phase is not Phase.TRAIN):
            self._fail(f"the program {_WORDS[phase]}")
        if "block" in SPECS[instruction.op].fields and not 0 <= instruction.block < len(self.program.blocks):
            self._fail(f"there is no block {instruction.block}")
        self._gaps(instruction)
        # All other rules are the same wherever its parts leave.
        self.now = instruction._replace(in_gaps=False) if instruction.in_gaps else instruction
        self._checks[instruction.op](self.now)

    @cached_property
    def _checks(self) -> dict[Op, Callable[[Instruction], None]]:
        return {
            Op.GATHER: self._gather,
            Op.FREE: self._free,
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.TIE: self._tie,
            Op.REDUCE: self._reduce,
            Op.SYNC: self._sync,
            Op.COUNT: self._count,
            Op.CLIP: self._clip,
            Op.ORTHOGONALISE: self._orthogonalise,
            Op.UPDATE: self._update,
            Op.REFRESH: self._refresh,
            Op.OUTER_COUNT: self._outer_count,
            Op.OUTER_START: self._outer_start,
            Op.OUTER_APPLY: self._outer_apply,
            Op.SEND: self._send,
            Op.RECV: self._recv,
        }

    @cached_property
    def _gathers(self) -> list[bool]:
        return [self.program.gathers(block) for block in range(len(self.program.blocks))]

    def state(self, by: int, least: int) -> tuple[object, ...]:
        """Verifier state that later instructions read, with micro-batches relative to `by`.

        Later instructions name no micro-batch before `least`, relative to `by`.
        """
        due = by + least
        return (
            {each.later(-by) for each in self.done if each.micro < 0 or each.micro >= due},
            {(*key[:2], key[2] - by) for key in self.received - self.read if key[2] >= due},
            {block: micro - by for block, micro in self.newest.items()},
            {block: times * self.program.plan.unit - by for block, times in self.reductions.items()},
            (set(self.resident), set(self.opened), set(self.stale), set(self.tied), set(self.unused)),
            (dict(self.finished), self.directions, [each.later(-by) for each in self.held]),
        )

    def finish(self) -> None:
        program = self.program
        self.position = len(program.instructions)
        self.now = Instruction(Op.CLIP)
        if self.held:
            self._fail_end(f"parts of `{self.held[0]}` never leave")
        left = {block for block in self.resident if program.frees(block)}
        if left:
            self._fail_end(f"block {min(left)} is still gathered at the end: FREE it")
        passes = [(block, micro) for block in program.stage.own for micro in range(program.num_micros)]
        wanted = [Instruction(Op.FORWARD, *each) for each in passes]
        if program.trains:
            wanted += [Instruction(self._backward_of(*each), *each) for each in passes]
            wanted += [Instruction(Op.COUNT)] if self._counted else []
        for block in program.stage.held:
            if block in self._trainable:
                wanted += [Instruction(op, block) for op in FOR_EACH_BLOCK[program.phase]]
                wanted += [Instruction(op, block) for op in self.exchanged_in(block)]
                if program.trains and self.reductions[block] != self._num_units:
                    self._fail_end(f"block {block} is reduced {self.reductions[block]} times, not {self._num_units}")
        for instruction in wanted:
            if instruction not in self.done:
                self._fail_end(f"`{instruction}` never happens")
        # An unread message would occupy a receive buffer and shift every later message of its channel.
        unused = self.received - self.read
        if unused:
            self._fail_end(
                f"the message of block {min(unused)[1]}, which is on another stage, is received and never read"
            )
        unsent = {(backward, block, micro) for backward, block, micro, _ in self._outgoing} - self.sent
        if unsent:
            backward, block, micro = min(unsent)
            what = "gradient of the input" if backward else "output"
            self._fail_end(f"the {what} of block {block}, micro-batch {micro}, is never sent")
        if Op.CLIP in PHASE_OPS[program.phase] and Instruction(Op.CLIP) not in self.done:
            self._fail_end("`CLIP` never happens")

    def _needs_parameters(self, block: int) -> None:
        # A tied block's parameters are read too, as a tied head reads the embedding.
        for needed in (block, *self.program.blocks[block].tied_to):
            if self._gathers[needed] and needed not in self.resident:
                self._fail(f"the parameters of block {needed} are not gathered")
            self.unused.discard(needed)

    def _gather(self, now: Instruction) -> None:
        if not self._gathers[now.block]:
            self._fail("the parameters are whole on every rank: there is nothing to gather")
        if now.block in self.resident:
            self._fail("the block is already gathered")
        if now.secondary and not self.program.has_secondary:
            self._fail("the plan keeps no secondary copy")
        if now.secondary and now.block not in self.opened:
            self._fail("the secondary copy is only written by a gather from the primary copy")
        if not now.secondary:
            self.opened.add(now.block)
        # The gather could read half-updated slices.
        if Instruction(Op.UPDATE, now.block) in self.done:
            self._fail("the parameters are being updated")
        self.resident.add(now.block)
        self.unused.add(now.block)

    def _free(self, now: Instruction) -> None:
        if now.block not in self.resident:
            self._fail("the block is not gathered")
        if not self.program.frees(now.block):
            self._fail("its secondary copy is whole and stays")
        if now.block in self.unused:
            self._fail("the block is gathered for nothing: no instruction read it")
        self.resident.remove(now.block)

    def _forward(self, now: Instruction) -> None:
        self._micro()
        self._once()
        self._runs_here()
        self._needs_parameters(now.block)
        # The input comes from another stage by message or from this one by an earlier forward.
        if now.block > 0 and not self._takes(False, now.block - 1):
            self._comes_here(now.block - 1)
            self._after(Op.FORWARD, now.block - 1, now.micro)

    def _backward(self, now: Instruction) -> None:
        self._micro()
        self._once()
        self._runs_here()
        twin = Op.BACKWARD_INPUT if now.op is Op.BACKWARD else Op.BACKWARD
        if Instruction(twin, now.block, now.micro) in self.done:
            self._fail("the backward of this micro-batch has run")
        self._needs_parameters(now.block)
        self._after(Op.FORWARD, now.block, now.micro)
        # The last block starts from the loss and needs no gradient.
        is_last = now.block == len(self.program.blocks) - 1
        if not is_last and not self._takes(True, now.block + 1):
            whole, half = (Instruction(op, now.block + 1, now.micro) for op in (Op.BACKWARD, Op.BACKWARD_INPUT))
            self._comes_here(now.block + 1)
            if whole not in self.done and half not in self.done:
                self._fail(f"it needs `{whole}` before it")
        self._adds(now)
        if now.op is Op.BACKWARD:
            self._completes(now)

    def _backward_weight(self, now: Instruction) -> None:
        self._micro()
        self._once()
        self._runs_here()
        self._after(Op.BACKWARD_INPUT, now.block, now.micro)
        self._adds(now)
        self._completes(now)

    def _takes(self, backward: bool, block: int) -> bool:
        """Whether the input of `now` was received; marks it as read."""
        key = (backward, block, self.now.micro)
        if key in self.received:
            self.read.add(key)
            return True
        return False

    def _comes_here(self, block: int) -> None:
        if block not in self.program.stage.own:
            self._fail(f"it needs the result of block {block}, which is on another stage: RECV it before")

    def _adds(self, now: Instruction) -> None:
        for block in (now.block, *self.program.blocks[now.block].tied_to):
            # A later gradient would be lost: the optimizer only sees the synchronised sum.
            if Instruction(Op.SYNC, block) in self.done:
                self._fail(f"the gradient of block {block} is synchronised already")
            if block in self._trainable:
                self.stale.add(block)

    def _completes(self, now: Instruction) -> None:
        tied = self.program.blocks[now.block].tied_to
        for block in (now.block, *tied):
            self.newest[block] = now.micro
        # A copy counts the backwards of its first user only, or it would count each micro-batch twice.
        for block in (now.block, *(block for block in tied if self._first_user.get(block) == now.block)):
            if block not in self._trainable:
                continue
            # The next unit's gradient would be added before this one's reduction took it.
            if self.finished[block] >= self.program.plan.unit:
                self._fail(f"a unit of {self.program.plan.unit} micro-batches of block {block} is not reduced yet")
            self.finished[block] += 1

    def _reduce(self, now: Instruction) -> None:
        self._micro()
        self._once()
        self._holds()
        self._trains()
        self.reductions[now.block] += 1
        left = self.program.num_micros - (self.reductions[now.block] - 1) * self.program.plan.unit
        needed = min(self.program.plan.unit, left)
        if self.finished[now.block] < needed:
            self._fail(f"it needs {needed} more complete backwards of its block, there are {self.finished[now.block]}")
        if now.micro != self.newest[now.block]:
            self._fail(f"the newest micro-batch whose gradient is complete is {self.newest[now.block]}: say so")
        self.finished[now.block] -= needed
        self.stale.discard(now.block)

    def _tie(self, now: Instruction) -> None:
        self._once()
        self._trains()
        if (now.block, now.peer) not in self.program.stage.ties:
            self._fail(f"stage {now.peer} holds no copy of the block")
        self._reduced()
        self.tied.add(now.block)

    def _sync(self, now: Instruction) -> None:
        self._once()
        self._holds()
        self._trains()
        self._reduced()
        if now.block in dict(self.program.stage.ties) and now.block not in self.tied:
            self._fail("the gradient that another stage has of this block is not added yet: TIE it before")

    def _reduced(self) -> None:
        if self.reductions[self.now.block] != self._num_units or self.now.block in self.stale:
            self._fail(f"it comes after the last of the block's {self._num_units} reductions")

    def _count(self, now: Instruction) -> None:
        self._once()
        if not self._counted:
            self._fail("no block of the stage has a router")
        for block in self._counted:
            for micro in range(self.program.num_micros):
                self._after(Op.FORWARD, block, micro)

    def _clip(self, now: Instruction) -> None:
        self._once()
        if self.program.trains and self._counted and Instruction(Op.COUNT) not in self.done:
            self._fail("it needs `COUNT` before it")
        for block in self.program.stage.held:
            if block in self._trainable:
                self._after(Op.SYNC, block)

    def _orthogonalise(self, now: Instruction) -> None:
        self._once()
        if now.block not in self._orthogonalised:
            self._fail("the block has no matrices that the optimizer updates as wholes")
        if Instruction(Op.CLIP) not in self.done:
            self._fail("it needs `CLIP` before it")
        self.directions += 1
        # One layer is updated while the next is gathered.
        if self.directions > 2:
            self._fail("the whole matrices of two layers are held already")

    def _update(self, now: Instruction) -> None:
        self._once()
        self._trains()
        if Instruction(Op.CLIP) not in self.done:
            self._fail("it needs `CLIP` before it")
        if now.block in self._orthogonalised:
            self._after(Op.ORTHOGONALISE, now.block)
            self.directions -= 1
        if now.block in self.resident and self.program.frees(now.block):
            self._fail("the block is still gathered: its full parameters would go stale")

    def _send(self, now: Instruction) -> None:
        self._once()
        if (now.backward, now.block, now.micro, now.peer) not in self._outgoing:
            self._fail(f"stage {now.peer} does not read it")
        # Input gradients are ready after the first half of a split backward.
        made = (Op.BACKWARD, Op.BACKWARD_INPUT) if now.backward else (Op.FORWARD,)
        if not any(Instruction(op, now.block, now.micro) in self.done for op in made):
            self._fail(f"it needs `{Instruction(made[0], now.block, now.micro)}` before it")
        self.sent.add((now.backward, now.block, now.micro))

    def _recv(self, now: Instruction) -> None:
        self._once()
        if now.block in self.program.stage.own:
            self._fail(f"block {now.block} runs on this stage")
        if (now.backward, now.block, now.peer) not in self._incoming:
            self._fail(f"stage {now.peer} makes nothing of it that this stage reads")
        self.received.add((now.backward, now.block, now.micro))
