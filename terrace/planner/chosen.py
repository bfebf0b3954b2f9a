"""A plan as a choice of the planner: the way back from `plan_of`.

A plan may say more than a choice can: what a choice has no word for is refused, and so is a mapping that the model or
the cluster cannot have.
"""

import math
from dataclasses import replace

from terrace.base.errors import PlanError, did_you_mean
from terrace.plan import AXES, MessageClass, Plan, num_micro_batches, validate
from terrace.plan.layout import Layout
from terrace.plan.mesh import Mesh, tier_degrees
from terrace.plan.slices import slice_blocks
from terrace.plan.validate import axis_hint, check_context, check_degree
from terrace.planner.estimate import data_cluster
from terrace.planner.explain import placement_of
from terrace.planner.space import Shape, shape_of
from terrace.planner.stages import SERIAL, SIMPLEST, traits
from terrace.planner.task import TENSOR, Choice, Row, Task, row_of, schedule_text
from terrace.program.schedules import takes_unit


def choice_of(task: Task, plan: Plan) -> Choice:
    """Return a plan as a choice; raises `PlanError` for one that cannot be, or that the planner has no choice for."""
    if plan.recompute not in ((), ("layers.*",)):
        raise PlanError(
            f"recompute = {list(plan.recompute)}: plans are priced with recompute = [] or ['layers.*']; use one of them"
        )
    if plan.prefetch != 1:
        raise PlanError(f"prefetch = {plan.prefetch}: plans are priced with prefetch = 1; leave it out")
    if plan.tensor_chunks != 1:
        raise PlanError(f"tensor_chunks = {plan.tensor_chunks}: plans are priced with tensor_chunks = 1; leave it out")
    shape = shape_of(tuple(_row(task, plan, tier.name, tier.size) for tier in task.cluster.tiers))
    _check_names(task, plan)
    schedule, chunks = (
        (SERIAL, 1) if shape.pipeline == 1 else parse_schedule(SIMPLEST if plan.schedule is None else plan.schedule)
    )
    if plan.balance != "tokens":
        raise PlanError(f'balance = "{plan.balance}": plans are priced with balance = "tokens"; leave it out')
    if shape.pipeline == 1:
        validate(task.cluster, plan, task.blocks)
        slice_blocks(task.blocks, Mesh.of(task.cluster, plan))  # the degrees must divide the heads
    else:
        _check_model(task, shape)
        check_context(task.cluster, plan, task.blocks)
        # What is left of a plan is that of the data ranks of one tensor, context and pipeline coordinate.
        _check_tensor_wire(task, plan, shape)
        wire = {message: row for message, row in plan.wire.items() if message != MessageClass.TENSOR.value}
        own = replace(plan, mapping={}, wire=wire)
        if shape.pipeline > 1:
            own = replace(own, schedule=None, stages=())
        validate(data_cluster(task.cluster, shape.state), own, task.blocks)
    if plan.sequence_parallel is not task.software.sequence_parallel and shape.tensor > shape.columns:
        raise PlanError(
            f"sequence_parallel = {str(plan.sequence_parallel).lower()}: the task is of software with "
            f"sequence_parallel = {str(task.software.sequence_parallel).lower()}; make them the same"
        )
    micros = num_micro_batches(plan, Layout.of(task.cluster, plan), task.batch)
    if micros % plan.unit:
        raise PlanError(f"unit = {plan.unit} does not divide the {micros} micro-batches of a rank: use a divisor")
    if plan.unit > 1 and shape.pipeline > 1 and not takes_unit(schedule):
        raise PlanError(f"unit = {plan.unit}: a pipeline's schedule says what passes a stage when; write unit = 1")
    again = int(bool(plan.recompute))
    return Choice(again, plan.unit, schedule, chunks, plan.micro_batch, placement_of(task, plan), shape.rows)


def parse_schedule(text: str) -> tuple[str, int]:
    """Return name and chunks of a schedule such as "1f1b" or "interleaved:3"; raises `PlanError` for an unknown one."""
    name, _, number = text.partition(":")
    known = traits()
    if name not in known:
        raise PlanError(f"schedule = {text!r}: no schedule {name!r}{did_you_mean(name, known)}")
    if text == name:
        number = str(known[name].chunks[0])
    if not number.isdecimal() or len(number) > 4 or int(number) not in known[name].chunks:
        allowed = ", ".join(repr(schedule_text(name, chunks)) for chunks in known[name].chunks)
        raise PlanError(f"schedule = {text!r}: {number!r} chunks a stage do not suit {name}; write one of {allowed}")
    return name, int(number)


def _row(task: Task, plan: Plan, tier: str, size: int) -> Row:
    for axis, entry in plan.mapping.get(tier, {}).items():
        if axis not in AXES:
            raise PlanError(f"mapping.{tier} names axis {axis!r}{axis_hint(tier, axis)}")
        check_degree(f"mapping.{tier}.{axis}", axis, entry)
    degrees = tier_degrees(plan.mapping.get(tier, {"data": size}))
    if (product := math.prod(degrees.values())) != size:
        raise PlanError(
            f"the degrees of mapping.{tier} multiply to {product}, but tier {tier!r} of "
            f"cluster {task.cluster.name!r} joins {size}: make them multiply to {size}"
        )
    data, pipeline, columns, rows, ulysses, ring = (
        degrees.get(axis, 1) for axis in ("data", "pipeline", "columns", "rows", "ulysses", "ring")
    )
    return row_of(data, rows * columns, ulysses * ring, pipeline, columns, ulysses)


def _check_tensor_wire(task: Task, plan: Plan, shape: Shape) -> None:
    for tier, row in zip(task.cluster.tiers, shape.rows, strict=True):
        if tier.name in plan.wire.get(MessageClass.TENSOR.value, {}) and row[TENSOR] == 1:
            raise PlanError(
                f"wire.tensor.{tier.name} has no effect: the tensor axis has no ranks on {tier.name!r}; leave it out"
            )


def _check_names(task: Task, plan: Plan) -> None:
    names = [tier.name for tier in task.cluster.tiers]
    for name in plan.mapping:
        if name not in names:
            raise PlanError(f"mapping names tier {name!r}, which is not in the cluster{did_you_mean(name, names)}")


def _check_model(task: Task, shape: Shape) -> None:
    model = task.model
    num_rows = shape.tensor // shape.columns
    for name, size in (
        ("heads", model.num_heads),
        ("key-value heads", model.num_kv_heads),
        ("columns of the MLP", model.intermediate_size),
    ):
        if size % num_rows:
            raise PlanError(f"a tensor degree of {num_rows} rows does not divide the {size} {name} of the model")
    if model.hidden_size % shape.columns:
        raise PlanError(f"{shape.columns} columns do not divide the hidden size {model.hidden_size} of the model")
    if shape.pipeline > model.num_layers:
        raise PlanError(f"{shape.pipeline} pipeline stages of {model.num_layers} layers: use at most one a layer")
