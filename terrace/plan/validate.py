"""Checks of a plan against its cluster, model and batch. Every message carries the value, the rule and the fix."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from terrace.base.errors import ClusterError, PlanError, did_you_mean
from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.chunk_rules import check_tensor_chunks
from terrace.plan.context import attention_heads, is_context_parallel, num_ring_ranks
from terrace.plan.context_rules import why_whole
from terrace.plan.dims import is_layer
from terrace.plan.fp16_rules import check_fp16
from terrace.plan.gaps import num_gaps
from terrace.plan.layout import DEVICE, Layout, message_lane, message_tiers
from terrace.plan.mesh import EXPERT_AXES, STAGE, Mesh, tier_degrees
from terrace.plan.outer_rules import check_outer, check_outer_tier
from terrace.plan.plan import AXES, EXPERT_CHUNKS, FACTORS, Plan
from terrace.plan.products import check_products
from terrace.plan.recompute_rules import check_recompute
from terrace.plan.state_bytes import moments
from terrace.plan.wire import (
    FORMATS,
    GRADIENTS,
)
from terrace.plan.wire_rules import check_wire

# Each sum in bf16 may lose 1/256 of itself: eight micro-batches stay within what two wire messages lose in int8.
LONGEST_ROUNDED_UNIT = 8
MOST_CHUNKS = 64  # of the tokens of a micro-batch: each is a message over every tier
SHARES_ROUNDED = 1e-6  # by which the sum of shares may be off: files have decimals


def validate(cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec]) -> Layout:
    """The settled layout of a valid plan; raises `PlanError` with the first rule it breaks."""
    _check_mapping(cluster, plan)
    check_outer_tier(cluster, plan.outer)
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
    _check_experts(cluster, plan, blocks)
    if plan.update == "muon":
        _check_muon(cluster, plan, blocks)
    return layout.settled()


def num_micro_batches(plan: Plan, layout: Layout, batch: int) -> int:
    """Micro-batches of each rank for a global batch of `batch` sequences.

    Raises `PlanError` when the batch does not divide.
    """
    check_micro_batch(plan)
    # Sequences that all data ranks take in one micro-batch.
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
    """Raise `PlanError` for micro-batches without a sequence."""
    if plan.micro_batch < 1:
        raise PlanError(f"micro_batch = {plan.micro_batch}: a rank works on at least 1 sequence at a time")


def _check_mapping(cluster: Cluster, plan: Plan) -> None:
    sizes = {tier.name: tier.size for tier in cluster.tiers}
    _check_table("mapping", plan.mapping, sizes, AXES)
    for name, row in plan.mapping.items():
        product = math.prod(tier_degrees(row).values())
        if product != sizes[name]:
            raise PlanError(
                f"the degrees of mapping.{name} multiply to {product}, but tier {name!r} joins {sizes[name]}: "
                f"make them multiply to {sizes[name]}, or leave the row out to give the tier to the data axis"
            )
    _check_table("experts", plan.experts, sizes, EXPERT_AXES)
    for name, degrees in plan.experts.items():
        # Stages do not share experts.
        members = sizes[name] // tier_degrees(plan.mapping.get(name, {})).get("pipeline", 1)
        product = math.prod(degrees.values())
        if members % product:
            raise PlanError(
                f"the degrees of experts.{name} multiply to {product}, which does not divide the {members} ranks of a "
                f"stage on tier {name!r}: use degrees that do"
            )


def _check_table(
    table: str, rows: Mapping[str, Mapping[str, Any]], sizes: Mapping[str, int], axes: Collection[str]
) -> None:
    for name, row in rows.items():
        if name not in sizes:
            raise PlanError(f"{table} names tier {name!r}, which is not in the cluster{did_you_mean(name, sizes)}")
        for axis, degree in row.items():
            if axis not in axes:
                hint = axis_hint(name, axis) if axes is AXES else did_you_mean(axis, axes)
                raise PlanError(f"{table}.{name} names axis {axis!r}{hint}")
            check_degree(f"{table}.{name}.{axis}", axis, degree)


def axis_hint(tier: str, word: str) -> str:
    """Suggestion for `word`, found where a tier's mapping expects an axis."""
    for axis, factors in FACTORS.items():
        if word in factors:
            return f", which is a part of {axis}: write mapping.{tier}.{axis}.{word}"
    return did_you_mean(word, AXES)


def check_degree(where: str, axis: str, degree: int | Mapping[str, int]) -> None:
    """Raise `PlanError` unless `degree`, which stands at `where`, can be one of `axis`."""
    # Factored axes nest: each factor is checked like an axis of its own.
    if isinstance(degree, Mapping):
        if axis not in FACTORS:
            raise PlanError(
                f"{where} = {dict(degree)}: only the {' and the '.join(FACTORS)} axis are factored; give one number"
            )
        for factor, number in degree.items():
            if factor not in FACTORS[axis]:
                raise PlanError(f"{where} names {factor!r}{did_you_mean(factor, FACTORS[axis])}")
            check_degree(f"{where}.{factor}", factor, number)
    elif degree < 1:
        raise PlanError(f"{where} = {degree}: a degree is at least 1")


def _check_depth(cluster: Cluster, plan: Plan, layout: Layout) -> None:
    for index, tier in enumerate(cluster.tiers):
        # Depth is a data axis with weights sharded over it, so params must be placed at least as far out.
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
    """Raise `PlanError` where attention cannot be spread over ranks as the plan says."""
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
    found = {block.name: attention_heads(block, rows) for block in blocks}
    # Without declared heads nothing says how attention may be split.
    if not any(found.values()):
        asked = 'balance = "cost"' if plan.balance == "cost" else "the context axis of the mapping"
        raise PlanError(
            f"{asked} spreads attention over ranks, and no block of this model declares its heads: give the tier to "
            'the data axis and leave balance out, or use a model whose parameters declare dims "heads" and "kv_heads"'
        )
    for name, heads in found.items():
        if heads is not None and not heads.can_split(ulysses):
            # Valid degrees are listed: divisibility by both head counts is hard to see.
            valid = [str(degree) for degree in range(1, heads.queries + 1) if heads.can_split(degree)]
            raise PlanError(
                f"ulysses = {ulysses} over all tiers cannot split the {heads.queries} heads and {heads.keys} key-value "
                f"heads of {name}{f' on one of {rows} tensor rows' if rows > 1 else ''}: it must divide the heads, "
                f"and divide the key-value heads or be a multiple of them; use {' or '.join(valid)}, or a ring"
            )


def _check_experts(cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec]) -> None:
    columns = Mesh.of(cluster, plan).total("columns")
    if plan.experts and not any(block.has_stacks for block in blocks):
        raise PlanError("the table experts has no effect: no layer of this model has experts; leave it out")
    of_experts = Mesh.of(cluster, plan).experts
    if plan.update == "muon" and of_experts is not None and of_experts.total("rows") > 1:
        raise PlanError("optimizer 'muon' takes whole matrices, and rows of the table experts cut them: use expert")
    for name, param in ((f"{block.name}.{param.name}", param) for block in blocks for param in block.params):
        if param.is_stack and columns > 1:
            raise PlanError(
                f"the mapping has {columns} tensor columns, and {name} holds {param.num_parts} experts, for which a "
                "token must be whole: use tensor rows, or give the ranks to another axis"
            )


def _check_chunks(plan: Plan) -> None:
    for name, number in plan.expert_chunks.items():
        if name not in EXPERT_CHUNKS:
            known = ", ".join(EXPERT_CHUNKS)
            raise PlanError(f"expert_chunks.{name} is none of {known}{did_you_mean(name, EXPERT_CHUNKS)}")
        if not 1 <= number <= MOST_CHUNKS:
            raise PlanError(f"expert_chunks.{name} = {number}: tokens travel in 1 to {MOST_CHUNKS} chunks")
    if not plan.expert_chunks:
        return
    if not plan.experts:
        raise PlanError(
            "expert_chunks has no effect: every rank has all experts; leave it out, or spread them with the table "
            "experts"
        )
    forward, backward, ahead = (plan.expert_chunks.get(name, 1) for name in EXPERT_CHUNKS)
    if ahead > 1 and ahead >= max(forward, backward):
        raise PlanError(
            f"expert_chunks.ahead = {ahead}: of {max(forward, backward)} chunks at most "
            f"{max(1, max(forward, backward) - 1)} can be ahead of the one that is multiplied; lower it, or name more "
            "chunks in forward or backward"
        )
    if ahead > 1 and plan.expert_hops < 2:
        raise PlanError(
            f"expert_chunks.ahead = {ahead} has no effect: on a way over one tier all chunks go out first; leave it out"
        )
    if max(forward, backward) % min(forward, backward):
        raise PlanError(
            f"expert_chunks has {forward} chunks in the forward and {backward} in the backward: a chunk of one is a "
            "number of chunks of the other, so one number must divide the other"
        )


def _check_gaps(cluster: Cluster, plan: Plan) -> None:
    shares, chunks = plan.expert_gaps, plan.expert_chunks.get("backward", 1)
    if not shares:
        return
    if not plan.experts:
        raise PlanError(
            "expert_gaps has no effect: every rank has all experts; leave it out, or spread them with the table experts"
        )
    if not isinstance(shares, str):
        text = f"expert_gaps = {list(shares)}"
        if not all(0 <= share < math.inf for share in shares) or abs(sum(shares) - 1) > SHARES_ROUNDED:
            raise PlanError(f"{text}: shares of a gradient are numbers of at least 0 that add up to 1")
        if len(shares) > num_gaps(chunks):
            raise PlanError(
                f"{text} has {len(shares)} shares, and a backward of {chunks} chunks has {num_gaps(chunks)} places for "
                "them, the one before its messages included: leave the rest out"
            )
        if not any(shares[1:]):
            raise PlanError(f"{text} has no effect: without it all of a gradient leaves first, too; leave it out")
    layout, mesh = Layout.of(cluster, plan, STAGE), Mesh.of(cluster, plan).experts
    rows = {tier for tier, degree in enumerate(mesh.group(*EXPERT_AXES) if mesh else ()) if degree > 1}
    if not any(message_tiers(layout, each) and message_lane(layout, each) in rows for each in GRADIENTS):
        raise PlanError(
            f"expert_gaps has no effect: under grads = {plan.grads!r}, optimizer = {plan.optimizer!r} no message of "
            "gradients has a tier in common with the table experts as its outermost; leave it out"
        )


def _check_muon(cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec]) -> None:
    if Mesh.of(cluster, plan).total("tensor") > 1:
        raise PlanError(
            "optimizer 'muon' takes whole matrices, and the tensor axis cuts them: give the tier to the data axis, "
            "or use 'adamw' or 'lion'"
        )
    # Embedding and head are left to AdamW, as in Jordan's Muon.
    inner = [param for index, block in enumerate(blocks) if is_layer(blocks, index) for param in block.params]
    # `decays` marks the weight matrices, as opposed to norms and biases.
    matrices = [param for param in inner if param.trainable and param.decays and param.numel]
    if not matrices:
        raise PlanError("optimizer 'muon' has no effect: no layer has a matrix that trains; use 'adamw'")
    for param in matrices:
        if not param.is_matrix:
            raise PlanError(f"optimizer 'muon' takes matrices, and {param.name} has shape {param.shape}: use 'adamw'")


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
    _check_chunks(plan)
    _check_gaps(cluster, plan)
    if plan.prefetch < 0:
        raise PlanError(f"prefetch = {plan.prefetch}: use 0 for no prefetch, or a positive distance")
    if Mesh.of(cluster, plan).total("pipeline") == 1:
        if plan.schedule is not None:
            raise PlanError(f"schedule = {plan.schedule!r} has no effect without a pipeline axis: leave it out")
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
    if plan.optimizer_states is not None and not moments(plan.update, 1, 1):
        raise PlanError(
            f"optimizer_states = {plan.optimizer_states!r} has no effect: optimizer {plan.update!r} keeps no state "
            "besides the parameters; leave it out"
        )
    check_recompute(Mesh.of(cluster, plan), plan, blocks)
    check_products(cluster.device, Mesh.of(cluster, plan), plan, blocks)
