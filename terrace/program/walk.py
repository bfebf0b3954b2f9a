"""A walk over one rank's instructions: the facts about its stage, and what has run so far.

`Walk.take` carries the facts past an instruction. The rules that read them are a table (terrace.program.verify).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property

from terrace.plan.boundaries import MOST_AHEAD
from terrace.plan.counts import counted
from terrace.plan.flats import orthogonalised
from terrace.plan.stage import count_units
from terrace.program.exchange import exchanged
from terrace.program.gaps import has_gaps
from terrace.program.instruction import Instruction, Op, Phase
from terrace.program.program import Program

Key = tuple[Op, int, int, bool]  # op, block, micro-batch, `backward`
Passed = tuple[bool, int, int]  # of a message between stages: whether it is a gradient, block, micro-batch


class Walk:
    """What has run, and the state that later instructions depend on."""

    def __init__(self, program: Program) -> None:
        stage, model = program.stage, program.model
        self.program, self.model = program, model
        self.blocks, self.num_micros, self.unit = program.blocks, program.num_micros, program.plan.unit
        self.num_units = count_units(self.num_micros, self.unit)
        self.phase, self.trains, self.exchange = program.phase, program.trains, program.exchange
        self.layer_wise = program.plan.keep.layer_wise
        self.has_gaps, self.has_secondary = bool(program.plan.gap_shares), program.has_secondary
        self.own, self.held, self.ties = frozenset(stage.own), frozenset(stage.held), dict(stage.ties)
        self.gathers = [model.gathers(block) for block in range(len(self.blocks))]
        self.frees = [model.frees(block) for block in range(len(self.blocks))]
        self.needs = [(index, *block.tied_to) for index, block in enumerate(self.blocks)]
        # An evaluation trains nothing.
        trained = () if program.phase is Phase.FORWARD else enumerate(self.blocks)
        self.trainable = frozenset(index for index, block in trained if block.num_trainable)
        self.starts, self.arrives, self.applies = (
            frozenset(exchanged(program, fragments))
            for fragments in (program.exchange.starts, program.exchange.arrives, program.exchange.applies)
        )
        self.done: set[Key] = set()
        self.waiting: list[Instruction] = []  # in gaps, with parts that have not left
        self.resident: set[int] = set()  # gathered blocks
        self.unused: set[int] = set()  # those that no pass has read yet
        self.opened: set[int] = set()  # blocks gathered from the primary copy
        self.received: set[Passed] = set()
        self.read: set[Passed] = set()  # received messages that a pass has read
        self.finished: Counter[int] = Counter()  # block -> backwards complete since its last reduction
        self.newest: dict[int, int] = {}  # block -> micro-batch that was completed last
        self.reductions: Counter[int] = Counter()  # block -> how often it was reduced
        self.stale: set[int] = set()  # blocks with something to reduce
        self.leaving = model.leaving if program.trains else frozenset[int]()
        self.ahead = 0  # inputs fetched from below the device that no backward has read
        self.most_ahead = MOST_AHEAD + (stage.num_stages > 1)
        self.directions = 0  # layers whose matrices are gathered for the optimizer

    def take(self, now: Instruction) -> None:
        """Go past an instruction, which kept all rules."""
        if self.waiting and has_gaps(self.model, now):
            self.waiting.clear()
        if now.in_gaps:
            self.waiting.append(now)
        self.done.add(now[:4])
        effect = _EFFECTS.get(now.op)
        if effect is not None:
            effect(self, now)

    def state(self, by: int, least: int) -> tuple[object, ...]:
        """State that later instructions depend on, with micro-batches relative to `by`.

        Later instructions name no micro-batch before `least`, relative to `by`.
        """
        due = by + least
        done = (each for each in self.done if each[2] < 0 or each[2] >= due)
        return (
            {(op, block, micro if micro < 0 else micro - by, backward) for op, block, micro, backward in done},
            {(*key[:2], key[2] - by) for key in self.received - self.read if key[2] >= due},
            {block: micro - by for block, micro in self.newest.items()},
            {block: times * self.unit - by for block, times in self.reductions.items()},
            (set(self.resident), set(self.opened), set(self.stale), set(self.unused)),
            (dict(self.finished), self.directions, self.ahead, [each.later(-by) for each in self.waiting]),
        )

    def has(self, op: Op, block: int = -1, micro: int = -1) -> bool:
        return (op, block, micro, False) in self.done

    def missing(self, ops: Sequence[Op], block: int = -1, micro: int = -1) -> Instruction | None:
        """The instruction with the first of `ops`, if it has run with none of them."""
        for op in ops:
            if (op, block, micro, False) in self.done:
                return None
        return Instruction(ops[0], block, micro)

    def has_micro(self, micro: int) -> bool:
        return 0 <= micro < self.num_micros

    def is_read(self, now: Instruction) -> bool:
        """Whether another stage reads the message of a SEND."""
        return (now.backward, now.block, now.peer) in self.outgoing and self.has_micro(now.micro)

    def due(self, block: int) -> int:
        """Number of complete backwards that the next reduction of a block takes."""
        return min(self.unit, self.num_micros - self.reductions[block] * self.unit)

    def is_reduced(self, block: int) -> bool:
        """Whether the last reduction of a block is done."""
        return self.reductions[block] == self.num_units and block not in self.stale

    @cached_property
    def completes(self) -> list[list[int]]:
        """For each block, the trained blocks whose gradient of a micro-batch is complete after its backward."""
        stage = self.program.stage
        # Of several blocks here that are tied to a copy, the first counts its micro-batches, or each would count twice.
        first = {owner: block for block in reversed(stage.own) for owner in self.blocks[block].tied_to}
        found = []
        for index, of_block in enumerate(self.needs):
            copies = (block for block in of_block[1:] if block in stage.copies and first[block] == index)
            found.append([block for block in (index, *copies) if block in self.trainable])
        return found

    @cached_property
    def counted(self) -> tuple[int, ...]:
        """Blocks with routers."""
        return counted(self.blocks, self.program.stage.own)

    @cached_property
    def orthogonalised(self) -> frozenset[int]:
        """Blocks with matrices that the optimizer updates as wholes."""
        return frozenset(orthogonalised(self.program.model.flats, self.program.stage.held))

    @cached_property
    def outgoing(self) -> frozenset[tuple[bool, int, int]]:
        """(Whether it is a gradient, block, peer stage) of the messages that other stages read."""
        stage, edges = self.program.stage, []
        for chunk, onward, back in zip(stage.chunks, stage.onward, stage.back, strict=True):
            edges += [(False, chunk[-1], onward)] if onward is not None else []
            # Evaluation sends no gradients.
            edges += [(True, chunk[0], back)] if back is not None and stage.trains else []
        return frozenset(edges)

    @cached_property
    def incoming(self) -> frozenset[tuple[bool, int, int]]:
        """(Whether it is a gradient, sender's block, peer stage) of the messages that this stage reads."""
        stage, edges = self.program.stage, []
        for chunk, onward, back in zip(stage.chunks, stage.onward, stage.back, strict=True):
            edges += [(True, chunk[-1] + 1, onward)] if onward is not None else []
            edges += [(False, chunk[0] - 1, back)] if back is not None else []
        return frozenset(edges)

    def _gather(self, now: Instruction) -> None:
        self.resident.add(now.block)
        self.unused.add(now.block)
        if not now.secondary:
            self.opened.add(now.block)

    def _free(self, now: Instruction) -> None:
        self.resident.remove(now.block)

    def _pass(self, now: Instruction) -> None:
        backward = now.op is not Op.FORWARD
        key = (backward, now.block + 1 if backward else now.block - 1, now.micro)
        if key in self.received:
            self.read.add(key)
        self.unused.difference_update(self.needs[now.block])
        if backward:
            self.ahead -= now.block in self.leaving
            self._adds(now)

    def _fetch(self, now: Instruction) -> None:
        self.ahead += 1

    def _backward(self, now: Instruction) -> None:
        self._pass(now)
        self._completes(now)

    def _backward_weight(self, now: Instruction) -> None:
        self._adds(now)
        self._completes(now)

    def _adds(self, now: Instruction) -> None:
        # A backward also adds to the gradients of the blocks it is tied to, such as a tied embedding.
        self.stale.update(block for block in self.needs[now.block] if block in self.trainable)

    def _completes(self, now: Instruction) -> None:
        for block in self.needs[now.block]:
            self.newest[block] = now.micro
        for block in self.completes[now.block]:
            self.finished[block] += 1

    def _reduce(self, now: Instruction) -> None:
        self.finished[now.block] -= self.due(now.block)
        self.reductions[now.block] += 1
        self.stale.discard(now.block)

    def _orthogonalise(self, now: Instruction) -> None:
        self.directions += 1

    def _update(self, now: Instruction) -> None:
        self.directions -= now.block in self.orthogonalised

    def _recv(self, now: Instruction) -> None:
        self.received.add((now.backward, now.block, now.micro))


_EFFECTS: dict[Op, Callable[[Walk, Instruction], None]] = {
    Op.GATHER: Walk._gather,
    Op.FREE: Walk._free,
    Op.FORWARD: Walk._pass,
    Op.BACKWARD: Walk._backward,
    Op.BACKWARD_INPUT: Walk._pass,
    Op.BACKWARD_WEIGHT: Walk._backward_weight,
    Op.FETCH: Walk._fetch,
    Op.REDUCE: Walk._reduce,
    Op.ORTHOGONALISE: Walk._orthogonalise,
    Op.UPDATE: Walk._update,
    Op.RECV: Walk._recv,
}
