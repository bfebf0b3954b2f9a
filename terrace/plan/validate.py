"""Checks of a plan against its cluster, model and batch. Every error names the value, the rule and the fix."""

import fnmatch
import math
from collections.abc import Mapping, Sequence

from terrace.base.errors import ClusterError, PlanError
from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.as_software import check_software
from terrace.plan.boundaries import leaving
from terrace.plan.chunk_rules import check_tensor_chunks
from terrace.plan.context import attention_heads, is_context_parallel, num_ring_ranks
from terrace.plan.context_rules import check_linear, why_whole
from terrace.plan.keep_rules import check_keep
from terrace.plan.layout import DEVICE, Layout
from terrace.plan.members import check_order, check_shares, num_shared_micros
from terrace.plan.mesh import Mesh, tier_degrees
from terrace.plan.order_file import schedule_words
from terrace.plan.outer_rules import check_outer, check_outer_tier
from terrace.plan.plan import AXES, Plan
from terrace.plan.products import check_products
from terrace.plan.recompute import WHOLE, Recomputation, meant, operations_named, parse_recomputation, recomputed_parts
from terrace.plan.score_clip import check_score_clip
from terrace.plan.stack_rules import (
    check_chunks,
    check_gaps,
    check_stack_table,
    check_stacks,
    check_table,
    refuse_unscaled_losses,
)
from terrace.plan.state_bytes import moments
from terrace.plan.table_rules import check_vocabulary, check_vocabulary_tiers
from terrace.plan.update import OWN, parse_update
from terrace.plan.whole_rules import check_whole_matrices
from terrace.plan.wire import FORMATS, by_boundary
from terrace.plan.wire_rules import check_wire

# Each sum in bf16 may lose 1/256 of its value: eight micro-batches lose at most as much as two int8 messages.
LONGEST_ROUNDED_UNIT = 8


def validate(cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec]) -> Layout:
    """Check a plan and return its settled layout. Raises `PlanError` for the first broken rule."""
    _check_mapping(cluster, plan)
    check_order(cluster, plan)
    check_outer_tier(cluster, plan.outer)
    check_vocabulary_tiers(cluster, plan)
    try:
        layout = Layout.written(cluster, plan)
    except ClusterError as error:
        raise PlanError(f"plan {plan.name!r} places a state on a tier that is not there: {error}") from error
    _check_placements(plan, layout)
    _check_depth(cluster, plan, layout)
    check_outer(cluster, plan, blocks)
    check_fp16(plan, blocks)
    check_wire(plan, layout)
    _check_numbers(cluster, plan, blocks)
    check_context(cluster, plan, blocks)
    check_stacks(cluster, plan, blocks)
    check_vocabulary(cluster, plan, blocks)
    check_keep(cluster, plan)
    _check_codes(plan, blocks)
    check_shares(cluster, plan, layout.settled())
    if parse_update(plan.update).takes_whole:
        check_whole_matrices(cluster, plan, blocks)
    check_score_clip(plan, blocks)
    layout = layout.settled()
    check_software(cluster, plan, layout)
    return layout


def num_micro_batches(plan: Plan, layout: Layout, batch: int) -> int:
    """Number of micro-batches per rank for a global batch of `batch` sequences; the largest, where members differ.

    Raises `PlanError` if the batch does not divide.
    """
    check_micro_batch(plan)
    if plan.shares:
        return num_shared_micros(plan, layout, batch)
    # Sequences in one micro-batch of all data ranks.
    unit = plan.micro_batch * layout.data_degree
    if batch < 1 or batch % unit:
        below = max(0, batch) // unit * unit
        near = f"{below} or {below + unit}" if below else f"{unit}"
        raise PlanError(
            f"batch = {batch} is not a multiple of micro_batch x data ranks = {plan.micro_batch} x "
            f"{layout.data_degree} = {unit}: use {near}, or another plan.micro_batch"
        )
    return batch // unit


def check_micro_batch(plan: Plan) -> None:
    """Raise `PlanError` if `micro_batch` is below 1."""
    if plan.micro_batch < 1:
        raise PlanError(f"micro_batch = {plan.micro_batch}: a rank works on at least 1 sequence at a time")


def check_units(plan: Plan, num_micros: int) -> None:
    """Raise `PlanError` if gradients are kept below the device and a step adds to them more than once."""
    if not plan.keep.grads_below or plan.unit >= num_micros:
        return
    fix = f"write unit = {num_micros}, or a larger micro_batch"
    if plan.compute != plan.sums and num_micros > LONGEST_ROUNDED_UNIT:
        fix = (
            f"gradients of a unit are added up in {plan.compute}, so it has at most {LONGEST_ROUNDED_UNIT}: write a "
            "larger micro_batch"
        )
    raise PlanError(
        f"keep.grads = {plan.keep.grads!r} and unit = {plan.unit}: gradients leave the device once a step, so all "
        f"{num_micros} micro-batches must pass a block in a row; {fix}, or leave keep.grads out"
    )


def _check_mapping(cluster: Cluster, plan: Plan) -> None:
    sizes = {tier.name: tier.size for tier in cluster.tiers}
    check_table("mapping", plan.mapping, sizes, AXES)
    for name, row in plan.mapping.items():
        product = math.prod(tier_degrees(row).values())
        if product != sizes[name]:
            raise PlanError(
                f"the degrees of mapping.{name} multiply to {product}, but tier {name!r} joins {sizes[name]}: "
                f"make them multiply to {sizes[name]}, or leave the row out to give the tier to the data axis"
            )
    check_stack_table(plan, sizes)


def _check_depth(cluster: Cluster, plan: Plan, layout: Layout) -> None:
    for index, tier in enumerate(cluster.tiers):
        # Depth is a data axis that shards weights, so params must be placed at least as far out.
        tensor = plan.mapping.get(tier.name, {}).get("tensor", 1)
        depth = tensor.get("depth", 1) if isinstance(tensor, Mapping) else 1
        if depth > 1 and layout.params < index:
            raise PlanError(
                f"mapping.{tier.name}.tensor.depth = {depth} shards weights over {tier.name!r}, but params = "
                f"{plan.params!r} lies inside it: place params on {tier.name!r} or further out, or give its ranks to "
                "the data axis"
            )


def _check_placements(plan: Plan, layout: Layout) -> None:
    order = " <= ".join(("device", *layout.tiers))
    for inner, outer in (("params", "grads"), ("grads", "optimizer")):
        if getattr(layout, inner) > getattr(layout, outer):
            raise PlanError(
                f"{inner} = {getattr(plan, inner)!r} lies outside {outer} = {getattr(plan, outer)!r}: placements "
                f"must satisfy params <= grads <= optimizer in the order {order}; "
                f"place {outer} on {getattr(plan, inner)!r} or further out"
            )
    if plan.params_backward is None:
        return
    if layout.params_backward == DEVICE:
        raise PlanError(
            "params_backward = 'device' keeps a whole copy of the parameters: write params = 'device' instead"
        )
    if layout.params_backward >= layout.params:
        raise PlanError(
            f"params_backward = {plan.params_backward!r} does not lie inside params = {plan.params!r}: "
            "name a tier further in, or leave params_backward out"
        )


def check_context(cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec]) -> None:
    """Raise `PlanError` if the plan's context axis or `balance` does not work for this model."""
    mesh = Mesh.of(cluster, plan)
    if plan.balance == "cost" and num_ring_ranks(mesh, plan) == 1:
        raise PlanError(
            'balance = "cost" has no effect: attention is shared among the ranks of the ring and of the data axis, and '
            "there is one; give a tier to either, or leave balance out"
        )
    if not is_context_parallel(mesh, plan):
        return
    if why := why_whole(blocks, balance=plan.balance):
        raise PlanError(f"this model cannot be spread over context ranks: {why}; give the tier to another axis")
    ulysses, rows = mesh.total("ulysses"), mesh.total("rows")
    check_linear(blocks, 0, mesh.total("ring"), ulysses)
    found = {block.name: attention_heads(block, rows) for block in blocks}
    # Attention is split by declared heads; linear layers, which check_linear has passed, need none.
    if not any(found.values()) and not any(block.operations.delta.heads for block in blocks):
        asked = 'balance = "cost"' if plan.balance == "cost" else "the context axis of the mapping"
        raise PlanError(
            f"{asked} spreads attention over ranks, and no block of this model declares its heads: give the tier to "
            'the data axis and leave balance out, or use a model whose parameters declare dims "heads" and "kv_heads"'
        )
    for name, heads in found.items():
        if heads is not None and not heads.can_split(ulysses):
            # List valid degrees: divisibility by both head counts is hard to see.
            valid = [str(degree) for degree in range(1, heads.queries + 1) if heads.can_split(degree)]
            raise PlanError(
                f"ulysses = {ulysses} over all tiers cannot split the {heads.queries} heads and {heads.keys} key-value "
                f"heads of {name}{f' on one of {rows} tensor rows' if rows > 1 else ''}: it must divide the heads, "
                f"and divide the key-value heads or be a multiple of them; use {' or '.join(valid)}, or a ring"
            )


def _check_codes(plan: Plan, blocks: Sequence[BlockSpec]) -> None:
    code = next((param.code for block in blocks for param in block.params if param.code), "")
    if code and plan.keep.params_below:
        raise PlanError(
            f"keep.params = {plan.keep.params!r} beside frozen matrices in {code} (lora.base): a gather decodes them "
            "from the device's memory; leave one of them out"
        )


def _check_numbers(cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec]) -> None:
    check_micro_batch(plan)
    if plan.unit < 1:
        raise PlanError(f"unit = {plan.unit}: at least 1 micro-batch passes a block at a time")
    # Gradients within a unit are summed in the compute dtype; units are summed in the master dtype.
    if plan.unit > LONGEST_ROUNDED_UNIT and plan.compute != plan.sums:
        raise PlanError(
            f"unit = {plan.unit} with compute = {plan.compute!r}: the gradients of a unit are added up in "
            f"{plan.compute}, which rounds after each micro-batch; use at most {LONGEST_ROUNDED_UNIT}, and "
            "no more than a rank has micro-batches"
        )
    check_tensor_chunks(cluster, plan, blocks)
    check_chunks(plan)
    check_gaps(cluster, plan)
    if plan.prefetch < 0:
        raise PlanError(f"prefetch = {plan.prefetch}: use 0 for no prefetch, or a positive distance")
    if Mesh.of(cluster, plan).total("pipeline") == 1:
        if plan.schedule is not None:
            raise PlanError(
                f"schedule = {schedule_words(plan.schedule)} has no effect without a pipeline axis: leave it out"
            )
        if plan.stages:
            raise PlanError(f"stages = {list(plan.stages)} has no effect without a pipeline axis: leave it out")
    if FORMATS[plan.messages or plan.compute].mantissa_bits > FORMATS[plan.compute].mantissa_bits:
        raise PlanError(
            f"messages = {plan.messages!r} is wider than the {plan.compute} values they would carry: use "
            f"{plan.compute!r} or leave it out"
        )
    if FORMATS[plan.compute].mantissa_bits > FORMATS[plan.master].mantissa_bits:
        raise PlanError(
            f"compute = {plan.compute!r} is wider than master = {plan.master!r}: use master = {plan.compute!r}"
        )
    if parse_update(plan.update).name == OWN:
        _check_own(plan)
    if plan.optimizer_states is not None and not moments(plan.update, 1, 1):
        raise PlanError(
            f"optimizer_states = {plan.optimizer_states!r} has no effect: optimizer {plan.update!r} keeps no state "
            "besides the parameters; leave it out"
        )
    check_recompute(Mesh.of(cluster, plan), plan, blocks)
    leaving(plan.keep, blocks)  # raises for names of no block
    check_products(cluster.device, Mesh.of(cluster, plan), plan, blocks)


def _check_own(plan: Plan) -> None:
    if plan.optimizer_states is not None:
        raise PlanError(
            f"optimizer_states = {plan.optimizer_states!r} rounds the states of {plan.update!r}, some of which may be "
            "numbers of a whole parameter: leave it out"
        )
    if plan.keep.optimizer_below:
        raise PlanError(
            f"keep.optimizer = {plan.keep.optimizer!r} with optimizer {plan.update!r} is not built: use 'adamw', or "
            "leave keep.optimizer out"
        )
    if plan.vocabulary:
        raise PlanError(
            f"vocabulary with optimizer {plan.update!r}: rows that a step leaves out would have no first state; use "
            "'adamw', or leave vocabulary out"
        )


def check_fp16(plan: Plan, blocks: Sequence[BlockSpec]) -> None:
    """Raise `PlanError` for settings that do not work with loss scaling, or for fp16 messages without it."""
    if plan.compute != "fp16":
        for message, row in plan.wire.items():
            for tier, name in row.items():
                if "fp16" in by_boundary(name):
                    raise PlanError(
                        f"wire.{message}.{tier} = {name!r} under compute = {plan.compute!r}: gradients beyond 65504 "
                        "would be infinite; write 'bf16'"
                    )
        return
    asked = "compute = 'fp16'"
    if plan.master == "bf16":
        raise PlanError(
            f"{asked} with master = 'bf16', which is less precise: use master = 'fp32', or compute in 'bf16'"
        )
    if plan.messages is not None or plan.wire:
        named = f"messages = {plan.messages!r}" if plan.messages is not None else f"formats for {', '.join(plan.wire)}"
        raise PlanError(f"{asked} with {named}: what it computes travels in fp16 alone; leave them out, or use 'bf16'")
    if plan.outer.has_islands:
        raise PlanError(
            f"{asked} with islands: a step that is skipped is skipped by all ranks, and islands meet only now and "
            "then; leave outer out, or use 'bf16'"
        )
    refuse_unscaled_losses(asked, blocks)


def check_recompute(mesh: Mesh, plan: Plan, blocks: Sequence[BlockSpec]) -> None:
    """Raise `PlanError` for an entry that matches nothing, or an operation that cannot be recomputed separately."""
    names = [block.name for block in blocks]
    for entry in plan.recompute:
        _check_names(entry, parse_recomputation(entry), names, blocks)
    parts = recomputed_parts(plan.recompute, blocks)
    named = {operation for each in parts if each != WHOLE for operation in each}
    if "attention" in named and is_context_parallel(mesh, plan):
        raise PlanError(
            "recompute names attention, and this plan's ranks attend together (a context axis, or balance = 'cost'): "
            "its messages would be sent again; recompute whole layers, or leave attention out"
        )
    if "norms" in named and mesh.total("tensor") > 1:
        raise PlanError(
            "recompute names norms under a tensor axis, whose ranks gather what norms compute: recompute attention, "
            "mlp or whole layers"
        )
    if named and plan.tensor_chunks != 1:
        raise PlanError(
            f"recompute names {', '.join(sorted(named))} with tensor_chunks = {plan.tensor_chunks!r}, which pads and "
            "keeps the parts of their results: leave tensor_chunks out, or recompute whole layers"
        )
    for block, each in zip(blocks, parts, strict=True):
        if "norms" in each and block.declared.each and not operations_named(block.declared, "norms"):
            raise PlanError(
                f"recompute names norms of {block.name}, which has none before attention and MLP: recompute attention, "
                "mlp or the whole layer"
            )
        if block.has_stacks and {"mlp", "norms"} & {*each}:
            raise PlanError(
                f"recompute names {', '.join({'mlp', 'norms'} & {*each})} of {block.name}, a mixture of experts, which "
                "keeps what its gate and experts read: recompute its attention, or the whole layer"
            )


def _check_names(entry: str, read: Recomputation, names: Sequence[str], blocks: Sequence[BlockSpec]) -> None:
    if not fnmatch.filter(names, read.pattern):
        raise PlanError(f"recompute pattern {read.pattern!r} matches no block{meant(read.pattern, names)}")
    if not read.selects(names, [block.attends for block in blocks]):
        raise PlanError(
            f"recompute {entry!r}: no decoder layer matches {read.pattern!r}, and no other block has operations; leave "
            f"{', '.join(read.operations)} out"
        )
