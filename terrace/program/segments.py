"""Instructions stored as bodies: short runs of instructions, each repeated for many micro-batches.

A stage passes few chunks in few ways, so a program needs few bodies, and the order in which micro-batches run them.
Counting, pricing and simulation read the bodies; other readers get the expanded instructions.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, overload

from terrace.program.instruction import Instruction

Unnumbered = tuple[object, ...]


class Folded(NamedTuple):
    """The distinct instructions of a program, in order of first execution, and the bodies that contain them.

    Instructions that differ only in micro-batch count as one. `bodies` are lists of indexes into `distinct`; `order`
    are (body, micro-batch) pairs in execution order.
    """

    distinct: tuple[Instruction, ...]
    bodies: list[list[int]]
    order: Sequence[tuple[int, int]]

    def counts(self) -> dict[Instruction, int]:
        """How often each distinct instruction runs."""
        runs = [0] * len(self.bodies)
        for body, _ in self.order:
            runs[body] += 1
        times = [0] * len(self.distinct)
        for numbers, of_body in zip(self.bodies, runs, strict=True):
            for number in numbers:
                times[number] += of_body
        return dict(zip(self.distinct, times, strict=True))


class Segments(Sequence[Instruction]):
    """A sequence of instructions; `order` are (index of a body, micro-batches to add to its instructions)."""

    def __init__(self, bodies: Sequence[tuple[Instruction, ...]], order: Sequence[tuple[int, int]]) -> None:
        self.bodies, self.order = bodies, order

    @classmethod
    def of(cls, instructions: Sequence[Instruction]) -> "Segments":
        """`instructions` as segments: unchanged if they are segments, else as one body."""
        return instructions if isinstance(instructions, cls) else cls((tuple(instructions),), ((0, 0),))

    @cached_property
    def folded(self) -> Folded:
        numbers: dict[Unnumbered, int] = {}
        distinct: list[Instruction] = []
        bodies: list[list[int]] = [[] for _ in self.bodies]
        for body, micro in self.order:
            found = bodies[body]
            if not found:  # a body without instructions stays empty
                for instruction in self.bodies[body]:
                    key = without_micro(instruction)
                    number = numbers.get(key)
                    if number is None:
                        number = numbers[key] = len(distinct)
                        distinct.append(instruction.later(micro))
                    found.append(number)
        return Folded(tuple(distinct), bodies, self.order)

    @cached_property
    def places(self) -> list[int]:
        """Index of the distinct instruction (`folded`) at every position."""
        bodies, found = self.folded.bodies, list[int]()
        for body, _ in self.order:
            found += bodies[body]
        return found

    @cached_property
    def whole(self) -> tuple[Instruction, ...]:
        """The expanded instructions."""
        bodies = self.bodies
        return tuple([each.later(micro) for body, micro in self.order for each in bodies[body]])

    def __len__(self) -> int:
        sizes = list(map(len, self.bodies))
        return sum([sizes[body] for body, _ in self.order])

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.whole)

    @overload
    def __getitem__(self, index: int) -> Instruction: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Instruction, ...]: ...
    def __getitem__(self, index: int | slice) -> Instruction | tuple[Instruction, ...]:
        return self.whole[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Segments):
            return self is other or self.whole == other.whole
        return self.whole == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.whole)


class Writer:
    """Builder of `Segments`."""

    def __init__(self) -> None:
        self.bodies: list[tuple[Instruction, ...]] = []
        self.order: list[tuple[int, int]] = []

    def body(self, *instructions: Instruction) -> int:
        """Add a body, whose instructions have micro-batch 0 or none. Returns its index."""
        self.bodies.append(instructions)
        return len(self.bodies) - 1

    def end(self, *instructions: Instruction) -> Segments:
        """Append instructions without micro-batch and return the segments."""
        self.order.append((self.body(*instructions), 0))
        return Segments(tuple(self.bodies), tuple(self.order))


def without_micro(instruction: Instruction) -> Unnumbered:
    """Key that is equal for instructions that differ only in micro-batch."""
    op, block, _, backward, secondary, peer, in_gaps = instruction
    return op, block, backward, secondary, peer, in_gaps
