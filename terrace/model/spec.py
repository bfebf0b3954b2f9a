"""Specs of a model's blocks, the interface of a model to the rest of Terrace. Needs no torch.

A model is an ordered list of blocks. The block is the unit of sharding, recomputation, pipeline placement and cost.
"""

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Literal

from terrace.base.errors import ModelError, did_you_mean
from terrace.model import operations as ops
from terrace.model.params import ParamSpec

_WEIGHT = ".weight"
_INNER = ("heads", "kv_heads", "intermediate")


# For blocks that declare only the dims of their parameters:
#
#     (inner, hidden)    input projection; inner counts heads, key-value heads or inner features
#     (hidden, inner)    output projection, which ends attention or the MLP
#     (vocab, ...)       the output matrix in a block with a norm, else an embedding table
#     (one dim)          a norm over this dim, unless it is the bias of a matrix
#
# This is enough to place the cuts of a tensor axis and its messages, but not to estimate seconds and memory. For these,
# such a block counts as the chain of its products (`BlockSpec.operations`).
def operations_of_dims(params: Sequence[ParamSpec]) -> ops.Operations:
    """Operations of a block with these parameters, in their order; norms of heads follow their product.

    Empty if no dims are declared. Stacks of experts and matrices of other dims are omitted.
    """
    matrices = [param for param in params if len(param.dims) == 2]
    modules = {_module(param) for param in matrices}
    vectors = [param for param in params if len(param.dims) == 1 and _module(param) not in modules]
    found = list(_in_order(params, vectors))
    if any(isinstance(each, ops.Product) for each in found):
        return ops.Operations(tuple(found))
    table = next((param for param in matrices if param.dims[0][0] == "vocab"), None)
    if table is None:
        # The head of a tied model has only a norm.
        losses = [ops.Loss("loss", each.writes, (_LOSSES,), "", 0, owns=False) for each in found[-1:]]
        return ops.Operations((*found, *losses))
    # Named after the parameter, which may belong to the block directly rather than to a submodule.
    tensor, vocabulary = ops.Tensor("stream", _dim(table, 1)), table.dims[0][1]
    if found:
        return ops.Operations((*found, ops.Loss("loss", (tensor,), (_LOSSES,), table.name, vocabulary)))
    return ops.Operations((ops.LookUp("look up", (), (tensor,), table.name, vocabulary),))


_LOSSES = ops.Tensor(ops.OUTPUT, ops.Dim("losses", 1), ops.Tokens.ALL)


def _in_order(params: Sequence[ParamSpec], vectors: Sequence[ParamSpec]) -> Iterator[ops.Operation]:
    """Norms of the residual stream, and complete regions at the position of their output projection."""
    entering: list[ParamSpec] = []
    for param in params:
        match _counts(param):
            case ("hidden",) if param in vectors and param.name.endswith(_WEIGHT):
                yield _norm(param, vectors, ops.Tensor(ops.INPUT, _dim(param, 0)))
            case (inner, "hidden") if inner in _INNER:
                entering.append(param)
            case ("hidden", inner) if inner in _INNER:
                yield from _region(entering, param, vectors)
                entering = []


def _region(entering: Sequence[ParamSpec], leaving: ParamSpec, vectors: Sequence[ParamSpec]) -> Iterator[ops.Operation]:
    stream, mixed = ops.Tensor(ops.INPUT, _dim(leaving, 0)), ops.Tensor("mixed", _dim(leaving, 1), ops.Tokens.ALL)
    whole = stream._replace(name="whole input", tokens=ops.Tokens.ALL)
    place = _module(leaving).rpartition(".")[0]
    norms = [
        each
        for each in vectors
        if each.name.startswith(f"{place}.") and _counts(each) != ("hidden",) and each.name.endswith(_WEIGHT)
    ]
    yield ops.Enter("gather input", (stream,), (whole,))
    results = [ops.Tensor(_module(param), _dim(param, 0), ops.Tokens.ALL) for param in entering]
    for index, result in enumerate(results):
        yield ops.Product(result.name, (whole,), (result,), result.name)
        for norm in norms[index : index + 1]:
            yield _norm(norm, vectors, result)
    if mixed.features.counts == "heads":
        _, heads, size = mixed.features
        keys = [each.features.units for each in results if each.features.counts == "kv_heads"]
        yield ops.Core(
            "attention", tuple(results), (mixed,), heads, (keys or [heads])[0], head_dim=size, value_dim=size
        )
    yield ops.Product(_module(leaving), (mixed,), (stream._replace(name=ops.OUTPUT),), _module(leaving))


def _norm(param: ParamSpec, vectors: Sequence[ParamSpec], source: ops.Tensor) -> ops.Norm:
    name = _module(param)
    kind: Literal["rms", "layer"] = "layer" if any(each.name == f"{name}.bias" for each in vectors) else "rms"
    return ops.Norm(name, (source,), (source,), name, _dim(param, 0), kind)


def _counts(param: ParamSpec) -> tuple[str, ...]:
    return tuple(counts for counts, _ in param.dims)


def _dim(param: ParamSpec, index: int) -> ops.Dim:
    (counts, units), size = param.dims[index], (param.whole or param.shape)[index]
    return ops.Dim(counts, units, size // units) if units else ops.NO_FEATURES


def _module(param: ParamSpec) -> str:
    return param.name.rpartition(".")[0]


class Computes(StrEnum):
    """A computation with known kernels."""

    LOOK_UP = "look-up"  # tokens to the residual stream
    RESIDUAL = "residual"  # attention and MLP, each added to the residual stream
    LOGITS = "logits"  # the residual stream to logits and their loss
    VALUES = "values"  # the residual stream to one number a token


_COMPUTED = {
    ops.Sum: Computes.RESIDUAL,  # a layer, which may look up further tokens
    ops.LookUp: Computes.LOOK_UP,
    ops.Loss: Computes.LOGITS,
    ops.Score: Computes.VALUES,
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
    declared: ops.Operations = ops.NO_OPERATIONS

    @cached_property
    def operations(self) -> ops.Operations:
        """Declared operations, or else the chain of its products."""
        return self.declared if self.declared.each else ops.chain(self.matrices)

    @cached_property
    def cut_operations(self) -> ops.Operations:
        """Operations that a tensor axis shards: the declared ones, or else those inferred from the parameters' dims."""

        return self.declared if self.declared.each else operations_of_dims(self.params)

    @cached_property
    def computes(self) -> Computes | None:
        """Kind of computation according to the declared operations; None if there are none."""
        kinds = {type(operation) for operation in self.declared}
        return next((computes for kind, computes in _COMPUTED.items() if kind in kinds), None)

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
        return any(param.is_stack for param in self.params)

    @cached_property
    def num_trainable(self) -> int:
        return sum(param.numel for param in self.params if param.trainable)

    @property
    def num_frozen(self) -> int:
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
