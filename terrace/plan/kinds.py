"""Kinds of blocks: the blocks of a model, grouped by equal specs.

Most blocks of a model are equal, so sizes, seconds and messages are computed once per kind. Blocks are of one kind if
their specs differ only in the name and all or none of them are layers. In a model that declares only parameters, the
first and the last block are therefore kinds of their own (terrace.plan.dims.is_layer).
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
    """The blocks of a model and the kind of each; kinds are numbered from 0 by first occurrence."""

    blocks: tuple[BlockSpec, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, blocks: Sequence[BlockSpec]) -> "Kinds":
        specs: list[tuple[BlockSpec, bool]] = []
        order: list[int] = []
        for index, block in enumerate(blocks):
            layer = is_layer(blocks, index)
            # There are few kinds, and comparing shared tuples is faster than hashing them.
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
        return tuple(self.blocks[index] for index in self.first)

    def sliced(self, degrees: Mapping[str, int], stacks: tuple[int, int] = (1, 1)) -> tuple[BlockSpec, ...]:
        """`specs` as a tensor rank holds them; `stacks`: (ranks with different experts, ranks that cut an expert)."""
        return _sliced(self, tuple(sorted(degrees.items())), stacks)


def runs_of(order: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(Kind, number of blocks) of every run of equal kinds."""
    return tuple((kind, len(list(run))) for kind, run in groupby(order))


@lru_cache(maxsize=1024)
def _sliced(kinds: Kinds, degrees: tuple[tuple[str, int], ...], experts: tuple[int, int]) -> tuple[BlockSpec, ...]:
    # Degree 2 on every other axis of a stage, so that `replicated_over` of the parameters names these axes.
    others = dict.fromkeys(HOLDERS, (2,))
    mesh = Mesh.build(1, **others, **{axis: (degree,) for axis, degree in degrees})
    if experts != (1, 1):
        mesh = Mesh(mesh.degrees, Mesh.build(1, expert=experts[:1], rows=experts[1:], data=(2,)))
    return slice_blocks(kinds.specs, mesh)
