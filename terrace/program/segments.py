"""Instructions stored as bodies: short runs of instructions, each repeated for many micro-batches.

A stage passes few chunks in few ways, so a program needs few bodies, and the order in which micro-batches run them. The
order of a long step repeats (terrace.base.repeated). Counting, pricing and simulation read the bodies; other readers
get the expanded instructions.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple, overload

from terrace.base.repeated import Repeated
from terrace.program.instruction import Instruction

Unnumbered = tuple[object, ...]


class Run(NamedTuple):
    """A run of a body: its index, and the micro-batches to add to its instructions; -1 if these have none."""

    body: int
    micro: int

    def later(self, micros: int) -> "Run":
        return self if self.micro < 0 else Run(self.body, self.micro + micros)


class Folded(NamedTuple):
    """The distinct instructions of a program, in order of first execution, and the bodies that contain them.

    Instructions that differ only in micro-batch count as one. `bodies` are lists of indexes into `distinct`.
    """

    distinct: tuple[Instruction, ...]
    bodies: list[list[int]]


class Segments(Sequence[Instruction]):
    """A sequence of instructions: bodies, and the order of their runs, which is a `Repeated` in a long step."""

    def __init__(self, bodies: Sequence[tuple[Instruction, ...]], order: Sequence[tuple[int, int]]) -> None:
        self.bodies, self.order = bodies, order

    @classmethod
    def of(cls, instructions: Sequence[Instruction]) -> "Segments":
        """`instructions` as segments: unchanged if they are segments, else as one body."""
        return instructions if isinstance(instructions, cls) else cls((tuple(instructions),), ((0, 0),))

    @property
    def repeats(self) -> bool:
        """Whether a part of the order repeats."""
        return isinstance(self.order, Repeated)

    def listed(self, repeats: int | None = None) -> "Segments":
        """The segments with every run listed, and this number of repetitions where they repeat."""
        order = self.order
        if isinstance(order, Repeated) and repeats is not None:
            order = order.times(repeats)
        return Segments(self.bodies, tuple(order))

    @property
    def _parts(self) -> list[tuple[Sequence[tuple[int, int]], int]]:
        """(Runs, how often they come) of every part of the order."""
        order = self.order
        if isinstance(order, Repeated):
            return [(order.prefix, 1), (order.body, order.repeats), (order.suffix, 1)]
        return [(order, 1)]

    @cached_property
    def folded(self) -> Folded:
        numbers: dict[Unnumbered, int] = {}
        distinct: list[Instruction] = []
        bodies: list[list[int]] = [[] for _ in self.bodies]
        for body, micro in chain.from_iterable(part for part, _ in self._parts):
            found = bodies[body]
            if not found:  # a body without instructions stays empty
                for instruction in self.bodies[body]:
                    key = without_micro(instruction)
                    number = numbers.get(key)
                    if number is None:
                        number = numbers[key] = len(distinct)
                        distinct.append(instruction.later(micro))
                    found.append(number)
        return Folded(tuple(distinct), bodies)

    @cached_property
    def last_micro(self) -> int:
        """An upper bound of all instructions' micro-batch indices; 0 if no instruction has one."""
        within = max([each.micro for body in self.bodies for each in body], default=0)
        return max([micro for _, micro in self.order], default=0) + max(0, within)

    @cached_property
    def _runs(self) -> list[int]:
        found = [0] * len(self.bodies)
        for part, times in self._parts:
            for body, _ in part:
                found[body] += times
        return found

    @cached_property
    def counts(self) -> dict[Instruction, int]:
        distinct, bodies = self.folded
        times = [0] * len(distinct)
        for numbers, runs in zip(bodies, self._runs, strict=True):
            for number in numbers:
                times[number] += runs
        return dict(zip(distinct, times, strict=True))

    @cached_property
    def places(self) -> list[int]:
        """Index of the distinct instruction (`folded`) at every position."""
        bodies, found = self.folded.bodies, list[int]()
        for body, _ in self.order:
            found += bodies[body]
        return found

    @cached_property
    def whole(self) -> Sequence[Instruction]:
        """The expanded instructions: a tuple, or a `Repeated` if the order is one."""
        order, bodies = self.order, self.bodies
        parts = [tuple([each.later(micro) for body, micro in part for each in bodies[body]]) for part, _ in self._parts]
        if not isinstance(order, Repeated):
            return parts[0]
        prefix, body, suffix = parts
        return Repeated(prefix, body, suffix, order.repeats, order.every)

    def __len__(self) -> int:
        return sum(len(body) * runs for body, runs in zip(self.bodies, self._runs, strict=True))

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.whole)

    @overload
    def __getitem__(self, index: int) -> Instruction: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Instruction, ...]: ...
    def __getitem__(self, index: int | slice) -> Instruction | tuple[Instruction, ...]:
        found = self.whole[index]
        return found if isinstance(found, Instruction) else tuple(found)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Segments):
            return self is other or self.whole == other.whole
        return self.whole == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.whole)


class Writer:
    def __init__(self) -> None:
        self.bodies: list[tuple[Instruction, ...]] = []
        self.order: list[tuple[int, int]] = []

    def body(self, *instructions: Instruction) -> int:
        """Add a body, whose instructions have micro-batch 0 or none. Returns its index."""
        self.bodies.append(instructions)
        return len(self.bodies) - 1

    def end(self, *instructions: Instruction) -> Segments:
        """Append instructions without micro-batch and return the segments."""
        self.order.append((self.body(*instructions), -1))
        return Segments(tuple(self.bodies), tuple(self.order))


def without_micro(instruction: Instruction) -> Unnumbered:
    """Key that is equal for instructions that differ only in micro-batch."""
    op, block, _, backward, secondary, peer, in_gaps = instruction
    return op, block, backward, secondary, peer, in_gaps
