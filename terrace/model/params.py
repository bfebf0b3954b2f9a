"""Specs of a block's parameters: shapes and the meaning of their dims. Needs no torch."""

import math
from dataclasses import dataclass, replace

from terrace.model.base_formats import BASE_FORMATS

STACKED = "experts"  # the quantity of the leading dim of a stack


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One parameter: its name inside the block and its shape.

    `dims` has a (quantity, number of units) for each dim; a unit, such as a head of 64 elements, is never split. It is
    empty if nothing is declared. A leading dim of "experts" makes the parameter a stack with one part per expert:
    matrices in (experts, out, in), vectors in (experts, out). An expert bias is updated from token counts instead of
    by an optimizer; it is replicated on every rank, in at least fp32.

    The rows of an `is_spread` table are on different ranks (terrace.plan.tables). A frozen matrix with a `code` is held
    in that format (terrace.model.base_formats).

    In the slice of one rank (terrace.plan.slices), `shape` includes padding, `whole` is the shape before slicing,
    `cuts` names the axes that shard each dim, and `replicated_over` the axes whose ranks all hold this slice and
    together shard its states.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    is_expert_bias: bool = False
    is_spread: bool = False
    code: str = ""
    dims: tuple[tuple[str, int], ...] = ()
    whole: tuple[int, ...] = ()  # empty: `shape` is whole
    cuts: tuple[tuple[str, ...], ...] = ()
    replicated_over: tuple[str, ...] | None = None  # None: not sliced, every axis of the stage

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.whole or self.shape

    @property
    def num_constants(self) -> int:
        """Number of constants of a matrix that is held in codes, else 0."""
        return BASE_FORMATS[self.code].num_constants(math.prod(self.whole_shape)) if self.code else 0

    @property
    def stored(self) -> "ParamSpec":
        """The parameter as a rank stores it: bytes of records instead of elements if it is held in codes."""
        if not self.code:
            return self
        coded = BASE_FORMATS[self.code].coded_bytes
        shape, whole = ((*sizes[:-1], coded(sizes[-1])) if sizes else () for sizes in (self.shape, self.whole))
        return replace(self, shape=shape, whole=whole)

    def is_replicated_over(self, axis: str) -> bool:
        """Whether several ranks of `axis` hold this slice."""
        return axis in (self.replicated_over or ())

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of one part if it is a stack, else `shape`."""
        return self.shape[1:] if self.is_stack else self.shape

    @property
    def whole_part_shape(self) -> tuple[int, ...]:
        """`part_shape` before slicing."""
        return (self.whole or self.shape)[1:] if self.is_stack else self.whole or self.shape

    @property
    def num_parts(self) -> int:
        """Number of parts if it is a stack, else 1."""
        return self.shape[0] if self.is_stack else 1

    @property
    def is_matrix(self) -> bool:
        return len(self.part_shape) == 2

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: to matrices, not to norms and biases."""
        return len(self.part_shape) >= 2

    @property
    def is_stack(self) -> bool:
        """Whether its leading dim counts experts."""
        return bool(self.dims) and self.dims[0][0] == STACKED
