"""The flat buffers of a block: which parameters share a buffer, and which ranks hold it.

Parameters of a block share a buffer if they are replicated over the same axes and are all trainable or all frozen.
Without a tensor axis that is one trainable and one frozen buffer. Parameters that the tensor axis does not cut (norms,
for example) have separate buffers, which tensor ranks shard as data ranks do. Also in separate buffers: expert stacks,
if the plan factors the ranks separately for them; gate biases that are updated from token counts, whole on every rank;
and matrices held as 8-bit codes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from terrace.base.alike import once_each
from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.dims import is_layer, is_product_matrix
from terrace.plan.layout import Layout
from terrace.plan.mesh import HOLDERS, ORDER, STAGE, Mesh
from terrace.plan.plan import Plan
from terrace.plan.wire import CODES, FORMATS, ROUTES, MessageClass

Extent = tuple[tuple[int, ...], int, int]  # (shape of a matrix, its start and stop in the flat buffer)


@dataclass(frozen=True)
class FlatParamSpec:
    """One flat buffer: its parameters in order, weight-decayed matrices first, and the layout of its slices.

    The first `num_orthogonal` elements are matrices that the optimizer updates whole (the layers' matrices under Muon).
    If `is_coded`, the working copy holds the matrices' 8-bit codes (terrace.runtime.matrix_codes).
    """

    layout: Layout
    params: tuple[ParamSpec, ...]
    trainable: bool
    num_orthogonal: int = 0
    is_coded: bool = False

    @cached_property
    def orthogonal(self) -> tuple[Extent, ...]:
        """The matrices that the optimizer updates whole; each matrix of a stack is listed separately."""
        found, start = list[Extent](), 0
        for param in self.params:
            if start >= self.num_orthogonal:
                break
            size = param.numel // param.num_parts
            for _ in range(param.num_parts):
                found.append((param.part_shape, start, start + size))
                start += size
        return tuple(found)

    @property
    def is_expert_bias(self) -> bool:
        """Whether it holds biases that are updated from token counts."""
        return any(param.is_expert_bias for param in self.params)

    def dtype(self, plan: Plan) -> str:
        """Dtype of the working copy: the compute dtype, but fp32 for a gate's bias that bf16 would round away."""
        if self.is_coded:
            return CODES.codec
        return "fp32" if self.is_expert_bias and plan.compute == "bf16" else plan.compute

    def element_bytes(self, plan: Plan) -> int:
        """Bytes per element of the working copy."""
        return CODES.element_bytes if self.is_coded else FORMATS[self.dtype(plan)].element_bytes

    @property
    def num_scales(self) -> int:
        """Number of scales: one per matrix held as codes."""
        return len(self.params) if self.is_coded else 0

    @cached_property
    def numel(self) -> int:
        """Number of elements without padding."""
        return sum(param.numel for param in self.params)

    def travels_in(self, message: MessageClass) -> bool:
        """Whether a block's message of this class carries this buffer."""
        carries = ROUTES[message].carries
        # Parameters that are whole on every rank need no gather.
        if message in (MessageClass.GATHER, MessageClass.GATHER_BACKWARD):
            return self.layout.gathers
        if carries == "change":
            return self.trainable and self.layout.num_islands > 1
        return self.num_orthogonal > 0 if carries == "orthogonal" else self.trainable

    @cached_property
    def padded(self) -> int:
        """Number of elements, padded so that every tier divides it."""
        return self.layout.padded(self.numel)


def gathered_bytes(plan: Plan, flats: Sequence[FlatParamSpec]) -> int:
    """Bytes of a block's gathered parameters that are freed after use."""
    return sum(flat.padded * flat.element_bytes(plan) for flat in flats if flat.layout.frees)


def stage_layout(cluster: Cluster, plan: Plan) -> Layout:
    """Layout of all ranks that together hold a block."""
    return Layout.of(cluster, plan, STAGE)


def world_layout(cluster: Cluster, plan: Plan) -> Layout:
    """Layout of all ranks of all stages, for control messages."""
    return Layout.of(cluster, plan, ORDER)


def block_flats(
    cluster: Cluster,
    plan: Plan,
    blocks: Sequence[BlockSpec],
    known: Sequence[Layout] = (),
    layers: Sequence[bool] | None = None,
) -> tuple[tuple[FlatParamSpec, ...], ...]:
    """The flat buffers of every block, trainable ones first.

    `blocks` are the slices of one rank. Pass `layers`, which of them are layers, if they are not all blocks of a model
    in order. `known` are layouts of the plan to reuse. Raises `PlanError` for unsliced blocks under a tensor axis.
    """
    _check_sliced(cluster, plan, blocks)
    mesh, layouts = Mesh.of(cluster, plan), {(False, layout.axes): layout for layout in known}

    def flats(block: tuple[tuple[ParamSpec, ...], bool]) -> tuple[FlatParamSpec, ...]:
        params, layer = block
        groups: dict[_Group, list[ParamSpec]] = {}
        for param in params:
            # Without slicing, `replicated_over` is unset and the data ranks hold everything.
            held_over = HOLDERS if param.replicated_over is None else param.replicated_over
            stacked = param.is_stack and mesh.divides_stacks
            own = mesh.of_stacks(stacked)
            axes = tuple(axis for axis in STAGE if axis in held_over and own.total(axis) > 1)
            # An empty parameter cannot train, and would force a buffer of its own.
            coded = codes and layer and is_product_matrix(param)
            key = param.trainable and param.numel > 0, stacked, param.is_expert_bias, coded, axes
            groups.setdefault(key, []).append(param)
        made = []
        for group in sorted(groups, key=_order):
            trainable, stacked, moved, coded, axes = group
            # One Layout object per set of ranks, shared by all flat buffers.
            if (stacked, axes) not in layouts:
                layouts[stacked, axes] = Layout.of(cluster, plan, axes, mesh.of_stacks(stacked))
            # Decayed matrices first: the optimizer applies weight decay to one contiguous prefix.
            ordered = tuple(sorted(groups[group], key=lambda param: not param.decays))
            whole = sum(param.numel for param in ordered if param.decays) if muon and layer and trainable else 0
            layout = layouts[stacked, axes].whole() if moved else layouts[stacked, axes]
            made.append(FlatParamSpec(layout, ordered, trainable, whole, coded))
        return tuple(made)

    muon, codes = plan.update == "muon", plan.shares_scales
    asks = muon or codes
    if layers is None:
        layers = [asks and is_layer(blocks, index) for index in range(len(blocks))]
    return tuple(
        once_each(flats, [(block.params, asks and layer) for block, layer in zip(blocks, layers, strict=True)])
    )


# (is trainable, is in the factoring for stacks, is updated from counts, is held as codes, axes of its holders)
_Group = tuple[bool, bool, bool, bool, tuple[str, ...]]


def _order(group: _Group) -> tuple[bool, bool, bool, bool, tuple[str, ...], tuple[str, ...]]:
    trainable, stacked, moved, coded, axes = group
    # Trainable buffers first, codes before others; then buffers not replicated over a tensor axis; stacks and biases
    # updated from counts last.
    return not trainable, moved, stacked, not coded, tuple(axis for axis in axes if axis not in HOLDERS), axes


def orthogonalised(flats: Sequence[Sequence[FlatParamSpec]], held: Sequence[int]) -> list[int]:
    """The blocks of `held` with matrices that the optimizer updates whole."""
    return [block for block in held if any(flat.num_orthogonal for flat in flats[block])]


def _check_sliced(cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec]) -> None:
    first = next((param for block in blocks for param in block.params), None)
    # Slicing sets `replicated_over`, so its absence marks a whole parameter.
    if first is None or first.replicated_over is not None:
        return
    if Mesh.of(cluster, plan).total("tensor") > 1:
        raise PlanError(
            f"the plan has a tensor axis, and {first.name} is whole: give what one tensor rank holds "
            "(terrace.plan.slices.slice_blocks)"
        )
