"""A stage: the blocks of one pipeline rank, and the order in which micro-batches pass them.

The model is cut into consecutive *chunks* of blocks. A stage holds one or more of them; in a *group* several
micro-batches pass a chunk one after the other in the same direction, and one gather of its parameters serves them all.
Without a pipeline there is one stage with one chunk per block.

Groups are made of the orders of a schedule (terrace.program). A rank's messages, gathers and memory follow from them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from terrace.base.repeated import Repeated
from terrace.model.spec import BlockSpec

# Repetitions that stand for any number: the first may differ by what came before, the third is like the second.
SHORT = 2


class Pass(IntEnum):
    """How micro-batches pass a chunk. A backward is whole or in halves (Qi et al. 2401.10241, section 2)."""

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3

    @property
    def letter(self) -> str:
        """One letter: F, B (whole), I (input), W (weight)."""
        return "FBIW"[self]

    @property
    def finishes(self) -> bool:
        """Whether the gradient of the micro-batch is complete after it."""
        return self in _FINISH


_FINISH = frozenset((Pass.BACKWARD, Pass.BACKWARD_WEIGHT))


class Group(NamedTuple):
    """Micro-batches that pass a chunk one after the other; each of them passes all blocks of the chunk."""

    pass_: Pass
    chunk: int
    micros: Sequence[int]

    def later(self, micros: int) -> "Group":
        """The same group of later micro-batches."""
        pass_, chunk, now = self
        if isinstance(now, range):
            return Group(pass_, chunk, range(now.start + micros, now.stop + micros))
        # Most groups of a long step are of one micro-batch.
        later = (now[0] + micros,) if len(now) == 1 else tuple(micro + micros for micro in now)
        return Group(pass_, chunk, later)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The blocks of one pipeline rank and the groups that pass them.

    `chunks` are the blocks of each chunk; `onward` and `back` are the stages that receive its output and the gradient
    of its input, None where that is this stage or there is no message. `ties` maps a block that two stages hold to the
    other stage; `copies` are the blocks held here as copies. `pairs` are all pairs of stages, anywhere in the pipeline,
    that exchange messages.
    """

    index: int = 0
    num_stages: int = 1
    num_micros: int
    chunks: tuple[range, ...]
    groups: Sequence[Group]
    onward: tuple[int | None, ...]
    back: tuple[int | None, ...]
    ties: tuple[tuple[int, int], ...] = ()
    copies: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()

    @cached_property
    def own(self) -> tuple[int, ...]:
        """The blocks that run here, in model order."""
        return tuple(sorted(block for chunk in self.chunks for block in chunk))

    @cached_property
    def held(self) -> tuple[int, ...]:
        """Blocks with states here: the ones that run here and the copies they borrow from."""
        return tuple(sorted((*self.own, *self.copies)))

    @cached_property
    def short(self) -> "Stage":
        """The same order with few repetitions; itself where nothing repeats."""
        return self.repeating(SHORT) if isinstance(self.groups, Repeated) else self

    def repeating(self, count: int) -> "Stage":
        """The same order with `count` repetitions. Only for a stage whose groups repeat."""
        groups = self.groups
        assert isinstance(groups, Repeated), "a short step is kept whole"
        num_micros = self.num_micros - (groups.repeats - count) * groups.every
        return replace(self, num_micros=num_micros, groups=tuple(groups.times(count)))

    @cached_property
    def trains(self) -> bool:
        """Whether there are backwards among the groups."""
        return any(group.pass_ is not Pass.FORWARD for group in self.groups)

    def passes(self) -> Iterator[tuple[Group, int, int]]:
        """(group, micro-batch, block) in the order of the step."""
        for group in self.groups:
            order = self.traversal(group)
            for micro in group.micros:
                for block in order:
                    yield group, micro, block

    def traversal(self, group: Group) -> range:
        """Blocks of a group in the order in which a micro-batch passes them."""
        blocks = self.chunks[group.chunk]
        return blocks if group.pass_ is Pass.FORWARD else blocks[::-1]

    def sends(self) -> Iterator[tuple[int, bool]]:
        """(stage, whether it is a gradient) of each message this rank sends per micro-batch."""
        yield from ((peer, False) for peer in self.onward if peer is not None)
        yield from ((peer, True) for peer in self.back if peer is not None)


def whole_stage(num_blocks: int, num_micros: int, unit: int) -> Stage:
    """The stage of a plan without a pipeline: units of micro-batches pass block after block, then back."""
    groups = []
    for micros in units(num_micros, unit):
        groups += [Group(Pass.FORWARD, block, micros) for block in range(num_blocks)]
        groups += [Group(Pass.BACKWARD, block, micros) for block in reversed(range(num_blocks))]
    return Stage(
        num_micros=num_micros,
        chunks=tuple(range(block, block + 1) for block in range(num_blocks)),
        groups=tuple(groups),
        onward=(None,) * num_blocks,
        back=(None,) * num_blocks,
    )


def units(num_micros: int, unit: int) -> list[range]:
    """Micro-batches of every unit; the last may hold fewer."""
    return [range(first, min(first + unit, num_micros)) for first in range(0, num_micros, unit)]


def count_units(num_micros: int, unit: int) -> int:
    """Number of units of micro-batches."""
    return -(-num_micros // unit)


def reduction_points(stage: Stage, blocks: Sequence[BlockSpec], unit: int) -> dict[int, list[int]]:
    """Passes (numbers in `Stage.passes`) after which the gradient of each held block is reduced.

    A gradient is reduced after every `unit` complete micro-batches and after the last; the last reduction also waits
    for every block that borrows from it. A copy takes the turns of its first borrower.
    """
    # Reversed, so that the first borrower in model order wins.
    borrower = {lender: block for block in reversed(stage.own) for lender in blocks[block].borrows}
    finished: dict[int, list[int]] = {block: [] for block in stage.held}
    latest: dict[int, int] = dict.fromkeys(stage.held, -1)
    first = 0
    for group in stage.groups:
        order = stage.traversal(group)
        passed = len(group.micros) * len(order)
        # A backward in halves completes its gradient with the weight half.
        for place, block in enumerate(order if group.pass_ in _FINISH else ()):
            here = range(first + place, first + passed, len(order))
            finished[block] += here
            for lender in blocks[block].borrows:
                latest[lender] = here[-1]
                if lender in stage.copies and borrower[lender] == block:
                    finished[lender] += here
        first += passed
    points = {}
    for block, numbers in finished.items():
        if not numbers:  # forward only
            continue
        # The last pass of every full unit.
        turns = numbers[unit - 1 :: unit]
        if len(numbers) % unit:
            turns.append(numbers[-1])
        # A borrower's backward may come after the lender's own.
        turns[-1] = max(turns[-1], latest[block])
        points[block] = turns
    return points


def idle_stage(stage: Stage) -> Stage:
    """The same stage without micro-batches."""
    return replace(stage, groups=(), num_micros=0)


def forward_stage(stage: Stage) -> Stage:
    """The same stage with only its forward groups, in their order."""
    return replace(stage, groups=tuple(group for group in stage.groups if group.pass_ is Pass.FORWARD))
