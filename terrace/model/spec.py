"""The interface of a model to the rest of Terrace: its blocks and the shapes in them.

A model is an ordered list of blocks. The block is the unit of sharding, of recomputation, of pipeline placement and of
cost. This file is pure: planning needs no torch.
"""

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from terrace.base.errors import ModelError, did_you_mean

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


class Computes(StrEnum):
    """A computation with known kernels."""

    LOOK_UP = "look-up"  # tokens to the residual stream
    RESIDUAL = "residual"  # attention and MLP, each added to the residual stream
    LOGITS = "logits"  # the residual stream to logits and their loss
    VALUES = "values"  # the residual stream to one number a token


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """One block: the parameters it owns, the earlier blocks it also reads parameters from, and its computation.

    A tied head owns its norm and borrows block 0, so a parameter always has exactly one owner. A block that computes
    `None` declares its parameters alone; its cost is the products of its matrices.
    """

    name: str
    params: tuple[ParamSpec, ...]
    borrows: tuple[int, ...] = ()
    computes: Computes | None = None

    def is_like(self, other: "BlockSpec") -> bool:
        """Whether both specs are equal but for the name."""
        return self.params == other.params and replace(other, name=self.name) == self

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(Inputs, outputs) of its matrices in order, before slicing. Stacks are left out: a token takes few parts."""
        shapes = (param.whole or param.shape for param in self.params)
        return tuple((shape[1], shape[0]) for shape in shapes if len(shape) == 2)

    @property
    def at_an_end(self) -> bool:
        """Whether it looks tokens up or makes logits or values, rather than working on the residual stream."""
        return self.computes in (Computes.LOOK_UP, Computes.LOGITS, Computes.VALUES)

    @property
    def attends(self) -> bool:
        """Whether it has attention, whose cost depends on the sequences that its tokens are in."""
        return self.computes is Computes.RESIDUAL

    def active(self, param: ParamSpec) -> int:
        """Elements of one of its parameters that a token meets; none of a stack, since a token takes few parts."""
        return 0 if param.is_stack else param.numel

    def forward_flops(self, batch_size: int, sequence: int) -> int:
        """FLOPs of one forward pass on (B, S) tokens: two an element of its matrices and a token."""
        return 2 * batch_size * sequence * sum(inputs * outputs for inputs, outputs in self.matrices)

    @cached_property
    def has_stacks(self) -> bool:
        """Whether it has experts."""
        return any(param.is_stack for param in self.params)

    @cached_property
    def num_trainable(self) -> int:
        """Number of trainable elements owned."""
        return sum(param.numel for param in self.params if param.trainable)

    @property
    def num_frozen(self) -> int:
        """Number of frozen elements owned."""
        return sum(param.numel for param in self.params if not param.trainable)


def freeze(blocks: Sequence[BlockSpec], patterns: Sequence[str]) -> tuple[BlockSpec, ...]:
    """`blocks` with every parameter that matches a pattern over `block.parameter` frozen.

    Raises `ModelError` for a pattern that matches nothing.
    """
    names = [f"{block.name}.{param.name}" for block in blocks for param in block.params]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ModelError(f"freeze pattern {pattern!r} matches no parameter{did_you_mean(pattern, names)}")

    def apply(block: BlockSpec, param: ParamSpec) -> ParamSpec:
        hit = any(fnmatch.fnmatchcase(f"{block.name}.{param.name}", pattern) for pattern in patterns)
        return replace(param, trainable=param.trainable and not hit)

    return tuple(replace(block, params=tuple(apply(block, param) for param in block.params)) for block in blocks)
