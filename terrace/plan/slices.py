"""Cuts a model over axes: the slice that each rank holds of every parameter.

Each dim of a parameter declares what it counts, which determines the axes that cut it (Megatron-LM, 1909.08053,
section 3; rows x columns as in AxoNN, 2305.13525, section 4):

    heads, kv_heads, intermediate   rows: the inner dim of attention and of the MLP
    hidden                          columns: the residual stream
    vocab                           columns and rows together: embedding and head
    experts                         expert: ranks hold different experts
    expert_intermediate             rows of the factoring for experts, which cut every expert; whole without one
    vocab of a spread table         expert of the factoring for tables: ranks hold different rows, the innermost tier
                                    cutting first, so that the rows of its ranks are consecutive

A head is never cut. With more rows than key-value heads, every rank holds all of them and uses the one that its queries
need. A vocabulary or inner MLP size that does not divide is padded with zeros at the end, which contribute nothing and
get no gradient. Other dims stay whole. A parameter is replicated over the axes that do not cut it: each of their ranks
has a partial gradient, and together they shard its states.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from terrace.base.alike import first_equal
from terrace.base.errors import PlanError
from terrace.model.base_formats import BASE_FORMATS
from terrace.model.operations import Dim, LookUp, Operations
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.dims import CUT_BY, cut_degree, is_table
from terrace.plan.mesh import PARTS, STAGE, TENSOR, Mesh

_PADDED = ("vocab", "intermediate")
_CUTTING = frozenset(axis for axes in CUT_BY.values() for axis in axes)


def slice_blocks(blocks: Sequence[BlockSpec], mesh: Mesh) -> tuple[BlockSpec, ...]:
    """The specs of `blocks` as one rank holds them; sizes are equal on all ranks.

    Raises `PlanError` for a dim that the degrees of its axes (`CUT_BY`) do not divide, and under a tensor axis for a
    parameter without declared dims.
    """
    if mesh.tables is not None:
        blocks = spread_tables(blocks)
    # Nothing is cut: keep the same spec objects, which compare fastest.
    elif not mesh.divides_stacks and all(mesh.total(axis) == 1 for axis in _CUTTING):
        return tuple(blocks)
    whole = tuple(blocks)  # the same object if it is a tuple already
    factorings = tuple([() if each is None else _degrees(each) for each in (mesh, mesh.apart, mesh.tables)])
    return _sliced(_Cut(id(whole), factorings, whole, mesh))


@dataclass(frozen=True)
class _Cut:
    """Cache key with everything that the slices of a model depend on; most plans of a search share one."""

    model: int  # the identity of `blocks`, which the key keeps alive
    degrees: tuple[tuple[int, ...], ...]
    blocks: tuple[BlockSpec, ...] = field(compare=False)
    mesh: Mesh = field(compare=False)


def _degrees(mesh: Mesh) -> tuple[int, ...]:
    # An axis that cuts nothing replicates if it has several ranks, however many.
    return tuple([mesh.total(axis) if axis in _CUTTING else min(2, mesh.total(axis)) for axis in STAGE])


@lru_cache(maxsize=16)
def _sliced(cut: _Cut) -> tuple[BlockSpec, ...]:
    blocks, mesh = cut.blocks, cut.mesh
    # Blocks that share parameter specs keep sharing them.
    firsts = first_equal([block.params for block in blocks])
    sliced = {
        first: tuple(_slice(blocks[first].name, param, mesh) for param in blocks[first].params)
        for first in dict.fromkeys(firsts)
    }
    return tuple(replace(block, params=sliced[first]) for block, first in zip(blocks, firsts, strict=True))


def is_shared(dim: Dim, degrees: Mapping[str, int]) -> bool:
    """Whether a rank holds more of a dim than it works on: all key-value heads, if there are more rows than heads."""
    return _has_too_few(dim.counts, dim.units, cut_degree(dim.counts, degrees))


def used_part(dim: Dim, rows: int, row: int) -> slice | None:
    """Features that a row works on within what it holds of a dim: None for all, else one key-value head.

    Consecutive rows share a key-value head, as their query heads do.
    """
    first = row * dim.units // rows * dim.size
    return slice(first, first + dim.size) if is_shared(dim, {"rows": rows}) else None


def _has_too_few(counts: str, units: int, degree: int) -> bool:
    return counts == "kv_heads" and degree > units and degree % units == 0


def rank_slices(param: ParamSpec, mesh: Mesh, rank: int) -> tuple[slice, ...]:
    """The slice of the whole parameter that a rank holds, without padding."""
    if not param.cuts:
        return tuple(slice(0, size) for size in param.shape)
    parts, mesh = [], mesh.of_param(param)
    for size, whole, cut in zip(param.shape, param.whole, param.cuts, strict=True):
        place = 0
        for axis in reversed(cut):  # the first axis varies fastest
            # A unit of a tier holds consecutive experts, which a gate may treat as a group.
            is_expert = axis in PARTS and not param.is_spread
            here = mesh.group_rank(rank, PARTS) if is_expert else mesh.part(rank, axis)
            place = place * mesh.total(axis) + here
        parts.append(slice(min(size * place, whole), min(size * place + size, whole)))
    return tuple(parts)


def _slice(block: str, param: ParamSpec, mesh: Mesh) -> ParamSpec:
    # Without a table of experts, tensor ranks share the tokens of experts, not their matrices.
    cut_by = {} if param.is_stack and not mesh.divides_stacks else CUT_BY
    mesh, cut_by = mesh.of_param(param), {"vocab": PARTS} if param.is_spread else cut_by
    axes = tuple(axis for axis in STAGE if mesh.total(axis) > 1)
    if not param.shape:
        return replace(param, whole=(), replicated_over=axes)  # a scalar has nothing to cut
    if not param.dims and mesh.total("tensor") == 1:
        return replace(param, whole=param.shape, cuts=((),) * len(param.shape), replicated_over=axes)
    if len(param.dims) != len(param.shape):
        raise PlanError(
            f"mapping has a tensor axis, but {block}.{param.name} does not declare what its dims count: "
            "give the tier to the data axis, or declare dims"
        )
    shape: list[int] = []
    cuts: list[tuple[str, ...]] = []
    for size, (name, units) in zip(param.shape, param.dims, strict=True):
        cut = tuple(axis for axis in cut_by.get(name, ()) if mesh.total(axis) > 1)
        words = ("tensor " if set(cut) <= set(TENSOR) and not param.is_stack else "") + " x ".join(cut)
        # If one axis cut both dims, ranks would hold only the diagonal blocks.
        if any(axis in cut for other in cuts for axis in other):
            raise PlanError(
                f"{block}.{param.name} has two dims that {words} would cut, {param.dims}: no rank "
                "then holds what is off the diagonal; declare the dims in another way"
            )
        degree = math.prod(mesh.total(axis) for axis in cut)
        # Fewer key-value heads than rows: replicate them instead of cutting a head.
        if _has_too_few(name, units, degree):
            cut, degree = (), 1  # every rank holds all of them
        if units % degree and name not in _PADDED:
            fix = max(d for d in range(1, degree) if units % d == 0)
            if param.is_stack:
                counted = "experts" if name == "experts" else "elements of an expert's inner size"
                raise PlanError(
                    f"the degrees of {words} in the table experts multiply to {degree}, which does not divide the "
                    f"{units} {counted} of {block}: make them multiply to a divisor of {units}, such as {fix}"
                )
            raise PlanError(
                f"{block}.{param.name} has {units} {name}, which {words} = {degree} do not divide: "
                f"use {fix}, or another number of {name}"
            )
        # Whole units per rank, rounded up; the rest of a `_PADDED` dim is zeros.
        shape.append(-(-units // degree) * (size // units) if units else 0)
        cuts.append(cut)
    used = {axis for cut in cuts for axis in cut}
    replicated = tuple(axis for axis in axes if axis not in used)
    sliced = replace(param, shape=tuple(shape), whole=param.shape, cuts=tuple(cuts), replicated_over=replicated)
    if param.code:
        _check_codes(block, sliced, mesh)
    return sliced


def _check_codes(block: str, param: ParamSpec, mesh: Mesh) -> None:
    form, (rows, row_size) = BASE_FORMATS[param.code], param.shape
    if row_size % form.block or rows * math.prod(mesh.total(axis) for axis in param.cuts[0]) != param.whole[0]:
        raise PlanError(
            f"{block}.{param.name} is held in {param.code} (lora.base), in blocks of {form.block} elements of a row, "
            f"and tensor ranks would cut {param.whole[0]} x {param.whole[1]} into {rows} x {row_size}: use a smaller "
            "degree, or another axis, so that all slices are alike and cut no block"
        )


def tables_of(block: BlockSpec) -> list[ParamSpec]:
    """The tables in which a block looks up rows; a head multiplies with a matrix of the same dims and has none."""
    # Most blocks declare no table; operations are derived only for the others.
    tables = [param for param in block.params if is_table(param)]
    return tables if tables and block.cut_operations.of(LookUp) else []


def spread_tables(blocks: Sequence[BlockSpec]) -> tuple[BlockSpec, ...]:
    """The blocks with the tables of the first one marked as spread over ranks; only the first block receives ids."""
    first, *others = blocks
    return _spread(first, {param.name for param in tables_of(first)}), *others


def _spread(block: BlockSpec, tables: set[str]) -> BlockSpec:
    if not tables:
        return block
    params = tuple(replace(param, is_spread=param.name in tables) for param in block.params)
    # Its gradient has used rows alone, so no buffer of the table's size is zeroed, added to or held: priced as one row.
    each = (replace(one, vocabulary=1) if isinstance(one, LookUp) else one for one in block.declared)
    return replace(block, params=params, declared=Operations(tuple(each)))


def cut_tables(specs: Sequence[BlockSpec], ranks: int) -> tuple[BlockSpec, ...]:
    """`spread_tables`, cut to the rows of one of `ranks` ranks; for sizes of blocks that no mesh has sliced."""

    def cut(param: ParamSpec) -> ParamSpec:
        if not param.is_spread:
            return param
        rows, *width = param.shape
        return replace(param, shape=(-(-rows // ranks), *width), whole=param.shape, replicated_over=("data",))

    return tuple(replace(spec, params=tuple(map(cut, spec.params))) for spec in spread_tables(specs))
