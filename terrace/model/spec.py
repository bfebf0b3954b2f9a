"""The interface of a model to the rest of Terrace: its blocks and the shapes in them.

A model is an ordered list of blocks. The block is the unit of sharding, of recomputation, of pipeline placement and of
cost. This file is pure: planning needs no torch.
"""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from terrace.base.errors import ModelError, did_you_mean
from terrace.model.dim_operations import operations_of_dims
from terrace.model.operation_folds import active_numel, forward_flops
from terrace.model.operations import NO_OPERATIONS, LookUp, Loss, Operations, Score, Sum, chain
from terrace.model.params import ParamSpec


class Computes(StrEnum):
    """A computation with known kernels."""

    LOOK_UP = "look-up"  # tokens to the residual stream
    RESIDUAL = "residual"  # attention and MLP, each added to the residual stream
    LOGITS = "logits"  # the residual stream to logits and their loss
    VALUES = "values"  # the residual stream to one number a token


_COMPUTED = {
    LookUp: Computes.LOOK_UP,
    Sum: Computes.RESIDUAL,
    Loss: Computes.LOGITS,
    Score: Computes.VALUES,
}


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """One block: the parameters it owns, the earlier blocks it also reads parameters from, and its operations.

    A tied head owns its norm and borrows block 0, so a parameter always has exactly one owner. A block that declares no
    operations has the products of its matrices, one after the other.
    """

    name: str
    params: tuple[ParamSpec, ...]
    borrows: tuple[int, ...] = ()
    declared: Operations = NO_OPERATIONS

    @cached_property
    def operations(self) -> Operations:
        """Its operations."""
        return self.declared if self.declared.each else chain(self.matrices)

    @cached_property
    def cut_operations(self) -> Operations:
        """The operations that a tensor axis cuts: its own, or those that the dims of its parameters tell."""
        return self.declared if self.declared.each else operations_of_dims(self.params)

    @cached_property
    def computes(self) -> Computes | None:
        """The computation with known kernels that its operations are, if it declares any."""
        for operation in self.declared:
            if type(operation) in _COMPUTED:
                return _COMPUTED[type(operation)]
        return None

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
        """Elements of one of its parameters that a token meets: of a stack, the parts that it passes."""
        return active_numel(self.operations, param)

    def forward_flops(self, batch_size: int, sequence: int) -> int:
        """FLOPs of the matrix products in one forward pass on (B, S) tokens; see the function of this name."""
        return forward_flops(self.operations, batch_size, sequence)

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
