"""Kinds of blocks: equal specs of a model, grouped.

Most blocks of a model are alike, so sizes, seconds and messages are found once for each kind. Blocks are of one kind if
their specs are equal but for the name; nothing else tells a first block, a layer or a last block apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from terrace.model.spec import BlockSpec


@dataclass(frozen=True)
class Kinds:
    """`specs` has the first block of each kind, in model order; `order` the kind of every block."""

    specs: tuple[BlockSpec, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, blocks: Sequence[BlockSpec]) -> "Kinds":
        """The kinds of a model's blocks."""
        specs: list[BlockSpec] = []
        order: list[int] = []
        for block in blocks:
            # Kinds are few, and shared tuples are compared faster than they are hashed.
            found = next((kind for kind, spec in enumerate(specs) if spec.is_like(block)), len(specs))
            if found == len(specs):
                specs.append(block)
            order.append(found)
        return cls(tuple(specs), tuple(order))

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(Kind, number of blocks) of every run of equal blocks, in model order."""
        return runs_of(self.order)


def runs_of(order: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(Kind, number of blocks) of every run of equal kinds."""
    return tuple((kind, len(list(run))) for kind, run in groupby(order))
