"""Declared dims of parameters: which axes cut which dim, and what kind of parameter the dims imply."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from terrace.base.errors import PlanError
from terrace.model.params import ParamSpec

if TYPE_CHECKING:
    from terrace.model.operations import Delta, Dim
    from terrace.model.spec import BlockSpec

STACK_DIMS = ("experts", "expert_intermediate")  # the experts of a stack, and the inner dim of one expert
CUT_BY: Mapping[str, tuple[str, ...]] = {
    "heads": ("rows",),
    "kv_heads": ("rows",),
    "intermediate": ("rows",),
    "hidden": ("columns",),
    "vocab": ("columns", "rows"),
    "experts": ("expert",),
    "expert_intermediate": ("rows",),
}


def cut_degree(counts: str, degrees: Mapping[str, int]) -> int:
    """Number of ranks that cut a dim; axes missing from `degrees` have degree 1."""
    return math.prod(degrees.get(axis, 1) for axis in CUT_BY.get(counts, ()))


def rank_numel(dim: "Dim", degrees: Mapping[str, int]) -> int:
    """Features per token that a rank works on, padding included; axes missing from `degrees` have degree 1.

    With more rows than key-value heads, these are the features of one head.
    """
    return -(-dim.units // cut_degree(dim.counts, degrees)) * dim.size


def state_shapes(delta: "Delta", rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What generation keeps of a linear layer for a sequence, on one of `rows` tensor ranks.

    The last inputs (taps - 1, features) of its convolutions, and states (heads, key_dim, value_dim).
    """
    features = sum(rank_numel(each.features, {"rows": rows}) for each in delta.reads[:3])
    return (delta.taps - 1, features), (delta.heads // rows, delta.key_dim, delta.value_dim)


def cut_sizes(blocks: Sequence["BlockSpec"], axis: str) -> list[int]:
    """Sizes of the dims that only `axis` cuts; its degree must divide them for equal slices."""
    dims = {dim for block in blocks for param in block.params if not param.is_stack for dim in param.dims}
    return sorted({size for name, size in dims if CUT_BY.get(name) == (axis,)})


def stack_sizes(blocks: Sequence["BlockSpec"]) -> tuple[int, int]:
    """(Experts, inner size of an expert) of the matrix stacks in `blocks`; (1, 1) without stacks or if they differ."""
    stacks = (dict(param.dims) for block in blocks for param in block.params if param.is_stack and param.is_matrix)
    sizes = {(dims[STACK_DIMS[0]], dims[STACK_DIMS[1]]) for dims in stacks if dims.keys() >= {*STACK_DIMS}}
    return sizes.pop() if len(sizes) == 1 else (1, 1)


_MULTIPLIED = frozenset(("hidden", "heads", "kv_heads", "intermediate", "latent"))


def is_product_matrix(param: ParamSpec) -> bool:
    """Whether matmuls with this parameter may use 8 bits: a matrix of attention or MLP.

    A parameter without declared dims is judged by its shape.
    """
    if param.is_stack or not param.is_matrix:
        return False
    return {name for name, _ in param.dims} <= _MULTIPLIED


def is_router(param: ParamSpec) -> bool:
    """Whether this is a router's matrix, or the bias added to its scores."""
    return bool(param.dims) and param.dims[0][0] == "choices"


def has_routers(blocks: Sequence["BlockSpec"]) -> bool:
    # Most blocks of a model share their parameters.
    distinct = {id(block.params): block.params for block in blocks}
    return any(is_router(param) for params in distinct.values() for param in params)


def declared_hidden_size(blocks: Sequence["BlockSpec"]) -> int | None:
    """The model's hidden size, None if no parameter declares it."""
    names = ("hidden", "features")
    sizes = (size for block in blocks for param in block.params for name, size in param.dims if name in names)
    return next(sizes, None)


def hidden_size(blocks: Sequence["BlockSpec"]) -> int:
    """The model's hidden size. Raises `PlanError` if no parameter declares it."""
    size = declared_hidden_size(blocks)
    if size is None:
        raise PlanError('no block declares a dim "hidden", which the messages of the plan go by: declare dims')
    return size


def is_layer(blocks: Sequence["BlockSpec"], index: int) -> bool:
    """Whether a block is a layer, that is, neither embedding nor head.

    If blocks do not declare `computes`, the first is taken to be the embedding and the last the head.
    """
    if blocks[index].computes is None:
        return 0 < index < len(blocks) - 1
    return not blocks[index].at_an_end


def is_table(param: ParamSpec) -> bool:
    """Whether this has one row per vocabulary entry (embedding or head)."""
    return len(param.dims) == 2 and param.dims[0][0] == "vocab"
