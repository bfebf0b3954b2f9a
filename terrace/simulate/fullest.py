"""The stage of a plan that needs the most memory."""

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

from terrace.cluster.cluster import Cluster
from terrace.model.blocks import operations_of
from terrace.model.spec import BlockSpec
from terrace.plan.kinds import Kinds
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.program.report import StepReport
from terrace.program.schedules.orders import most_due, most_waiting
from terrace.program.stages import plan_orders
from terrace.simulate.block_tape import Backend
from terrace.simulate.footprint import LOAD_FACTOR, footprint, stage_footprint, work_of
from terrace.simulate.step import Step, resolved


@dataclass(frozen=True, kw_only=True)
class Job:
    """A plan on a cluster, the number of micro-batches per step, and what runs beside its steps (`Step.beside`)."""

    cluster: Cluster
    plan: Plan
    num_micros: int
    beside: tuple[StepReport, ...] = ()


def fullest_stage(
    job: Job, blocks: tuple[BlockSpec, ...], sequence: int, backend: Backend | None = None, load: float = LOAD_FACTOR
) -> tuple[int, dict[str, int]]:
    """(Index, footprint) of the pipeline stage with the most memory per rank; arguments as in `stage_footprints`."""
    found = stage_footprints(job, blocks, sequence, backend, load)
    stage = max(range(len(found)), key=lambda index: sum(found[index].values()))
    return stage, found[stage]


def stage_footprints(
    job: Job, blocks: tuple[BlockSpec, ...], sequence: int, backend: Backend | None = None, load: float = LOAD_FACTOR
) -> list[dict[str, int]]:
    """Footprint of one rank of each stage, with what another model beside the steps holds.

    `backend` defaults to the device's, `load` is as in `footprint`.
    """
    found = _own_footprints(job, blocks, sequence, backend, load)
    if not job.beside:
        return found
    return [{**own, **other.memory_bytes} for own, other in zip(found, job.beside, strict=True)]


def _own_footprints(
    job: Job, blocks: tuple[BlockSpec, ...], sequence: int, backend: Backend | None, load: float
) -> list[dict[str, int]]:
    cluster, plan, num_micros = job.cluster, job.plan, job.num_micros
    num_stages = Mesh.of(cluster, plan).total("pipeline")
    kinds = Kinds.of(blocks)
    if num_stages == 1:
        return [footprint(cluster, plan, kinds, sequence, num_micros, backend=backend, load=load)]
    if not plan.stages:
        work = work_of(cluster, plan, operations_of(blocks), sequence, backend)
        step = Step(cluster=cluster, plan=plan, blocks=blocks, num_micros=num_micros, sequence=sequence, work=work)
        # The split decides which layers a stage holds, so it is fixed before stages are compared.
        plan = resolved(step).plan
    orders = plan_orders(plan, blocks, num_stages, num_micros, sequence)
    starts = [0, *accumulate(plan.stages)]
    chunks = [range(*bounds) for bounds in pairwise(starts)]
    return [
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


def worst_words(job: Job, blocks: tuple[BlockSpec, ...], sequence: int) -> str:
    """Sentence on the extra memory if all choices fall on one rank's experts; "" for none."""
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
