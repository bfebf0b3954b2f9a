"""Infers operations from the dims of a block's parameters, for blocks that declare none. Needs no torch.

    (inner, hidden)    input projection; inner counts heads, key-value heads or inner features
    (hidden, inner)    output projection, which ends attention or the MLP
    (vocab, ...)       the output matrix in a block with a norm, else an embedding table
    (one dim)          a norm over this dim, unless it is the bias of a matrix

This is enough to place the cuts of a tensor axis and its messages, but not to estimate seconds and memory. For these,
such a block counts as the chain of its products (`terrace.model.spec.BlockSpec.operations`).
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from terrace.model.operations import (
    INPUT,
    NO_FEATURES,
    OUTPUT,
    Core,
    Dim,
    Enter,
    LookUp,
    Loss,
    Norm,
    Operation,
    Operations,
    Product,
    Tensor,
    Tokens,
)
from terrace.model.params import ParamSpec

_WEIGHT = ".weight"
_INNER = ("heads", "kv_heads", "intermediate")


def operations_of_dims(params: Sequence[ParamSpec]) -> Operations:
    """Operations of a block with these parameters, in their order; norms of heads follow their product.

    Empty if no dims are declared. Stacks of experts and matrices of other dims are omitted.
    """
    matrices = [param for param in params if len(param.dims) == 2]
    modules = {_module(param) for param in matrices}
    vectors = [param for param in params if len(param.dims) == 1 and _module(param) not in modules]
    found = list(_in_order(params, vectors))
    if any(isinstance(each, Product) for each in found):
        return Operations(tuple(found))
    table = next((param for param in matrices if param.dims[0][0] == "vocab"), None)
    if table is None:
        # The head of a tied model has only a norm.
        losses = [Loss("loss", each.writes, (_LOSSES,), "", 0, owns=False) for each in found[-1:]]
        return Operations((*found, *losses))
    # Named after the parameter, which may belong to the block directly rather than to a submodule.
    tensor, vocabulary = Tensor("stream", _dim(table, 1)), table.dims[0][1]
    if found:
        return Operations((*found, Loss("loss", (tensor,), (_LOSSES,), table.name, vocabulary)))
    return Operations((LookUp("look up", (), (tensor,), table.name, vocabulary),))


_LOSSES = Tensor(OUTPUT, Dim("losses", 1), Tokens.ALL)


def _in_order(params: Sequence[ParamSpec], vectors: Sequence[ParamSpec]) -> Iterator[Operation]:
    """Norms of the residual stream, and complete regions at the position of their output projection."""
    entering: list[ParamSpec] = []
    for param in params:
        match _counts(param):
            case ("hidden",) if param in vectors and param.name.endswith(_WEIGHT):
                yield _norm(param, vectors, Tensor(INPUT, _dim(param, 0)))
            case (inner, "hidden") if inner in _INNER:
                entering.append(param)
            case ("hidden", inner) if inner in _INNER:
                yield from _region(entering, param, vectors)
                entering = []


def _region(entering: Sequence[ParamSpec], leaving: ParamSpec, vectors: Sequence[ParamSpec]) -> Iterator[Operation]:
    stream, mixed = Tensor(INPUT, _dim(leaving, 0)), Tensor("mixed", _dim(leaving, 1), Tokens.ALL)
    whole = stream._replace(name="whole input", tokens=Tokens.ALL)
    place = _module(leaving).rpartition(".")[0]
    norms = [
        each
        for each in vectors
        if each.name.startswith(f"{place}.") and _counts(each) != ("hidden",) and each.name.endswith(_WEIGHT)
    ]
    yield Enter("gather input", (stream,), (whole,))
    results = [Tensor(_module(param), _dim(param, 0), Tokens.ALL) for param in entering]
    for index, result in enumerate(results):
        yield Product(result.name, (whole,), (result,), result.name)
        for norm in norms[index : index + 1]:
            yield _norm(norm, vectors, result)
    if mixed.features.counts == "heads":
        _, heads, size = mixed.features
        keys = [each.features.units for each in results if each.features.counts == "kv_heads"]
        yield Core("attention", tuple(results), (mixed,), heads, (keys or [heads])[0], head_dim=size, value_dim=size)
    yield Product(_module(leaving), (mixed,), (stream._replace(name=OUTPUT),), _module(leaving))


def _norm(param: ParamSpec, vectors: Sequence[ParamSpec], source: Tensor) -> Norm:
    name = _module(param)
    kind: Literal["rms", "layer"] = "layer" if any(each.name == f"{name}.bias" for each in vectors) else "rms"
    return Norm(name, (source,), (source,), name, _dim(param, 0), kind)


def _counts(param: ParamSpec) -> tuple[str, ...]:
    return tuple(counts for counts, _ in param.dims)


def _dim(param: ParamSpec, index: int) -> Dim:
    (counts, units), size = param.dims[index], (param.whole or param.shape)[index]
    return Dim(counts, units, size // units) if units else NO_FEATURES


def _module(param: ParamSpec) -> str:
    return param.name.rpartition(".")[0]
