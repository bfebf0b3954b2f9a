"""Kinds of blocks: equal specs of a model, grouped.

Most blocks of a model are alike, so sizes, seconds and messages are found once for each kind. Blocks are of one kind if
their specs are equal but for the name, and both are layers or neither is: the first and the last block of a model that
declares parameters alone are kinds of their own (terrace.plan.dims.is_layer).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby

from terrace.base.hashing import hashed_once
from terrace.model.spec import BlockSpec
from terrace.plan.dims import is_layer
from terrace.plan.mesh import HOLDERS, Mesh
from terrace.plan.slices import slice_blocks


@hashed_once
@dataclass(frozen=True)
class Kinds:
    """The blocks of a model, and the kind of every block; kinds count from 0 in the order in which they first occur."""

    blocks: tuple[BlockSpec, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, blocks: Sequence[BlockSpec]) -> "Kinds":
        """The kinds of a model's blocks."""
        specs: list[tuple[BlockSpec, bool]] = []
        order: list[int] = []
        for index, block in enumerate(blocks):
            layer = is_layer(blocks, index)
            # Kinds are few, and shared tuples are compared faster than they are hashed.
            alike = (kind for kind, (spec, of_layer) in enumerate(specs) if of_layer is layer and spec.is_like(block))
            found = next(alike, len(specs))
            if found == len(specs):
                specs.append((block, layer))
            order.append(found)
        return cls(tuple(blocks), tuple(order))

    @cached_property
    def first(self) -> tuple[int, ...]:
        """Index of the first block of each kind."""
        return tuple(map(self.order.index, range(max(self.order) + 1)))

    @cached_property
    def specs(self) -> tuple[BlockSpec, ...]:
        """The first block of each kind."""
        return tuple(self.blocks[index] for index in self.first)

    def sliced(self, degrees: Mapping[str, int], experts: tuple[int, int] = (1, 1)) -> tuple[BlockSpec, ...]:
        """`specs` as a tensor rank holds them; `experts` are the degrees of expert and of rows that cut stacks."""
        return _sliced(self, tuple(sorted(degrees.items())), experts)


def runs_of(order: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(Kind, number of blocks) of every run of equal kinds."""
    return tuple((kind, len(list(run))) for kind, run in groupby(order))


@lru_cache(maxsize=1024)
def _sliced(kinds: Kinds, degrees: tuple[tuple[str, int], ...], experts: tuple[int, int]) -> tuple[BlockSpec, ...]:
    # More than one rank of every other axis of a stage, so that parameters name these among the axes they are whole on.
    others = dict.fromkeys(HOLDERS, (2,))
    mesh = Mesh.build(1, **others, **{axis: (degree,) for axis, degree in degrees})
    if experts != (1, 1):
        mesh = Mesh(mesh.degrees, Mesh.build(1, expert=experts[:1], rows=experts[1:], data=(2,)))
    return slice_blocks(kinds.specs, mesh)
