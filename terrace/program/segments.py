"""Instructions as bodies: the same short run of instructions for one micro-batch after the other.

A stage passes few chunks in few ways, so lowering makes few bodies and says in which order micro-batches take them.
Counting, pricing and playing read the bodies; other readers get the instructions written out.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, overload

from terrace.program.instruction import Instruction

Unnumbered = tuple[object, ...]


class Folded(NamedTuple):
    """The distinct instructions of a program in order of their first run, and who runs them.

    Instructions that differ only in their micro-batch count as the first of them. `bodies` has the numbers of distinct
    instructions; `order` has (body, micro-batch), in which they run.
    """

    distinct: tuple[Instruction, ...]
    bodies: list[list[int]]
    order: Sequence[tuple[int, int]]

    def counts(self) -> dict[Instruction, int]:
        """Number of runs of each distinct instruction."""
        runs = [0] * len(self.bodies)
        for body, _ in self.order:
            runs[body] += 1
        times = [0] * len(self.distinct)
        for numbers, of_body in zip(self.bodies, runs, strict=True):
            for number in numbers:
                times[number] += of_body
        return dict(zip(self.distinct, times, strict=True))


class Segments(Sequence[Instruction]):
    """Instructions in the order of `order`, which has (number of a body, micro-batches to add to those it names)."""

    def __init__(self, bodies: Sequence[tuple[Instruction, ...]], order: Sequence[tuple[int, int]]) -> None:
        self.bodies, self.order = bodies, order

    @classmethod
    def of(cls, instructions: Sequence[Instruction]) -> "Segments":
        """Any instructions; they are one body where they come without any."""
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
        """The number of the distinct instruction (`folded`) at every position."""
        bodies, found = self.folded.bodies, list[int]()
        for body, _ in self.order:
            found += bodies[body]
        return found

    @cached_property
    def whole(self) -> tuple[Instruction, ...]:
        """The instructions, written out."""
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
    """Bodies and their order, as they are written."""

    def __init__(self) -> None:
        self.bodies: list[tuple[Instruction, ...]] = []
        self.order: list[tuple[int, int]] = []

    def body(self, *instructions: Instruction) -> int:
        """The number of a new body, whose instructions name micro-batch 0, if any."""
        self.bodies.append(instructions)
        return len(self.bodies) - 1

    def end(self, *instructions: Instruction) -> Segments:
        """All of it, with instructions behind that name no micro-batch."""
        self.order.append((self.body(*instructions), 0))
        return Segments(tuple(self.bodies), tuple(self.order))


def without_micro(instruction: Instruction) -> Unnumbered:
    """Equal for instructions that differ only in their micro-batch."""
    op, block, _, backward, secondary, peer, in_gaps = instruction
    return op, block, backward, secondary, peer, in_gaps
