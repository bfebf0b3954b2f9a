"""The memory that a plan lacks, and the nearest changes that make it fit.

Changes are of five kinds. One kind is tried first, then two together, then three, then all; kinds higher up go first,
and of each kind the smallest step that suffices:

1. recompute every layer;
2. fewer sequences at a time: a smaller unit, then a smaller micro-batch and more micro-batches;
3. different experts on more ranks, from the innermost tier outward;
4. states placed further out: the optimizer first, then gradients, then parameters, one tier at a time;
5. more members of the outermost tier.

Every candidate is checked by the footprint of its fullest stage, so advised plans fit as far as the formulas know. None
is chosen for speed. New data ranks share the micro-batches of the step; if these do not divide evenly, the batch
changes with them.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, combinations, pairwise
from typing import Any

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.model.config import model_of
from terrace.model.spec import BlockSpec
from terrace.plan.kinds import Kinds
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.residency import residual_patterns
from terrace.plan.slices import slice_blocks
from terrace.plan.validate import validate
from terrace.plan.wire_rules import crossing
from terrace.program.schedules.counts import most_due, most_waiting
from terrace.program.stages import plan_orders
from terrace.simulate.block_tape import Backend
from terrace.simulate.footprint import LOAD_FACTOR, footprint, stage_footprint, work_of
from terrace.simulate.states import axis_degree
from terrace.simulate.step import Step, resolved

MAX_GROWTH = 64  # how many times as many members of the outermost tier are thought of


@dataclass(frozen=True, kw_only=True)
class Job:
    """A plan on a cluster with the number of micro-batches of its step."""

    cluster: Cluster
    plan: Plan
    num_micros: int


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A job that fits, and the changes that lead to it.

    `lacking_bytes` is 0 when the plan fits already; `job` is None when no candidate fits.
    """

    lacking_bytes: int
    changes: tuple[str, ...]
    job: Job | None
    sentence: str


def fullest_stage(
    job: Job,
    blocks: tuple[BlockSpec, ...],
    sequence: int,
    backend: Backend | None = None,
    load: float = LOAD_FACTOR,
) -> tuple[int, dict[str, int]]:
    """The pipeline stage with the highest memory per rank, and its footprint; `backend` is the device's by default,
    `load` as in `footprint`.
    """
    cluster, plan, num_micros = job.cluster, job.plan, job.num_micros
    num_stages = axis_degree(cluster, plan, "pipeline")
    kinds = Kinds.of(blocks)
    if num_stages == 1:
        return 0, footprint(cluster, plan, kinds, sequence, num_micros, backend=backend, load=load)
    if not plan.stages:
        work = work_of(cluster, plan, model_of(blocks), sequence, backend)
        step = Step(cluster=cluster, plan=plan, blocks=blocks, num_micros=num_micros, sequence=sequence, work=work)
        # The split decides which layers a stage holds, so it is fixed before stages are compared.
        plan = resolved(step).plan
    orders = plan_orders(plan, blocks, num_stages, num_micros, sequence)
    starts = [0, *accumulate(plan.stages)]
    chunks = [range(*bounds) for bounds in pairwise(starts)]
    found = [
        stage_footprint(
            cluster,
            plan,
            kinds,
            sequence,
            num_micros,
            [chunks[virtual] for virtual in row],
            waits,
            due=due,
            backend=backend,
            load=load,
        )
        for row, waits, due in zip(orders.placement, most_waiting(orders), most_due(orders), strict=True)
    ]
    stage = max(range(num_stages), key=lambda index: sum(found[index].values()))
    return stage, found[stage]


def advice(
    cluster: Cluster,
    plan: Plan,
    blocks: tuple[BlockSpec, ...],
    sequence: int,
    num_micros: int,
    *,
    backend: Backend | None = None,
) -> Advice:
    """Whether a plan fits in the memory of the device, and if not, the changes that make it fit."""
    job = Job(cluster=cluster, plan=plan, num_micros=num_micros)

    def lacking(candidate: Job) -> int:
        _, categories = fullest_stage(candidate, blocks, sequence, backend)
        return sum(categories.values()) - int(candidate.cluster.device.usable_bytes)

    # Bytes above the memory that plans may take; negative is room to spare.
    missing = lacking(job)
    if missing <= 0:
        needed = f"{(cluster.device.usable_bytes + missing) / 1e9:.1f} GB"
        sentence = f"fits: {needed} of {cluster.device.room_words} per device"
        return Advice(lacking_bytes=0, changes=(), job=job, sentence=sentence)
    needs = f"needs {missing / 1e9:.1f} GB more per device"
    changed = _first_that_fits(job, lacking, blocks)
    if changed is None:
        return Advice(
            lacking_bytes=missing,
            changes=(),
            job=None,
            sentence=f"{needs}; neither recomputation, one sequence at a time, states further out "
            f"nor {MAX_GROWTH} times the data ranks make it fit: cut the model by tensor or pipeline ranks",
        )
    changes = _changes(job, changed)
    return Advice(
        lacking_bytes=missing, changes=changes, job=changed, sentence=f"{needs}; with {' and '.join(changes)} it fits"
    )


def worst_words(job: Job, blocks: tuple[BlockSpec, ...], sequence: int) -> str:
    """Memory of experts beyond the account if all choices fall on those of one rank, in words; "" for none."""
    if not job.plan.experts:
        return ""
    expected, worst = (fullest_stage(job, blocks, sequence, load=load)[1] for load in (LOAD_FACTOR, math.inf))
    more = sum(worst.values()) - sum(expected.values())
    if more <= 0:
        return ""
    return (
        f"rows of a rank's experts are counted at {LOAD_FACTOR:g} times their mean; "
        f"{more / 1e9:.3g} GB more if all choices of all ranks fall on them"
    )


_Steps = Callable[[Job], Iterator[Job]]


def _first_that_fits(job: Job, lacking: Callable[[Job], int], blocks: tuple[BlockSpec, ...]) -> Job | None:
    recompute, spread = partial(_recompute, residual_patterns(blocks)), partial(_spread, blocks)
    has_experts = any(block.has_stacks for block in blocks)
    kinds: tuple[_Steps | None, ...] = (recompute, _fewer_sequences, _further_out, None)  # None: more members
    kinds = (*kinds[:2], spread, *kinds[2:]) if has_experts else kinds
    for count in range(1, len(kinds) + 1):
        for chosen in combinations(kinds, count):
            for candidate in _apply(job, [steps for steps in chosen if steps is not None]):
                if None not in chosen and lacking(candidate) <= 0:
                    return candidate
                if None in chosen and (grown := _grown(candidate, lacking)):
                    return grown
    return None


def _apply(job: Job, chosen: list[_Steps]) -> Iterator[Job]:
    if not chosen:
        yield job
        return
    for changed in _apply(job, chosen[:-1]):
        yield from chosen[-1](changed)


def _recompute(layers: tuple[str, ...], job: Job) -> Iterator[Job]:
    added = tuple(pattern for pattern in layers if pattern not in job.plan.recompute)
    if added:
        yield replace(job, plan=replace(job.plan, recompute=(*job.plan.recompute, *added)))


def _fewer_sequences(job: Job) -> Iterator[Job]:
    size, unit = job.plan.micro_batch, job.plan.unit
    for smaller in range(unit - 1, 0, -1):
        if unit % smaller == 0:
            yield replace(job, plan=replace(job.plan, unit=smaller))
    for smaller in range(size - 1, 0, -1):
        if size % smaller == 0:
            # More, smaller micro-batches keep the batch of the step.
            plan = replace(job.plan, micro_batch=smaller, unit=1)
            yield replace(job, plan=plan, num_micros=job.num_micros * (size // smaller))


def _spread(blocks: tuple[BlockSpec, ...], job: Job) -> Iterator[Job]:
    plan = job.plan
    for tier in job.cluster.tiers:
        # From the innermost tier outward, more of the ranks that hold the same experts hold different ones.
        for degree in range(2, tier.size + 1):
            row = {**plan.experts.get(tier.name, {}), "expert": degree}
            wider = replace(job.plan, experts={**plan.experts, tier.name: row})
            with suppress(PlanError):
                validate(job.cluster, wider, blocks)
                slice_blocks(blocks, Mesh.of(job.cluster, wider))  # every degree divides the experts
                if plan.experts.get(tier.name, {}).get("expert", 1) < degree:
                    plan = wider
                    yield replace(job, plan=plan)


def _further_out(job: Job) -> Iterator[Job]:
    cluster, plan = job.cluster, job.plan
    # Islands keep all states.
    end = len(cluster.tiers) if plan.outer is None else cluster.index(plan.outer.tier)
    for state in ("optimizer", "grads", "params"):
        for tier in cluster.tiers[cluster.index(getattr(plan, state)) + 1 : end]:
            moved: dict[str, Any] = {state: tier.name}
            plan = crossing(cluster, replace(plan, **moved))
            yield replace(job, plan=plan)


def _grown(job: Job, lacking: Callable[[Job], int]) -> Job | None:
    data = Mesh.of(job.cluster, job.plan).group("data")[-1]
    too_few, enough = data, data * MAX_GROWTH
    if lacking(_with_data_degree(job, enough)) > 0:
        return None
    # Memory per rank never grows with the data degree, so bisection finds the least that fits.
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if lacking(_with_data_degree(job, middle)) > 0:
            too_few = middle
        else:
            enough = middle
    return _with_data_degree(job, enough)


def _with_data_degree(job: Job, degree: int) -> Job:
    # Other axes keep their degrees, so the tier grows by the factor of the data degree.
    tier = job.cluster.tiers[-1]
    before = Mesh.of(job.cluster, job.plan).group("data")[-1]
    plan, row = job.plan, job.plan.mapping.get(tier.name)
    if row is not None:
        plan = replace(plan, mapping={**plan.mapping, tier.name: {**row, "data": degree}})
    cluster = job.cluster.resized(tier.size // before * degree)
    return Job(cluster=cluster, plan=plan, num_micros=max(1, job.num_micros * before // degree))


def _changes(before: Job, after: Job) -> tuple[str, ...]:
    changes = []
    if after.plan.recompute != before.plan.recompute:
        changes.append(f"recompute = [{', '.join(after.plan.recompute)}]")
    if after.plan.unit != before.plan.unit:
        changes.append(f"unit = {after.plan.unit}")
    if after.plan.micro_batch != before.plan.micro_batch:
        changes.append(f"micro_batch = {after.plan.micro_batch}")
    if after.plan.experts != before.plan.experts:
        degrees = {tier: row["expert"] for tier, row in after.plan.experts.items() if row.get("expert", 1) > 1}
        changes.append(" and ".join(f"experts of {tier!r} on {degree} ranks" for tier, degree in degrees.items()))
    for state in ("optimizer", "grads", "params"):
        if getattr(after.plan, state) != getattr(before.plan, state):
            changes.append(f"{state} on {getattr(after.plan, state)!r}")
    tier = after.cluster.tiers[-1]
    if tier.size != before.cluster.tiers[-1].size:
        changes.append(f"{tier.size} members of {tier.name!r}")
    return tuple(changes)
