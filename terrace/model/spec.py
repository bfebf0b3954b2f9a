"""Specs of a model's blocks, the interface of a model to the rest of Terrace. Needs no torch.

A model is an ordered list of blocks. The block is the unit of sharding, recomputation, pipeline placement and cost.
"""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from terrace.base.errors import ModelError, did_you_mean
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
    """One block: the parameters that it owns, the earlier blocks whose parameters it also uses, and its operations.

    Every parameter has exactly one owner: a tied head owns only its norm and is `tied_to` block 0. A block that
    declares no operations counts as the chain of products with its matrices.
    """

    name: str
    params: tuple[ParamSpec, ...]
    tied_to: tuple[int, ...] = ()
    declared: Operations = NO_OPERATIONS

    @cached_property
    def operations(self) -> Operations:
        """Declared operations, or else the chain of its products."""
        return self.declared if self.declared.each else chain(self.matrices)

    @cached_property
    def cut_operations(self) -> Operations:
        """Operations that a tensor axis shards: the declared ones, or else those inferred from the parameters' dims."""
        from terrace.model.dim_operations import operations_of_dims  # local, as below: this module is imported widely

        return self.declared if self.declared.each else operations_of_dims(self.params)

    @cached_property
    def computes(self) -> Computes | None:
        """Kind of computation according to the declared operations; None if there are none."""
        for operation in self.declared:
            if type(operation) in _COMPUTED:
                return _COMPUTED[type(operation)]
        return None

    def is_like(self, other: "BlockSpec") -> bool:
        """Whether both specs are equal except for the name."""
        return self.params == other.params and replace(other, name=self.name) == self

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of its matrices in order, before slicing, without stacks of experts."""
        shapes = (param.whole or param.shape for param in self.params)
        return tuple((shape[1], shape[0]) for shape in shapes if len(shape) == 2)

    @property
    def at_an_end(self) -> bool:
        """Whether it is the embedding or a head, rather than a layer."""
        return self.computes in (Computes.LOOK_UP, Computes.LOGITS, Computes.VALUES)

    @property
    def attends(self) -> bool:
        """Whether it has attention, whose cost depends on the lengths of sequences."""
        return self.computes is Computes.RESIDUAL

    def active(self, param: ParamSpec) -> int:
        """Elements of one of its parameters that are active for one token."""
        from terrace.model.operation_folds import active_numel

        return active_numel(self.operations, param)

    def forward_flops(self, batch_size: int, sequence: int) -> int:
        """FLOPs of a forward pass on (B, S) tokens; see `terrace.model.operation_folds.forward_flops`."""
        from terrace.model.operation_folds import forward_flops

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
    """Copy of `blocks` in which parameters are frozen whose `block.parameter` matches one of `patterns`.

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
