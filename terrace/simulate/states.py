"""Model state of one rank in closed form, for the search: the buffers of a program are in terrace.program.buffers.

With W elements on a rank after the tensor axis and the pipeline have cut the model, c and m the bytes of the compute
and of the master dtype, and S_* the ranks that a state is sharded over (the data and context ranks of its tier and of
all tiers inside):

    params W c / S_p      grads W m / S_g      optimizer W (2 or 3) m / S_o      secondary W c / S_b

A window of blocks is whole for a while: the parameters of a visit and of the `prefetch` next ones, the gradients of two
neighbours, and with either the matrix that a tied head borrows. `terrace.plan.memory` counts the same by walking
through the visits; for plans that use only the data axis both give the same bytes.

Tensor ranks hold the slices of terrace.plan.slices. Parameters that every tensor rank holds whole (norms, for example)
are `shared`: they have their own flat buffer, sharded over the tensor ranks as well as the data ranks. A tied head on
another stage than the embedding has its own copy. All parameters train.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.model.config import ModelConfig, block_specs
from terrace.model.spec import BlockSpec
from terrace.plan.hops import RESIDUAL_BYTES, arena_bytes, gather_buffers, reduce_buffers
from terrace.plan.layout import DEVICE, Layout, message_lane
from terrace.plan.mesh import HOLDERS, TENSOR, Mesh
from terrace.plan.plan import Plan
from terrace.plan.routes import block_hops, residual_numels
from terrace.plan.slices import slice_blocks
from terrace.plan.state_bytes import accumulates_in_place, keeps_master, num_second_moments
from terrace.plan.wire import FORMATS, MessageClass

BlockKind = Literal["embedding", "layer", "head"]
KINDS: tuple[BlockKind, ...] = ("embedding", "layer", "head")

Sizes = tuple[int, int, int]  # elements of an embedding, of each layer, and of a head


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The part of a model on one rank: padded elements of each kind of block, 0 where the stage has none.

    `shared` maps tensor axes to the sizes of the buffers that the ranks of these axes share.
    """

    embedding: int
    layer: int  # of each
    head: int
    layers: range
    lent: int  # elements of the embedding of this stage that a tied head reads
    shared: tuple[tuple[tuple[str, ...], Sizes], ...] = ()
    layer_vectors: int = 0  # a layer's elements outside matrices, padding included

    @property
    def num_blocks(self) -> int:
        return len(self.layers) + (self.embedding > 0) + (self.head > 0)

    @property
    def total(self) -> int:
        """Elements of all blocks."""
        return self.embedding + len(self.layers) * self.layer + self.head

    @property
    def flats(self) -> tuple[tuple[tuple[str, ...], Sizes], ...]:
        """The flat buffers by the tensor axes that share them; first the ones shared by data ranks only."""
        own = [self.embedding, self.layer, self.head]
        for _, sizes in self.shared:
            # The data ranks' own buffers are the rest.
            own = [whole - part for whole, part in zip(own, sizes, strict=True)]
        return (((), (own[0], own[1], own[2])), *self.shared)

    def held(self, sizes: Sizes) -> int:
        """Elements of all blocks, for buffers with these sizes per block."""
        return sizes[0] + len(self.layers) * sizes[1] + sizes[2]

    @property
    def largest(self) -> int:
        """Elements of the largest block."""
        return max(self.embedding, self.layer if self.layers else 0, self.head)


def axis_degree(cluster: Cluster, plan: Plan, axis: str) -> int:
    """The degree of an axis over all tiers."""
    return Mesh.of(cluster, plan).total(axis)


def state_layout(cluster: Cluster, plan: Plan, shared: Collection[str] = ()) -> Layout:
    """The layout of states: data and context ranks hold the same slice of a block, so they share its states.

    So do the ranks of the tensor axes that `shared` names, of parameters that these do not cut.
    """
    return replace(Layout.of(cluster, plan, (*HOLDERS, *shared)), mesh=None)  # equal ones are one, whatever the rest


def stage_layers(num_layers: int, num_stages: int, stage: int) -> range:
    """The layers of a stage, spread as evenly as whole layers can be."""
    return range(stage * num_layers // num_stages, (stage + 1) * num_layers // num_stages)


@lru_cache(maxsize=4096)
def stage_of(
    model: ModelConfig,
    tensor: int,
    num_stages: int,
    stage: int,
    shards: int,
    layers: range | None = None,
    columns: int = 1,
) -> Stage:
    """The contents of stage `stage` of `num_stages`, each flat buffer padded to a multiple of `shards`.

    `tensor` ranks are rows x `columns`. `layers` says which layers, where not spread evenly. Raises `PlanError`
    for a stage that does not exist, and where the tensor ranks do not divide the model.
    """
    if not 0 <= stage < num_stages:
        raise PlanError(f"stage = {stage} of a pipeline of {num_stages}: use 0 to {num_stages - 1}")
    degrees = {"columns": columns, "rows": tensor // columns}
    blocks = kind_blocks(model, degrees)
    kinds = [_local_numels(block) for block in blocks]
    tied = model.tied_embeddings
    if tied and num_stages > 1:
        # Across stages a tied head has a copy of the embedding's matrix.
        kinds[2][()] = kinds[2].get((), 0) + -(-model.vocab_size // tensor) * model.hidden_size
    counted = (stage == 0, True, stage == num_stages - 1)
    flats: dict[tuple[str, ...], Sizes] = {}
    for axes in sorted({axes for numels in kinds for axes in numels}):
        # A shared buffer is also sharded over the tensor ranks that share it.
        parts = shards * math.prod(degrees[axis] for axis in axes)
        sizes = [-(-numels.get(axes, 0) // parts) * parts * here for numels, here in zip(kinds, counted, strict=True)]
        flats[axes] = (sizes[0], sizes[1], sizes[2])
    embedding, layer, head = (sum(sizes[kind] for sizes in flats.values()) for kind in range(3))
    return Stage(
        embedding=embedding,
        layer=layer,
        head=head,
        layers=stage_layers(model.num_layers, num_stages, stage) if layers is None else layers,
        lent=embedding if tied and num_stages == 1 else 0,
        shared=tuple((axes, sizes) for axes, sizes in flats.items() if axes),
        layer_vectors=layer - sum(param.numel for param in blocks[1].params if param.decays),
    )


def kind_blocks(model: ModelConfig, degrees: Mapping[str, int]) -> tuple[BlockSpec, ...]:
    """An embedding, a layer and a head as a tensor rank holds them."""
    first, second, *_, last = block_specs(model)
    return slice_blocks((first, second, last), Mesh.build(1, **{axis: (degree,) for axis, degree in degrees.items()}))


def _local_numels(block: BlockSpec) -> dict[tuple[str, ...], int]:
    total: dict[tuple[str, ...], int] = defaultdict(int)
    for param in block.params:
        total[tuple(filter(param.is_replicated_over, TENSOR))] += param.numel
    return total


def gathered_numel(stage: Stage, prefetch: int, kind: BlockKind) -> int:
    """The most parameters that are whole at once while a block of `kind` runs.

    These are the parameters of `prefetch + 1` neighbours. At the head the order of visits reverses, so no further block
    is gathered.
    """
    reach, num = prefetch + 1, len(stage.layers)
    begins, ends = stage.embedding > 0, stage.head > 0
    windows = []  # (with embedding, with head, elements)
    # The neighbours that may be whole together, with and without the ends of the stage.
    if num:
        windows.append((False, False, min(num, reach) * stage.layer))
    if begins:
        windows.append((True, False, stage.embedding + min(num, reach - 1) * stage.layer))
    if ends:
        windows.append((False, True, stage.head + stage.lent + min(num, reach - 1) * stage.layer))
    if begins and ends and reach >= num + 2:
        windows.append((True, True, stage.total))
    if kind == "embedding":
        return max((size for embedding, _, size in windows if embedding), default=0)
    if kind == "head":
        return max((size for _, head, size in windows if head), default=0)
    return max((size for embedding, head, size in windows if reach > embedding + head), default=0)


def gradient_numel(stage: Stage, kind: BlockKind, again: bool) -> int:
    """The most gradients that are whole at once in the backward of a block of `kind`.

    These are its own, the gradient of the block before it in the backward, which is still being reduced, and the
    gradient of the embedding that a tied head borrowed. With `again` another micro-batch came before, and its last
    block's gradient may still be in flight at the head.
    """
    layer = stage.layer if stage.layers else 0
    newest = stage.embedding or layer or stage.head  # the last block that the micro-batch before reduced
    if kind == "head":
        return stage.head + stage.lent + (newest if again else 0)
    if kind == "embedding":
        return stage.embedding + (layer or stage.head)
    before = [stage.head, layer if len(stage.layers) > 1 else 0, newest if again and not stage.head else 0]
    return layer + max(before) + stage.lent


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes of model state: `steady` by category for the whole step, whole parameters and gradients by block kind."""

    steady: dict[str, int]
    gathered: dict[BlockKind, int]
    gradients: dict[BlockKind, int]


def model_states(
    layout: Layout,
    plan: Plan,
    stage: Stage,
    num_micros: int,
    shared: Callable[[tuple[str, ...]], Layout] | None = None,
) -> States:
    """The model state of a rank on `stage` under the placements of `layout`.

    `shared` gives the layout of a buffer that the ranks of further axes share; needed where the stage has any.
    """
    item, master = FORMATS[plan.compute].element_bytes, FORMATS[plan.master].element_bytes
    kinds = [kind for kind, size in zip(KINDS, (stage.embedding, len(stage.layers), stage.head), strict=True) if size]
    again = num_micros > plan.unit
    whole = layout.params != DEVICE
    wires = tuple((message, tuple(row.items())) for message, row in plan.wire.items())
    steady = dict.fromkeys(("params", "secondary", "grads", "optimizer", "outer", "feedback", "buffers"), 0)
    buffered = [0, 0, 0]
    everyone = shared(TENSOR) if stage.shared and shared is not None else layout  # who names the lanes
    lanes: dict[int, int] = {}
    for axes, sizes in stage.flats:
        assert not axes or shared is not None, "a stage with shared buffers needs their layouts"
        here = shared(axes) if axes and shared is not None else layout
        total = stage.held(sizes)
        steady["params"] += total // here.span(here.params) * item
        steady["secondary"] += total // here.span(here.params_backward) * item if here.has_secondary else 0
        steady["grads"] += total // here.span(here.grads) * master
        kept = total // here.span(here.optimizer) * (3 if keeps_master(plan, here) else 2)
        steady["optimizer"] += (kept - _spared_moments(plan, here, stage, sizes)) * master
        # Only gradients that are reduced need a whole buffer.
        if not accumulates_in_place(plan, here):
            buffered = [before + size for before, size in zip(buffered, sizes, strict=True)]
        # Each flat buffer sends messages of its own size; a lane's buffer fits the largest.
        alone = replace(stage, embedding=sizes[0], layer=sizes[1], head=sizes[2], shared=())
        messages, feedback = _messages(everyone, here, wires, plan.compute, plan.master, plan.prefetch, alone, again)
        steady["feedback"] += feedback
        for lane, size in messages:
            lanes[lane] = max(lanes.get(lane, 0), size)
    steady["buffers"] = sum(lanes.values())
    gradients = replace(stage, embedding=buffered[0], layer=buffered[1], head=buffered[2], shared=())
    gradients = replace(gradients, lent=buffered[0] if stage.lent else 0)
    return States(
        steady=steady,
        gathered={kind: gathered_numel(stage, plan.prefetch, kind) * item if whole else 0 for kind in kinds},
        gradients={kind: gradient_numel(gradients, kind, again) * item for kind in kinds},
    )


def _spared_moments(plan: Plan, layout: Layout, stage: Stage, sizes: Sizes) -> int:
    span, spared = layout.span(layout.optimizer), 0
    for kind, (count, size) in enumerate(zip((1, len(stage.layers), 1), sizes, strict=True)):
        # Muon keeps one moment for matrices, and applies to layers only.
        elementwise = stage.layer_vectors if plan.update == "muon" and kind == 1 else size
        spared += count * (size // span - num_second_moments(plan.update, size // span, elementwise))
    return spared


@lru_cache(maxsize=16384)
def _messages(
    everyone: Layout,
    layout: Layout,
    wires: tuple[tuple[str, tuple[tuple[str, str], ...]], ...],
    compute: Literal["bf16", "fp32", "fp64"],
    master: Literal["fp32", "fp64"],
    prefetch: int,
    stage: Stage,
    again: bool,
) -> tuple[tuple[tuple[int, int], ...], int]:
    table = {message: dict(row) for message, row in wires}
    # Only formats and dtypes matter here, so plans that differ in placement share a cache entry.
    plan = Plan(params="device", grads="device", optimizer="device", wire=table, compute=compute, master=master)
    cases: list[tuple[MessageClass, int | None]] = [
        (message, None) for message in (MessageClass.REDUCE, MessageClass.SYNC, MessageClass.REFRESH)
    ]
    if layout.params != DEVICE:
        cases.append((MessageClass.GATHER, layout.params))
        if 2 * stage.num_blocks - 1 > max(1, prefetch):  # else every block stays for the whole step
            cases.append((MessageClass.GATHER_BACKWARD, layout.params_backward))
            # A tied head far from the embedding gathers it for a second forward.
            lends_late = stage.lent and stage.num_blocks - 1 > max(1, prefetch)
            cases += [(MessageClass.GATHER, layout.params_backward)] if again or lends_late else []
    lanes: dict[int, int] = {}
    for message, source in cases:
        reduction, gathering = block_hops(layout, plan, message, stage.largest, source)
        lane = message_lane(everyone, message, source)
        sizes = (reduce_buffers(plan, message, reduction), gather_buffers(plan, message, gathering))
        lanes[lane] = max(lanes.get(lane, 0), *map(arena_bytes, sizes))
    feedback = 0
    # Error feedback keeps its residuals for the whole step.
    if any(name.endswith("+feedback") for row in table.values() for name in row.values()):
        blocks = ((stage.embedding, 1), (stage.layer, len(stage.layers)), (stage.head, 1))
        feedback = sum(count * sum(residual_numels(layout, plan, numel)) for numel, count in blocks)
    return tuple(lanes.items()), feedback * RESIDUAL_BYTES
