"""The flat buffers of a block: which parameters share a buffer, and which ranks hold it.

Parameters of a block share a buffer if they are replicated over the same axes and are all trainable or all frozen.
Without a tensor axis that is one trainable and one frozen buffer. Parameters that the tensor axis does not cut (norms,
for example) have separate buffers, which tensor ranks shard as data ranks do. Also in separate buffers: expert stacks,
if the plan factors the ranks separately for them; gate biases that are updated from token counts, whole on every rank;
matrices held as 8-bit codes; frozen matrices held in a format of their own (terrace.model.base_formats); and tables
whose rows are spread over ranks (terrace.plan.tables).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from terrace.base.alike import once_each
from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.model.base_formats import BASE_FORMATS, CONSTANT_BYTES
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.dims import is_layer, is_product_matrix
from terrace.plan.layout import Layout
from terrace.plan.mesh import HOLDERS, ORDER, STAGE, Mesh
from terrace.plan.plan import Plan
from terrace.plan.update import Extent, MatrixSlice, parse_update
from terrace.plan.wire import CODES, FORMATS, ROUTES, MessageClass


@dataclass(frozen=True)
class FlatParamSpec:
    """One flat buffer: its parameters in order, weight-decayed matrices first, and the layout of its slices.

    The first `num_orthogonal` elements are matrices that the optimizer updates whole (those of layers under Muon,
    GaLore and LSP). If `is_coded`, the working copy holds the matrices' 8-bit codes (terrace.runtime.matrix_codes).
    """

    layout: Layout
    params: tuple[ParamSpec, ...]
    trainable: bool
    num_orthogonal: int = 0
    is_coded: bool = False

    @cached_property
    def extents(self) -> tuple[tuple[ParamSpec, int, int], ...]:
        """(Parameter, start, stop) of each parameter in the buffer."""
        stops = accumulate(param.numel for param in self.params)
        return tuple((param, stop - param.numel, stop) for param, stop in zip(self.params, stops, strict=True))

    @cached_property
    def orthogonal(self) -> tuple[Extent, ...]:
        """The matrices that the optimizer updates whole: shapes before slicing, and where this rank's parts lie.

        Each matrix of a stack is listed separately.
        """
        found = list[Extent]()
        for param, start, _ in self.extents:
            if start >= self.num_orthogonal:
                break
            size = param.numel // param.num_parts
            begins = (start + part * size for part in range(param.num_parts))
            found += [(param.whole_part_shape, begin, begin + size) for begin in begins]
        return tuple(found)

    @cached_property
    def matrix_slices(self) -> tuple[MatrixSlice, ...]:
        """The slices that ranks own under an optimizer that updates matrices whole; equal ones are listed once.

        Empty without such matrices.
        """
        if not self.num_orthogonal:
            return ()
        size, found = self.padded // self.layout.span(self.layout.optimizer), set[MatrixSlice]()
        # Slices differ only where a matrix begins or ends, and at the end of the buffer.
        positions = {min(self.num_orthogonal, self.padded - 1), self.padded - 1}
        for _, begin, end in self.orthogonal:
            positions |= {begin, end - 1}
        for number in {position // size for position in positions}:
            start, stop = number * size, (number + 1) * size
            shapes = tuple(shape for shape, begin, end in self.orthogonal if begin < stop and end > start)
            found.add((shapes, min(size, max(0, stop - self.num_orthogonal))))
        return tuple(sorted(found))

    @property
    def gathered_numel(self) -> int:
        """Elements of the buffer in which ORTHOGONALISE gathers matrices; 0 if each rank's slice has them whole."""
        if not self.num_orthogonal:
            return 0
        cut = self.layout.across.degree
        return self.padded * cut if cut * self.layout.span(self.layout.optimizer) > 1 else 0

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
        return CODES.element_bytes if self.is_coded else FORMATS[self.dtype(plan)].element_bytes

    def stored_bytes(self, plan: Plan, numel: int) -> int:
        """Bytes of `numel` elements of a slice as a rank stores them between gathers."""
        code = self.layout.code
        return BASE_FORMATS[code].coded_bytes(numel) if code else numel * self.element_bytes(plan)

    @property
    def constants_bytes(self) -> int:
        """Bytes of the constants of frozen matrices held in codes, which every rank has; else 0."""
        return CONSTANT_BYTES * sum(param.num_constants for param in self.params)

    @property
    def num_scales(self) -> int:
        """Number of scales: one per matrix held as codes."""
        return len(self.params) if self.is_coded else 0

    @cached_property
    def is_spread(self) -> bool:
        """Whether it holds this rank's rows of a spread table; only the rows that a step uses have gradients."""
        return any(param.is_spread for param in self.params)

    @cached_property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)

    def travels_in(self, message: MessageClass) -> bool:
        carries = ROUTES[message].carries
        # Parameters that are whole on every rank need no gather.
        if message in (MessageClass.GATHER, MessageClass.GATHER_BACKWARD):
            return self.layout.gathers
        if carries == "change":
            return self.trainable and self.layout.num_islands > 1
        if self.is_spread:  # gradients of rows are dispatched inside the backward
            return False
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
    mesh, layouts = Mesh.of(cluster, plan), {("", layout.axes): layout for layout in known}

    def flats(block: tuple[tuple[ParamSpec, ...], bool]) -> tuple[FlatParamSpec, ...]:
        params, layer = block
        groups: dict[_Group, list[ParamSpec]] = {}
        for param in params:
            # Without slicing, `replicated_over` is unset and the data ranks hold everything.
            held_over = HOLDERS if param.replicated_over is None else param.replicated_over
            own = mesh.of_param(param)
            axes = tuple(axis for axis in STAGE if axis in held_over and own.total(axis) > 1)
            # An empty parameter cannot train, and would force a buffer of its own.
            coded = codes and layer and is_product_matrix(param)
            key = param.trainable and param.numel > 0, _factoring(param, mesh), param.is_expert_bias, coded, axes
            groups.setdefault(key, []).append(param)
        made = []
        for group in sorted(groups, key=_order):
            trainable, factoring, moved, coded, axes = group
            # One Layout object per set of ranks, shared by all flat buffers.
            if (factoring, axes) not in layouts:
                layouts[factoring, axes] = Layout.of(cluster, plan, axes, mesh.of_param(groups[group][0]))
            # Matrices first, and then what decays else: the optimizer applies weight decay to one contiguous prefix.
            ordered = tuple(sorted(groups[group], key=lambda param: (not param.decays, not param.is_matrix)))
            matrices = [param for param in ordered if param.is_matrix] if takes_whole and layer and trainable else []
            whole = sum(param.numel for param in matrices)
            layout = layouts[factoring, axes]
            layout = layout.whole() if moved or factoring == _TABLES else layout
            layout = replace(layout, code=ordered[0].code) if ordered[0].code else layout
            made.append(FlatParamSpec(layout, ordered, trainable, whole, coded))
        return tuple(made)

    takes_whole, codes = parse_update(plan.update).takes_whole, plan.shares_scales
    asks = takes_whole or codes
    if layers is None:
        layers = [asks and is_layer(blocks, index) for index in range(len(blocks))]
    return tuple(
        once_each(flats, [(block.params, asks and layer) for block, layer in zip(blocks, layers, strict=True)])
    )


# (is trainable, factoring, is updated from counts, is held as codes, axes of its holders)
_Group = tuple[bool, str, bool, bool, tuple[str, ...]]
_STACKS, _TABLES = "stacks", "tables"  # parameters with a factoring or a code of their own; "" for all others


def _factoring(param: ParamSpec, mesh: Mesh) -> str:
    return _TABLES if param.is_spread else _STACKS if param.is_stack and mesh.divides_stacks else param.code


def _order(group: _Group) -> tuple[bool, bool, str, bool, tuple[str, ...], tuple[str, ...]]:
    trainable, factoring, moved, coded, axes = group
    # Trainable buffers first, codes before others; then buffers not replicated over a tensor axis; stacks, tables and
    # biases updated from counts last.
    return not trainable, moved, factoring, not coded, tuple(axis for axis in axes if axis not in HOLDERS), axes


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
