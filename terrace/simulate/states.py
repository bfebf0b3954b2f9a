"""Model state of one rank in closed form, for the search: the buffers of a program are in terrace.program.buffers.

With W elements on a rank after the tensor axis and the pipeline have cut the model, c and m the bytes of the compute
and of the master dtype, and S_* the ranks that a state is sharded over (the data and context ranks of its tier and of
all tiers inside):

    params W c / S_p      grads W m / S_g      optimizer W (0 to 3) m / S_o     secondary W c / S_b

A window of blocks is whole for a while: the parameters of a visit and of the `prefetch` next ones, the gradients of two
neighbours, and with either the matrix that a tied head borrows. During the update Muon has the whole matrices of two
layers. `terrace.plan.memory` counts the same by walking through the visits; for plans that use only the data axis both
give the same bytes.

Experts on several ranks have buffers of their own, over the ranks that hold the same ones.

Tensor ranks hold the slices of terrace.plan.slices. Parameters that every tensor rank holds whole (norms, for example)
are `shared`: they have their own flat buffer, sharded over the tensor ranks as well as the data ranks. Frozen
parameters have one too, without gradient and optimizer state, and so have matrices that are held as codes (a byte an
element in place of c, and a master apart), and a gate's bias, which is whole on every rank. A
tied head on another stage than the embedding has its own copy, and both stages keep the gradient of the other's.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise, product
from typing import Literal, NamedTuple

from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.dims import is_layer, is_product_matrix
from terrace.plan.gaps import largest_part_bytes
from terrace.plan.hops import RESIDUAL_BYTES, RESIDUAL_COPIES, arena_bytes, gather_buffers, reduce_buffers
from terrace.plan.kinds import Kinds
from terrace.plan.layout import Layout, message_lane
from terrace.plan.mesh import TENSOR, Mesh
from terrace.plan.plan import Plan
from terrace.plan.routes import block_hops, residual_numels
from terrace.plan.state_bytes import accumulates_in_place, keeps_master, moment_bytes, moments
from terrace.plan.wire import CODES, FORMATS, OF_PARAMETERS, MessageClass

Sizes = tuple[int, ...]  # elements of a block of each kind
_Dtypes = tuple[
    Literal["bf16", "fp16", "fp32", "fp64"], Literal["fp32", "fp64"], Literal["bf16", "fp32"] | None, str | None
]


class Flats(NamedTuple):
    """The flat buffers of a stage's blocks that the tensor ranks of `axes` share, and that train or do not.

    `stacked`: of stacks of experts whose ranks are factored on their own (`Mesh.stacks`).
    """

    axes: tuple[str, ...]
    sizes: Sizes  # padded elements, the copies that a block reads included
    largest: int  # elements of the largest, which a message's memory must fit
    tied: int = 0  # elements of the largest of a block that another stage holds as well
    trainable: bool = True
    stacked: bool = False
    is_moved: bool = False  # by counts
    matrices: Sizes = ()  # elements of trainable matrices
    is_coded: bool = False  # held as the codes of products


@dataclass(frozen=True, kw_only=True)
class StageBlocks:
    """The blocks that one rank holds, in order, by kind.

    `flats` begins with the trainable buffers that are shared by data ranks alone. `lent` holds (borrower, lender) of
    blocks that read a block of this stage.
    """

    order: tuple[int, ...]
    flats: tuple[Flats, ...]
    lent: tuple[tuple[int, int], ...] = ()
    ends: tuple[int, ...] = ()  # blocks that are no layers

    @cached_property
    def sizes(self) -> Sizes:
        """Elements of a block of each kind."""
        return _summed(self.flats)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of blocks of each kind."""
        return tuple(map(self.order.count, range(len(self.flats[0].sizes))))

    @property
    def total(self) -> int:
        """Elements of all blocks."""
        return self.held(self.sizes)

    def held(self, sizes: Sizes) -> int:
        """Elements of all blocks, for buffers with these sizes per block."""
        return sum(count * size for count, size in zip(self.counts, sizes, strict=True))

    def with_sizes(self, sizes: Sizes) -> "StageBlocks":
        """The same blocks with other sizes, in one buffer each."""
        return replace(self, flats=(Flats((), sizes, 0),))


def _summed(flats: Sequence[Flats]) -> Sizes:
    return tuple(map(sum, zip(*(each.sizes for each in flats), strict=True)))


def axis_degree(cluster: Cluster, plan: Plan, axis: str) -> int:
    """The degree of an axis over all tiers."""
    return Mesh.of(cluster, plan).total(axis)


@lru_cache(maxsize=4096)
def stage_blocks(
    kinds: Kinds,
    held: Sequence[int],
    tensor: int,
    columns: int,
    shards: int,
    experts: tuple[int, int] = (1, 1),
    codes: bool = False,
) -> StageBlocks:
    """The blocks `held` by a rank, each flat buffer padded to a multiple of `shards`.

    `tensor` ranks are rows x `columns`; `experts` are the degrees of the ranks that hold different experts and of
    those that cut them; `codes` as `Plan.shares_scales`. Raises `PlanError` where they do not divide the model.
    """
    degrees = {"columns": columns, "rows": tensor // columns}
    specs, is_spread = kinds.sliced(degrees, experts), experts != (1, 1)
    layers = [is_layer(kinds.blocks, first) for first in kinds.first]
    each_of = (_local_numels(spec, is_spread, codes and layer) for spec, layer in zip(specs, layers, strict=True))
    numels, matrices = zip(*each_of, strict=True)
    place = {block: index for index, block in enumerate(held)}
    order = tuple(kinds.order[block] for block in held)
    lent = [
        (index, place[lender]) for index, kind in enumerate(order) for lender in specs[kind].borrows if lender in place
    ]
    # Across stages a borrower has a copy of the block that it borrows from, in buffers of its own.
    copies = [set(spec.borrows) - place.keys() if kind in order else set() for kind, spec in enumerate(specs)]
    # Either of two stages that hold one block sends the other its gradient.
    tied = set[int]().union(*copies, _lent_away(kinds, place.keys()))
    flats = []
    for key in sorted({key for each in numels for key in each} | {_PLAIN}):
        frozen, moved, stacked, coded, axes = key
        # A shared buffer is also sharded over the tensor ranks that share it.
        parts = shards * math.prod(degrees[axis] for axis in axes)
        if stacked:
            parts = max(1, shards * tensor // math.prod(experts))
        padded = [-(-each.get(key, 0) // parts) * parts for each in numels]
        copied = [sum(padded[kinds.order[lender]] for lender in lenders) for lenders in copies]
        passed_on = [padded[kinds.order[lender]] for lender in tied]
        largest = max([padded[kind] for kind in order] + passed_on)
        sizes = tuple(map(sum, zip(padded, copied, strict=True)))
        passed = 0 if frozen else max(passed_on, default=0)
        whole = tuple(each.get(key, 0) for each in matrices)
        flats.append(Flats(axes, sizes, largest, passed, not frozen, stacked, moved, whole, coded))
    return StageBlocks(
        order=order,
        flats=tuple(flats),
        lent=tuple(lent),
        ends=tuple(index for index, block in enumerate(held) if not is_layer(kinds.blocks, block)),
    )


def _lent_away(kinds: Kinds, held: Collection[int]) -> set[int]:
    away = (spec.borrows for index, spec in enumerate(kinds.blocks) if index not in held and spec.borrows)
    return {lender for borrowed in away for lender in borrowed if lender in held}


_Group = tuple[bool, bool, bool, bool, tuple[str, ...]]
_PLAIN: _Group = (False, False, False, False, ())


def _local_numels(block: BlockSpec, is_spread: bool, codes: bool) -> tuple[dict[_Group, int], dict[_Group, int]]:
    # By whether they are frozen, moved by counts, stacks of the factoring for experts, held as codes, and by the tensor
    # axes that share them; then of trainable matrices alone.
    total: dict[_Group, int] = defaultdict(int)
    matrices: dict[_Group, int] = defaultdict(int)
    for param in block.params:
        stacked = is_spread and param.is_stack
        axes = () if stacked else tuple(filter(param.is_replicated_over, TENSOR))
        group = not param.trainable, param.is_moved, stacked, codes and is_product_matrix(param), axes
        total[group] += param.numel
        matrices[group] += param.numel if param.decays and param.trainable else 0
    return total, matrices


@lru_cache(maxsize=16384)
def gathered_numels(stage: StageBlocks, prefetch: int) -> tuple[int, ...]:
    """The most parameters that are whole at once while a block of each kind runs.

    These are the parameters of `prefetch + 1` neighbours, and of the blocks that they borrow from. At the last block
    the order of visits reverses, so no further block is gathered.
    """
    sizes = [stage.sizes[kind] for kind in stage.order]
    most = [0] * len(stage.sizes)
    reach = min(prefetch + 1, len(sizes))
    now = sum(sizes[:reach])
    for start in range(len(sizes) - reach + 1):
        window = range(start, start + reach)
        lenders = {lender for borrower, lender in stage.lent if borrower in window and lender not in window}
        whole = now + sum(sizes[lender] for lender in lenders)
        for kind in set(stage.order[start : start + reach]):
            most[kind] = max(most[kind], whole)
        now += (sizes[start + reach] if start + reach < len(sizes) else 0) - sizes[start]
    return tuple(most)


def gathers_again(stage: StageBlocks, prefetch: int, again: bool) -> tuple[bool, bool]:
    """Whether some block is gathered a second time for a forward, and whether one is for a backward.

    A block stays between two visits that are at most `max(1, prefetch)` apart (terrace.plan.residency). It is visited
    with each block that borrows it, on the way forward and on the way back. With `again` another unit follows.
    """
    last, reach = len(stage.order) - 1, max(1, prefetch)
    readers: dict[int, list[int]] = {block: [block] for block in range(len(stage.order))}
    for borrower, lender in sorted(stage.lent):
        readers[lender].append(borrower)
    apart = any(later - before > reach for each in readers.values() for before, later in pairwise(each))
    turns = any(2 * (last - each[-1]) + 1 > reach for each in readers.values())
    return apart or (again and 2 * last + 1 > reach), apart or turns


@lru_cache(maxsize=16384)
def orthogonal_numels(stage: StageBlocks, flats: Flats) -> tuple[int, ...]:
    """Elements of every layer's buffer of these whose matrices Muon updates whole, in order; 0 for one without."""
    layers = (kind for index, kind in enumerate(stage.order) if index not in stage.ends)
    return tuple(flats.sizes[kind] if flats.matrices[kind] else 0 for kind in layers)


@lru_cache(maxsize=16384)
def gradient_numels(stage: StageBlocks, again: bool) -> tuple[int, ...]:
    """The most gradients that are whole at once in the backward of a block of each kind.

    These are its own, the gradient of the block before it in the backward that has any, which is still being reduced,
    and the gradients of blocks that it, or a later block, borrowed from. With `again` another micro-batch came before,
    and its last gradient may still be in flight at the first backward.
    """
    sizes = [stage.sizes[kind] for kind in stage.order]
    most = [0] * len(stage.sizes)
    # The last gradient that the micro-batch before reduced is of the first block with one.
    befores, before = [0] * len(sizes), next(filter(None, sizes), 0) if again else 0
    for block in reversed(range(len(sizes))):
        befores[block] = before
        before = sizes[block] or before
    for block, kind in enumerate(stage.order):
        lenders = {lender for borrower, lender in stage.lent if lender < block <= borrower}
        most[kind] = max(most[kind], sizes[block] + befores[block] + sum(sizes[lender] for lender in lenders))
    return tuple(most)


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes of model state: `steady` by category for the whole step, whole parameters and gradients by kind.

    `updating` are the buffers that an update takes in place of those of a tie, on top of `steady`.
    """

    steady: dict[str, int]
    gathered: tuple[int, ...]
    gradients: tuple[int, ...]
    updating: int = 0


def model_states(
    layout: Layout,
    plan: Plan,
    stage: StageBlocks,
    num_micros: int,
    shared: Callable[[tuple[str, ...], bool], Layout] | None = None,
) -> States:
    """The model state of a rank on `stage` under the placements of `layout`.

    `shared` gives the layout of a buffer that the ranks of further axes share, or of stacks of experts; needed where
    the stage has any.
    """
    item, summed = FORMATS[plan.compute].element_bytes, FORMATS[plan.sums].element_bytes
    again = num_micros > plan.unit
    wires = tuple((message, tuple(row.items())) for message, row in plan.wire.items())
    dtypes = plan.compute, plan.master, plan.messages, plan.products if plan.shares_scales else None
    steady = dict.fromkeys(("params", "secondary", "grads", "optimizer", "outer", "feedback", "buffers"), 0)
    buffered, comes_and_goes = [0] * len(stage.sizes), [0] * len(stage.sizes)
    # Names the lanes.
    together = shared(TENSOR, False) if len(stage.flats) > 1 and shared is not None else layout
    lanes: dict[int, int] = {}
    tie = 0
    matrices: Sizes = ()  # of each layer that Muon gathers
    for flats in stage.flats:
        axes, sizes = flats.axes, flats.sizes
        is_other = bool(axes) or flats.stacked
        assert not is_other or shared is not None, "a stage with buffers of other holders needs their layouts"
        here = shared(axes, flats.stacked) if is_other and shared is not None else layout
        total, held = stage.held(sizes), CODES.element_bytes if flats.is_coded else item
        if flats.is_moved:  # whole on every rank, in fp32 at least
            steady["params"] += total * max(item, FORMATS["fp32"].element_bytes)
            continue
        steady["params"] += total // here.span(here.params) * held
        steady["secondary"] += total // here.span(here.params_backward) * held if here.has_secondary else 0
        if flats.trainable:
            steady["grads"] += total // here.span(here.grads) * summed
            kept = total // here.span(here.optimizer) if keeps_master(plan, here, coded=flats.is_coded) else 0
            if plan.outer is not None:
                steady["outer"] += total // here.span(here.optimizer) * summed * plan.outer.num_slices
            steady["optimizer"] += kept * FORMATS[plan.master].element_bytes + _moment_bytes(plan, here, stage, flats)
        # Only gradients that are reduced need a whole buffer.
        if flats.trainable and not accumulates_in_place(here):
            buffered = [before + size for before, size in zip(buffered, sizes, strict=True)]
        if here.frees:
            comes_and_goes = [before + size * held for before, size in zip(comes_and_goes, sizes, strict=True)]
        # Each flat buffer sends messages of its own size; a lane's buffer fits the largest.
        tie = max(tie, flats.tied // here.span(here.grads) * summed)
        gathered_whole: Sizes = ()
        # A whole optimizer state needs no gather.
        if plan.update == "muon" and here.span(here.optimizer) > 1:
            gathered_whole = orthogonal_numels(stage, flats)
            matrices = tuple(map(sum, zip(matrices or (0,) * len(gathered_whole), gathered_whole, strict=True)))
        alone = replace(stage, flats=(flats,))
        messages, feedback = _messages(
            together, here, wires, dtypes, plan.prefetch, plan.gap_shares, alone, again, max(gathered_whole, default=0)
        )
        steady["feedback"] += feedback
        for lane, size in messages:
            lanes[lane] = max(lanes.get(lane, 0), size)
    steady["buffers"] = sum(lanes.values()) + tie
    gradients = gradient_numels(stage.with_sizes(tuple(buffered)), again)
    gathered = gathered_numels(stage.with_sizes(tuple(comes_and_goes)), plan.prefetch)
    return States(
        steady=steady,
        gathered=gathered,
        gradients=tuple(numel * item for numel in gradients),
        # A layer is gathered while the one before it is updated.
        updating=max(0, max(map(sum, pairwise((*filter(None, matrices), 0))), default=0) * item - tie),
    )


def _moment_bytes(plan: Plan, layout: Layout, stage: StageBlocks, flats: Flats) -> int:
    span, kept, sizes = layout.span(layout.optimizer), 0, flats.sizes
    # Muon keeps one moment for matrices of layers.
    for kind, at_end in product(range(len(sizes)), (False, True)):
        count = sum(each == kind and (index in stage.ends) == at_end for index, each in enumerate(stage.order))
        elementwise = sizes[kind] - (flats.matrices[kind] if plan.update == "muon" and not at_end else 0)
        kept += count * moment_bytes(plan, moments(plan.update, sizes[kind] // span, elementwise)) if count else 0
    return kept


@lru_cache(maxsize=16384)
def _messages(
    together: Layout,
    layout: Layout,
    wires: tuple[tuple[str, tuple[tuple[str, str], ...]], ...],
    dtypes: _Dtypes,
    prefetch: int,
    gaps: tuple[float, ...],
    stage: StageBlocks,
    again: bool,
    matrices: int,
) -> tuple[tuple[tuple[int, int], ...], int]:
    table = {message: dict(row) for message, row in wires}
    # Only formats and dtypes matter here, so plans that differ in placement share a cache entry.
    compute, master, messages, products = dtypes
    plan = Plan(
        params="device",
        grads="device",
        optimizer="device",
        wire=table,
        compute=compute,
        master=master,
        messages=messages,
        products=products,
        expert_gaps=gaps,
    )
    trainable, largest = stage.flats[0].trainable, stage.flats[0].largest
    cases: list[tuple[MessageClass, int | None, int]] = []
    if trainable:
        cases = [(message, None, largest) for message in (MessageClass.REDUCE, MessageClass.SYNC, MessageClass.REFRESH)]
    if trainable and layout.num_islands > 1:
        cases.append((MessageClass.OUTER, None, largest))
    if trainable and matrices:
        cases.append((MessageClass.ORTHOGONALISE, None, matrices))
    if layout.gathers:
        cases.append((MessageClass.GATHER, together.params, largest))
        forward, backward = gathers_again(stage, prefetch, again)
        cases += [(MessageClass.GATHER_BACKWARD, together.params_backward, largest)] if backward else []
        cases += [(MessageClass.GATHER, together.params_backward, largest)] if forward else []
    lanes: dict[int, int] = {}
    for message, source, numel in cases:
        if stage.flats[0].is_coded and message in OF_PARAMETERS:  # in place
            continue
        reduction, gathering = block_hops(layout, plan, message, numel, source)
        lane = message_lane(together, message, source)
        sizes = (reduce_buffers(plan, message, reduction), gather_buffers(plan, message, gathering))
        part = largest_part_bytes(plan, layout, message, numel)
        lanes[lane] = max(lanes.get(lane, 0), part, *map(arena_bytes, sizes))
    feedback = 0
    # Error feedback keeps its residuals for the whole step.
    if trainable and any(name.endswith("+feedback") for row in table.values() for name in row.values()):
        each = zip(stage.counts, stage.sizes, strict=True)
        feedback = sum(count * sum(residual_numels(layout, plan, numel)) for count, numel in each)
    return tuple(lanes.items()), feedback * RESIDUAL_BYTES * RESIDUAL_COPIES
