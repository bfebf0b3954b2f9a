"""Rules for the plan keys `experts`, `expert_chunks` and `expert_gaps`."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from terrace.base.errors import PlanError, did_you_mean
from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.dims import has_routers
from terrace.plan.layout import Layout, message_lane, message_tiers
from terrace.plan.mesh import STACK_AXES, STAGE, Mesh, tier_degrees
from terrace.plan.plan import AXES, EXPERT_CHUNKS, FACTORS, Plan, num_gaps
from terrace.plan.update import parse_update
from terrace.plan.wire import GRADIENTS

MOST_CHUNKS = 64  # chunks of a micro-batch's tokens; each is a message over every tier
SHARES_ROUNDED = 1e-6  # tolerance for the sum of shares, which files round to decimals


def check_stack_table(plan: Plan, sizes: Mapping[str, int]) -> None:
    """Raise `PlanError` if the table `experts` does not fit the tiers; `sizes` maps tier names to sizes."""
    check_table("experts", plan.experts, sizes, STACK_AXES)
    for name, degrees in plan.experts.items():
        # Stages do not share experts.
        members = sizes[name] // tier_degrees(plan.mapping.get(name, {})).get("pipeline", 1)
        product = math.prod(degrees.values())
        if members % product:
            raise PlanError(
                f"the degrees of experts.{name} multiply to {product}, which does not divide the {members} ranks of a "
                f"stage on tier {name!r}: use degrees that do"
            )


def check_stacks(cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec]) -> None:
    """Raise `PlanError` if the model or the optimizer does not support the table `experts`."""
    columns = Mesh.of(cluster, plan).total("columns")
    if plan.experts and not any(block.has_stacks for block in blocks):
        raise PlanError("the table experts has no effect: no layer of this model has experts; leave it out")
    rule = parse_update(plan.update)
    if rule.projects and Mesh.of(cluster, plan).stack_degrees[1] > 1:
        raise PlanError(
            f"optimizer {rule.name!r} keeps projectors of whole matrices, and rows of the table experts cut them: use "
            "expert, or 'muon'"
        )
    for block in blocks if columns > 1 else ():
        stack = next((param for param in block.params if param.is_stack), None)
        if stack is not None:
            raise PlanError(
                f"the mapping has {columns} tensor columns, and {block.name}.{stack.name} holds {stack.num_parts} "
                "experts, for which a token must be whole: use tensor rows, or give the ranks to another axis"
            )


def refuse_unscaled_losses(asked: str, blocks: Sequence[BlockSpec]) -> None:
    """Raise `PlanError` for routers under a loss scale; `asked` is the setting that needs the scale."""
    if has_routers(blocks):
        raise PlanError(
            f"{asked} with a mixture of experts: losses of its routers are not scaled; use 'bf16' or 'fp32'"
        )


def check_chunks(plan: Plan) -> None:
    """Raise `PlanError` for `expert_chunks` that are invalid or have no effect."""
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


def check_gaps(cluster: Cluster, plan: Plan) -> None:
    """Raise `PlanError` for `expert_gaps` that are invalid or have no effect."""
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
    layout, lanes = Layout.of(cluster, plan, STAGE), Mesh.of(cluster, plan).stack_tiers
    if not any(message_tiers(layout, each) and message_lane(layout, each) in lanes for each in GRADIENTS):
        raise PlanError(
            f"expert_gaps has no effect: under grads = {plan.grads!r}, optimizer = {plan.optimizer!r} no message of "
            "gradients has a tier in common with the table experts as its outermost; leave it out"
        )


def check_table(
    table: str, rows: Mapping[str, Mapping[str, Any]], sizes: Mapping[str, int], axes: Collection[str]
) -> None:
    """Raise `PlanError` for a tier not in `sizes`, an axis not in `axes`, or an invalid degree."""
    for name, row in rows.items():
        if name not in sizes:
            raise PlanError(f"{table} names tier {name!r}, which is not in the cluster{did_you_mean(name, sizes)}")
        for axis, degree in row.items():
            if axis not in axes:
                hint = _axis_hint(name, axis) if axes is AXES else did_you_mean(axis, axes)
                raise PlanError(f"{table}.{name} names axis {axis!r}{hint}")
            _check_degree(f"{table}.{name}.{axis}", axis, degree)


def _axis_hint(tier: str, word: str) -> str:
    """Suggestion for `word`, written where a tier's mapping expects an axis."""
    for axis, factors in FACTORS.items():
        if word in factors:
            return f", which is a part of {axis}: write mapping.{tier}.{axis}.{word}"
    return did_you_mean(word, AXES)


def _check_degree(where: str, axis: str, degree: int | Mapping[str, int]) -> None:
    """Raise `PlanError` unless `degree`, found at key `where`, is valid for `axis`."""
    # Factored axes nest: each factor is checked like an axis of its own.
    if isinstance(degree, Mapping):
        if axis not in FACTORS:
            raise PlanError(
                f"{where} = {dict(degree)}: only the {' and the '.join(FACTORS)} axis are factored; give one number"
            )
        for factor, number in degree.items():
            if factor not in FACTORS[axis]:
                raise PlanError(f"{where} names {factor!r}{did_you_mean(factor, FACTORS[axis])}")
            _check_degree(f"{where}.{factor}", factor, number)
    elif degree < 1:
        raise PlanError(f"{where} = {degree}: a degree is at least 1")
