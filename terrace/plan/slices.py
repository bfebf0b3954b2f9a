"""Cutting a model over the tensor axis: what each rank holds of every parameter.

What a dim counts says which axis cuts it (Megatron-LM, 1909.08053, section 3; the rows x columns form is AxoNN's,
2305.13525, section 4):

    heads, kv_heads, intermediate   rows: the inner dim of attention and of the MLP
    hidden                          columns: the residual stream
    vocab                           columns and rows together: embedding and head

Heads are never cut themselves. With more rows than key-value heads every rank holds all of those and uses the one that
its queries need. A vocabulary or an inner MLP size that does not divide is padded with zeros at the end, which add
nothing to any product and get no gradient. The other dims stay whole, and a parameter with no cut by an axis is shared
by the ranks of that axis: each has a part of its gradient.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from terrace.base.errors import PlanError
from terrace.model.spec import BlockSpec, ParamSpec
from terrace.plan.mesh import TENSOR, Mesh

CUT_BY = {
    "heads": ("rows",),
    "kv_heads": ("rows",),
    "intermediate": ("rows",),
    "hidden": ("columns",),
    "vocab": ("columns", "rows"),
}
_PADDED = ("vocab", "intermediate")


def slice_blocks(blocks: Sequence[BlockSpec], mesh: Mesh) -> tuple[BlockSpec, ...]:
    """Return what one tensor rank holds of `blocks`; all ranks hold the same sizes.

    Raises `PlanError` for a dim that the tensor degrees do not divide, and for a block that declares no dims.
    """
    degrees = {axis: mesh.total(axis) for axis in TENSOR}
    if all(degree == 1 for degree in degrees.values()):
        return tuple(blocks)
    known: dict[int, tuple[ParamSpec, ...]] = {}  # most blocks of a model share their parameters' specs, and still do

    def sliced(block: BlockSpec) -> tuple[ParamSpec, ...]:
        if id(block.params) not in known:
            known[id(block.params)] = tuple(_slice(block.name, param, degrees) for param in block.params)
        return known[id(block.params)]

    return tuple(replace(block, params=sliced(block)) for block in blocks)


def whole_blocks(blocks: Sequence[BlockSpec]) -> tuple[BlockSpec, ...]:
    """Return the blocks that `slice_blocks` made these of."""

    def whole(param: ParamSpec) -> ParamSpec:
        return replace(param, shape=param.whole or param.shape, whole=(), cuts=(), shared=())

    known: dict[int, tuple[ParamSpec, ...]] = {}
    for block in blocks:
        if id(block.params) not in known:
            known[id(block.params)] = tuple(whole(param) for param in block.params)
    return tuple(replace(block, params=known[id(block.params)]) for block in blocks)


def rank_slices(param: ParamSpec, places: Mapping[str, int], degrees: Mapping[str, int]) -> tuple[slice, ...]:
    """Return the part of the whole parameter that a rank at `places` on the tensor axes holds, without padding."""
    if not param.cuts:
        return tuple(slice(0, size) for size in param.shape)
    parts = []
    for size, whole, cut in zip(param.shape, param.whole, param.cuts, strict=True):
        start = size * place_on(cut, places, degrees)
        parts.append(slice(min(start, whole), min(start + size, whole)))
    return tuple(parts)


def place_on(axes: Sequence[str], places: Mapping[str, int], degrees: Mapping[str, int]) -> int:
    """Return the place on several axes together, the first one fastest."""
    place = 0
    for axis in reversed(axes):
        place = place * degrees[axis] + places[axis]
    return place


def _slice(block: str, param: ParamSpec, degrees: Mapping[str, int]) -> ParamSpec:
    shared = tuple(axis for axis in TENSOR if degrees[axis] > 1)
    if not param.shape:
        return replace(param, whole=(), shared=shared)  # a scalar has nothing to cut
    if len(param.dims) != len(param.shape):
        raise PlanError(
            f"mapping has a tensor axis, but {block}.{param.name} does not declare what its dims count: "
            "give the tier to the data axis, or declare dims"
        )
    shape: list[int] = []
    cuts: list[tuple[str, ...]] = []
    for size, (name, units) in zip(param.shape, param.dims, strict=True):
        cut = tuple(axis for axis in CUT_BY.get(name, ()) if degrees[axis] > 1)
        degree = math.prod(degrees[axis] for axis in cut)
        if any(axis in cut for other in cuts for axis in other):
            raise PlanError(
                f"{block}.{param.name} has two dims that tensor {' x '.join(cut)} would cut, {param.dims}: no rank "
                "then holds what is off the diagonal; declare the dims in another way"
            )
        if name == "kv_heads" and degree > units and degree % units == 0:
            cut, degree = (), 1  # every rank holds all of them
        if units % degree and name not in _PADDED:
            fix = max(d for d in range(1, degree) if units % d == 0)
            raise PlanError(
                f"{block}.{param.name} has {units} {name}, which tensor {' x '.join(cut)} = {degree} do not divide: "
                f"use {fix}, or another number of {name}"
            )
        shape.append(-(-units // degree) * (size // units) if units else 0)
        cuts.append(cut)
    used = {axis for cut in cuts for axis in cut}
    shared = tuple(axis for axis in shared if axis not in used)
    return replace(param, shape=tuple(shape), whole=param.shape, cuts=tuple(cuts), shared=shared)
