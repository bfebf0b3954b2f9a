"""A stage: the blocks of one pipeline rank, and the order in which micro-batches pass them.

The model is cut into consecutive *chunks* of blocks. A stage holds one or more chunks. In a *group*, several
micro-batches pass a chunk in a row in the same direction, with one gather of its parameters. Without a pipeline there
is one stage with one chunk per block.

Groups are built from a schedule's orders (terrace.program) and determine a rank's messages, gathers and memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from terrace.base.repeated import Repeated
from terrace.model.spec import BlockSpec

# Repetitions that represent any number: the first may depend on what precedes it, the third equals the second.
SHORT = 2


class Pass(IntEnum):
    """How micro-batches pass a chunk. A backward is whole or split in two halves (Qi et al. 2401.10241, section 2)."""

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
        """Whether the micro-batch's gradient is complete afterwards."""
        return self in _FINISH


_FINISH = frozenset((Pass.BACKWARD, Pass.BACKWARD_WEIGHT))


class Group(NamedTuple):
    """Micro-batches that pass a chunk in a row; each passes all blocks of the chunk."""

    pass_: Pass
    chunk: int
    micros: Sequence[int]

    def later(self, micros: int) -> "Group":
        """The same group, shifted by `micros` micro-batches."""
        pass_, chunk, now = self
        if isinstance(now, range):
            return Group(pass_, chunk, range(now.start + micros, now.stop + micros))
        # Fast path: most groups of a long step have one micro-batch.
        later = (now[0] + micros,) if len(now) == 1 else tuple(micro + micros for micro in now)
        return Group(pass_, chunk, later)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The blocks of one pipeline rank and the groups that pass them.

    `chunks` are the blocks of each chunk. `onward` and `back` are, per chunk, the stages that receive its output and
    its input gradient, None if there is no message. `ties` are (block, other stage) for blocks that two stages hold;
    `copies` are the blocks held here as copies. `pairs` are all pairs of stages that exchange messages.
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
        """Blocks with states here: those that run here, and copies of blocks elsewhere that they are tied to."""
        return tuple(sorted((*self.own, *self.copies)))

    @cached_property
    def short(self) -> "Stage":
        """The stage with `SHORT` repetitions; itself if nothing repeats."""
        return self.repeating(SHORT) if isinstance(self.groups, Repeated) else self

    def repeating(self, count: int) -> "Stage":
        """The stage with `count` repetitions. Only for a stage whose groups repeat."""
        groups = self.groups
        assert isinstance(groups, Repeated), "a short step is kept whole"
        num_micros = self.num_micros - (groups.repeats - count) * groups.every
        return replace(self, num_micros=num_micros, groups=tuple(groups.times(count)))

    @cached_property
    def trains(self) -> bool:
        return any(group.pass_ is not Pass.FORWARD for group in self.groups)

    def passes(self) -> Iterator[tuple[Group, int, int]]:
        """(Group, micro-batch, block) in execution order."""
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
        """(Receiving stage, whether it is a gradient) of each message that a rank sends per micro-batch."""
        yield from ((peer, False) for peer in self.onward if peer is not None)
        yield from ((peer, True) for peer in self.back if peer is not None)


def whole_stage(num_blocks: int, num_micros: int, unit: int) -> Stage:
    """The stage of a plan without a pipeline: each unit of micro-batches passes the blocks forward, then backward."""
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
    """Micro-batches of each unit; the last unit may be smaller."""
    return [range(first, min(first + unit, num_micros)) for first in range(0, num_micros, unit)]


def count_units(num_micros: int, unit: int) -> int:
    return -(-num_micros // unit)


def reduction_points(stage: Stage, blocks: Sequence[BlockSpec], unit: int) -> dict[int, list[int]]:
    """Block -> passes (indexes into `Stage.passes`) after which its gradient is reduced.

    A gradient is reduced after every `unit` complete micro-batches and after the last one; the last reduction also
    waits for every block tied to it. A copy is reduced when its first user is.
    """
    # Reversed, so that the first user in model order wins.
    user = {owner: block for block in reversed(stage.own) for owner in blocks[block].tied_to}
    finished: dict[int, list[int]] = {block: [] for block in stage.held}
    latest: dict[int, int] = dict.fromkeys(stage.held, -1)
    first = 0
    for group in stage.groups:
        order = stage.traversal(group)
        passed = len(group.micros) * len(order)
        # In a split backward the weight half completes the gradient.
        for place, block in enumerate(order if group.pass_ in _FINISH else ()):
            here = range(first + place, first + passed, len(order))
            finished[block] += here
            for owner in blocks[block].tied_to:
                latest[owner] = here[-1]
                if owner in stage.copies and user[owner] == block:
                    finished[owner] += here
        first += passed
    points = {}
    for block, numbers in finished.items():
        if not numbers:  # forward only
            continue
        # The last pass of every full unit.
        turns = numbers[unit - 1 :: unit]
        if len(numbers) % unit:
            turns.append(numbers[-1])
        # A user's backward may come after the owner's own.
        turns[-1] = max(turns[-1], latest[block])
        points[block] = turns
    return points


def idle_stage(stage: Stage) -> Stage:
    """The same stage without micro-batches."""
    return replace(stage, groups=(), num_micros=0)


def forward_stage(stage: Stage) -> Stage:
    return replace(stage, groups=tuple(group for group in stage.groups if group.pass_ is Pass.FORWARD))
