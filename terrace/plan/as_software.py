"""What a software does in every step, as keys of a plan, and the plans that it does not run."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.cluster.software import Software
from terrace.plan.chunk_rules import why_not_fused
from terrace.plan.keep import ALL_ON_DEVICE
from terrace.plan.layout import Layout
from terrace.plan.mesh import Mesh
from terrace.plan.order_file import schedule_words
from terrace.plan.outer import ONE_ISLAND
from terrace.plan.plan import EXPERT_CHUNKS, FUSED, Plan
from terrace.plan.recompute import OPERATIONS
from terrace.plan.wire import GRADIENTS
from terrace.plan.wire_rules import crossing

Wire = Mapping[str, Mapping[str, str]]  # message class -> tier -> format, as in a plan
_DTYPES = ("bf16", "fp16", "fp32", "fp64")
_OF_CONTEXT = ("ulysses", "ring")


def reductions(cluster: Cluster, wire: Wire) -> Wire:
    """The formats of `wire` with those in which the cluster's software reduces gradients, where it names none."""
    dtype = cluster.device.software.messages.reduced
    if not dtype:
        return wire
    tiers = {tier.name: dtype for tier in cluster.tiers}
    return {message.value: tiers for message in GRADIENTS} | dict(wire)


def run_as(cluster: Cluster, plan: Plan) -> Plan:
    """The plan as the cluster's software runs it: keys that it leaves out are this software's."""
    form = cluster.device.software.messages
    if plan.leaves_out_chunks and not cluster.device.software.runs_all:
        plan = replace(plan, expert_chunks=dict.fromkeys(EXPERT_CHUNKS, 1) | dict(plan.expert_chunks))
    if form.reduced:
        plan = crossing(cluster, replace(plan, wire=reductions(cluster, plan.wire)))
    mesh = Mesh.of(cluster, plan)
    parted = any(":" in entry for entry in plan.recompute)  # only whole layers are recomputed beside such messages
    if not form.fuses or plan.tensor_chunks != 1 or not plan.sequence_parallel or mesh.total("rows") == 1 or parted:
        return plan
    return plan if why_not_fused(cluster, mesh, plan) else replace(plan, tensor_chunks=FUSED)


def axes_of(software: Software, axes: Iterable[str]) -> tuple[str, ...]:
    """Those of the axes of a plan that the software is described for."""
    known = software.plans.axes
    has = {"context": bool(known & {*_OF_CONTEXT}), "data": True}
    return tuple(axis for axis in axes if software.runs_all or has.get(axis, axis in known))


def sharing(degrees: Sequence[int], params: int, grads: int, optimizer: int, backward: int) -> str:
    """How states are shared (`PlanForms.states`), "" for none of these; `degrees` are holders by tier, -1 `device`."""
    ranks = [math.prod(degrees[: place + 1]) for place in (params, grads, optimizer)]
    if 1 < math.prod(degrees[: backward + 1]) < ranks[0]:
        return "copies" if len(set(ranks)) == 1 else ""
    shared, distinct = [number > 1 for number in ranks], {number for number in ranks if number > 1}
    if len(distinct) > 1 or shared != sorted(shared):
        return ""
    return ("ddp", "zero1", "zero2", "zero3")[sum(shared)]


def check_software(cluster: Cluster, plan: Plan, layout: Layout) -> None:
    """Raise `PlanError` for a plan that the cluster's software does not run, as far as it is described."""
    software = cluster.device.software
    if software.runs_all:
        return
    for what, instead in _unknown(software, plan, layout, Mesh.of(cluster, plan)):
        raise PlanError(
            f"{what}: software {software.name!r} is not described for it; {instead}, or name another software (own "
            "runs every plan)"
        )


def _unknown(software: Software, plan: Plan, layout: Layout, mesh: Mesh) -> Iterator[tuple[str, str]]:
    """(What of the plan the software is not described for, what to write instead)."""
    forms = software.plans
    for axis in ("tensor", *_OF_CONTEXT, "pipeline"):
        if mesh.total(axis) > 1 and axis not in forms.axes:
            yield f"mapping with {mesh.total(axis)} {axis} ranks", f"map {_names(('data', *sorted(forms.axes)))} ranks"
    if mesh.total("columns") > 1:
        yield f"mapping with {mesh.total('columns')} tensor columns", "give the tensor axis rows alone"
    if plan.experts and "experts" not in forms.axes:
        yield "the table experts", "leave it out"
    state = sharing(mesh.state, layout.params, layout.grads, layout.optimizer, layout.params_backward)
    if state not in forms.states:
        there = f"params = {plan.params!r}, grads = {plan.grads!r}, optimizer = {plan.optimizer!r}"
        there += f", params_backward = {plan.params_backward!r}" if plan.params_backward else ""
        yield there, f"place states as {_names(sorted(forms.states - {'copies'}))} does"
    schedule = (plan.schedule or "").partition(":")[0]
    if schedule and schedule not in forms.schedules:
        yield f"schedule = {schedule_words(plan.schedule)}", f"use {_names(sorted(forms.schedules)) or 'no pipeline'}"
    again = {part.strip() for entry in plan.recompute if ":" in entry for part in entry.partition(":")[2].split(",")}
    if apart := (again & {*OPERATIONS}) - forms.parts:
        yield (
            f"recompute of {_names(sorted(apart))} alone",
            f"recompute {_names((*sorted(forms.parts), 'whole layers'))}",
        )
    if plan.products is not None and plan.products not in forms.products:
        yield f"products = {plan.products!r}", f"use {_names((*sorted(forms.products), 'none'))}"
    yield from _own_keys(software, plan, mesh)


def _own_keys(software: Software, plan: Plan, mesh: Mesh) -> Iterator[tuple[str, str]]:
    """Keys that this runtime alone has."""
    coded = sorted({name for row in plan.wire.values() for name in row.values()} - {*_DTYPES})
    fused = plan.fuses_tensor and software.messages.fuses
    used = {
        "wire with " + _names(coded): coded,
        f"optimizer_states = {plan.optimizer_states!r}": plan.optimizer_states,
        f"master = {plan.master!r}": plan.master == "bf16",
        f"tensor_chunks = {plan.tensor_chunks!r}": plan.tensor_chunks != 1 and not fused,
        f"unit = {plan.unit} without a pipeline": plan.unit > 1 and mesh.total("pipeline") == 1,
        "the table keep": plan.keep != ALL_ON_DEVICE,
        "the table outer": plan.outer != ONE_ISLAND,
        "the table vocabulary": plan.vocabulary,
        "expert_chunks of more than 1": any(number > 1 for number in plan.expert_chunks.values()),
        "expert_gaps": plan.expert_gaps,
        "shares": plan.shares,
        "order": plan.order,
        f"balance = {plan.balance!r}": plan.balance == "cost",
    }
    yield from ((what, "leave it out") for what, is_used in used.items() if is_used)


def _names(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
