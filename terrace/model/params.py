"""The parameters of a block: their shapes, and the quantities that their dims count. Pure: needs no torch."""

import math
from dataclasses import dataclass

STACKED = "experts"  # the quantity whose dim counts parts of one shape


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One parameter: its name inside the block and its shape.

    `dims` names the quantity that each dim counts, with the number of units that cannot be cut ("heads" of 64 elements,
    say); empty where nothing is declared. A leading dim that counts "experts" makes the parameter a stack of parts of
    one shape: (experts, out, in) is a matrix for each expert, (experts, out) a vector. `is_moved` by counts and by no
    optimizer: it is whole on every rank, in fp32 at least. In the slice that one rank holds
    (terrace.plan.slices), `shape` includes padding, `whole` is the shape before slicing, `cuts` names the axes that cut
    each dim, and `replicated_over` the axes along which every rank holds this slice; together they shard its states.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    is_moved: bool = False
    dims: tuple[tuple[str, int], ...] = ()
    whole: tuple[int, ...] = ()  # empty: `shape` is whole
    cuts: tuple[tuple[str, ...], ...] = ()
    replicated_over: tuple[str, ...] | None = None  # None: not sliced, every axis of the stage

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    def is_replicated_over(self, axis: str) -> bool:
        """Whether several ranks of `axis` hold this slice."""
        return axis in (self.replicated_over or ())

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of one part of a stack, else `shape`."""
        return self.shape[1:] if self.is_stack else self.shape

    @property
    def num_parts(self) -> int:
        """Number of parts of a stack, else 1."""
        return self.shape[0] if self.is_stack else 1

    @property
    def is_matrix(self) -> bool:
        """Whether it is a matrix, or a stack of matrices."""
        return len(self.part_shape) == 2

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to norms and biases."""
        return len(self.part_shape) >= 2

    @property
    def is_stack(self) -> bool:
        """Whether its leading dim counts experts."""
        return bool(self.dims) and self.dims[0][0] == STACKED
