"""A walk over one rank's instructions: the position, what has run, and facts about the stage that rules read."""

from dataclasses import dataclass, field
from functools import cached_property

from terrace.base.errors import ProgramError
from terrace.plan.counts import counted
from terrace.plan.flats import orthogonalised
from terrace.plan.stage import count_units
from terrace.program.gaps import BETWEEN, has_gaps, may_be_in_gaps
from terrace.program.instruction import SPECS, Instruction, Op
from terrace.program.phase import Phase
from terrace.program.program import Program

_DEFAULTS = Instruction._field_defaults
_UNUSED = {op: [name for name in _DEFAULTS if name not in spec.fields] for op, spec in SPECS.items()}


@dataclass
class Walk:
    """State of a walk that all rules share; for the rules of each op see terrace.program.verify."""

    program: Program
    rank: int
    position: int = 0
    now: Instruction = field(default_factory=lambda: Instruction(Op.CLIP))
    done: set[Instruction] = field(default_factory=set)
    held: list[Instruction] = field(default_factory=list)  # in gaps, with parts that have not left

    def _fields(self, now: Instruction) -> None:
        for name in _UNUSED[now.op]:
            if getattr(now, name) != _DEFAULTS[name]:
                self._fail(f"{now.op.value} does not use `{name}`, which is {getattr(now, name)!r}")

    def _gaps(self, now: Instruction) -> None:
        if self.held and has_gaps(self.program, now):
            self.held.clear()
        elif self.held and now.op not in BETWEEN:
            self._fail(f"parts of `{self.held[0]}` are held for the gaps of the next pass, and this one has none")
        if now.in_gaps:
            if not may_be_in_gaps(self.program, now.op, now.block):
                self._fail("its lane has no gaps: routed messages take others")
            if now.op is Op.REDUCE and any(each.op is Op.REDUCE for each in self.held):
                self._fail(f"`{self.held[0]}` is held, too, and the next gradient has no buffer")
            self.held.append(now)
        elif now.op is Op.SYNC and now.block in {each.block for each in self.held} and self.program.message(now).sends:
            self._fail("the parts of its REDUCE are held: SYNC it in gaps, too")

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
    def _trainable(self) -> frozenset[int]:
        blocks = () if self.program.phase is Phase.FORWARD else enumerate(self.program.blocks)
        return frozenset(index for index, block in blocks if block.num_trainable)

    @cached_property
    def _counted(self) -> tuple[int, ...]:
        return counted(self.program.blocks, self.program.stage.own)

    @cached_property
    def _orthogonalised(self) -> frozenset[int]:
        return frozenset(orthogonalised(self.program.flats, self.program.stage.held))

    @cached_property
    def _first_user(self) -> dict[int, int]:
        """Copy -> first block here that is tied to it, whose complete backwards count for the copy."""
        stage, blocks = self.program.stage, self.program.blocks
        found = {owner: block for block in reversed(stage.own) for owner in blocks[block].tied_to}
        return {copy: found[copy] for copy in stage.copies}

    @cached_property
    def _num_units(self) -> int:
        return count_units(self.program.num_micros, self.program.plan.unit)

    @cached_property
    def _outgoing(self) -> frozenset[tuple[bool, int, int, int]]:
        """(is gradient, block, micro-batch, peer stage) of every message that another stage reads."""
        stage = self.program.stage
        edges = []
        for chunk, onward, back in zip(stage.chunks, stage.onward, stage.back, strict=True):
            edges += [(False, chunk[-1], onward)] if onward is not None else []
            # Evaluation sends no gradients.
            edges += [(True, chunk[0], back)] if back is not None and stage.trains else []
        return frozenset((*edge[:2], micro, edge[2]) for edge in edges for micro in range(stage.num_micros))

    @cached_property
    def _incoming(self) -> frozenset[tuple[bool, int, int]]:
        """(is gradient, sender's block, peer stage) of every message that this stage reads."""
        stage = self.program.stage
        edges = []
        for chunk, onward, back in zip(stage.chunks, stage.onward, stage.back, strict=True):
            edges += [(True, chunk[-1] + 1, onward)] if onward is not None else []
            edges += [(False, chunk[0] - 1, back)] if back is not None else []
        return frozenset(edges)

    def _backward_of(self, block: int, micro: int) -> Op:
        # Of a backward in two halves, the second completes the gradient.
        split = Instruction(Op.BACKWARD_INPUT, block, micro) in self.done
        return Op.BACKWARD_WEIGHT if split else Op.BACKWARD

    def _runs_here(self) -> None:
        if self.now.block not in self.program.stage.own:
            self._fail(f"block {self.now.block} runs on another stage")

    def _trains(self) -> None:
        if self.now.block not in self._trainable:
            self._fail("the block has nothing to train")

    def _holds(self) -> None:
        if self.now.block not in self.program.stage.held:
            self._fail(f"block {self.now.block} is on another stage")

    def _fail(self, rule: str) -> None:
        raise ProgramError(f"rank {self.rank}, instruction {self.position} `{self.now}`: {rule}")

    def _fail_end(self, rule: str) -> None:
        raise ProgramError(f"rank {self.rank}, end of the program: {rule}")
