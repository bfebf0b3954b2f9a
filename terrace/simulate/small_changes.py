"""Changes that would shorten a step: every small change of the plan or the cluster, predicted.

A change of the plan changes one thing: a placement by one tier, the prefetch distance, the unit, recomputation, the
wire format on one tier, the schedule of a pipeline. A change of the cluster doubles one bandwidth or the device's
FLOP/s, or halves one latency. Invalid plans are skipped, as are those that need more memory than the device has (or
than the present step, if that already exceeds it), including activations, context and allocator losses.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from math import fsum, inf
from typing import Any

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster, Tier
from terrace.plan.layout import DEVICE, Layout
from terrace.plan.plan import Plan
from terrace.plan.residency import recomputed
from terrace.plan.routes import crossed_tiers
from terrace.plan.wire import PLACEABLE, ROUTES
from terrace.plan.wire_rules import crossing
from terrace.program.program import Program
from terrace.program.schedules.registry import schedule_names, takes
from terrace.program.schedules.seconds import TaskSeconds
from terrace.program.stages import num_virtual, plan_orders, plan_schedule
from terrace.simulate.advice import Job, fullest_stage
from terrace.simulate.change import Change
from terrace.simulate.step import Prediction, Step, predict_on, predict_step, resolved
from terrace.simulate.timeline import play
from terrace.simulate.work import Work

# Safety factors of a lower bound: rounding of sums for steps played whole, twice the error of extrapolation for folded
# ones.
_WHOLE, _FOLDED = 1 - 1e-9, 0.99


def _fits(base: Prediction) -> Callable[[Prediction], bool]:
    """Whether a changed step fits the device, or needs no more than `base` does."""
    most = max(base.step.cluster.device.usable_bytes, _needed_bytes(base))
    return lambda predicted: _needed_bytes(predicted) <= most


def _needed_bytes(predicted: Prediction) -> int:
    step = predicted.step
    states = max(sum(program.state_bytes.values()) for program in predicted.programs)
    # With FLOPs for prices, activations are unknown.
    if not isinstance(step.work, Work):
        return states
    job = Job(cluster=step.cluster, plan=step.plan, num_micros=step.num_micros)
    return max(states, sum(fullest_stage(job, step.blocks, step.sequence)[1].values()))


def changes(step: Step, base: Prediction | None = None) -> list[Change]:
    """All candidates with their predicted steps, shortest first; ties in the order tried.

    `base` is the step's prediction, if known. The number of micro-batches is fixed, so every candidate does the same
    work. A changed pipeline reassigns blocks to stages unless the plan names its stages.
    """
    found: list[Change] = []
    base = base or predict_step(step)
    fits = _fits(base)
    for change in _candidates(step, base.programs[0]):
        # An invalid plan is simply not a candidate.
        with suppress(PlanError):
            predicted = _predicted(base, change, _changed(step, change))
            if fits(predicted):
                found.append(replace(change, step_s=predicted.step_s))
    return sorted(found, key=lambda change: change.step_s)


def best_changes(step: Step, base: Prediction) -> list[Change]:
    """The best candidate of each kind in `changes`.

    Candidates are tried in order of a lower bound on their steps, and skipped once it exceeds the best step of their
    kind.
    """
    tried: list[tuple[float, int, Change, Step]] = []
    bounds: dict[tuple[object, ...], float] = {}  # by all that passes depend on
    for number, change in enumerate(_candidates(step, base.programs[0])):
        with suppress(PlanError):
            changed = resolved(_changed(step, change))
            plan = changed.plan
            key = (plan.schedule, plan.stages, plan.unit, plan.recompute, change.cluster.device is step.cluster.device)
            if key not in bounds:
                bounds[key] = _least_s(base, changed)
            tried.append((bounds[key], number, change, changed))
    best: dict[str, tuple[float, int, Change]] = {}
    fits = _fits(base)
    for least_s, number, change, changed in sorted(tried, key=lambda each: each[:2]):
        known = best.get(change.kind, (inf, number, change))
        if least_s > known[0]:
            continue
        with suppress(PlanError):
            predicted = _predicted(base, change, changed)
            # The memory of a candidate that is not the best does not matter.
            if (predicted.step_s, number) < known[:2] and fits(predicted):
                best[change.kind] = (predicted.step_s, number, replace(change, step_s=predicted.step_s))
    return sorted((change for _, _, change in best.values()), key=lambda change: change.step_s)


def _candidates(step: Step, program: Program) -> Iterator[Change]:
    seen = [step.plan]
    for change in (*_plan_changes(step, program), *_schedule_changes(step), *_cluster_changes(step, program)):
        # A change may have no effect, such as int8 on a tier that no message crosses.
        if change.kind == "cluster" or change.plan not in seen:
            seen.append(change.plan)
            yield change


def _changed(step: Step, change: Change) -> Step:
    return replace(step, cluster=change.cluster, plan=change.plan)


def _predicted(base: Prediction, change: Change, changed: Step) -> Prediction:
    return predict_on(base, changed) if change.kind == "cluster" else predict_step(changed)


def _least_s(base: Prediction, step: Step) -> float:
    """Lower bound in seconds on a step with the blocks of `base`: its schedule with free messages and updates.

    0 without a pipeline, and for another device.
    """
    if step.num_stages == 1 or step.cluster.device != base.step.cluster.device:
        return 0.0
    plan, costs = step.plan, base.costs[0]
    orders = plan_orders(plan, step.blocks, step.num_stages, step.num_micros, step.sequence)
    forward = costs.forward_s
    again = recomputed(plan, step.blocks)  # operations of layers count nothing: this is a bound
    backward = [own_s + forward[block] * (block in again) for block, own_s in enumerate(costs.backward_s)]
    weight = costs.weight_s or (0.0,) * len(forward)
    stops = list(accumulate(plan.stages))
    cut = [slice(stop - size, stop) for stop, size in zip(stops, plan.stages, strict=True)]
    forward_s, backward_s, weight_s = (tuple(fsum(row[each]) for each in cut) for row in (forward, backward, weight))
    seconds = TaskSeconds(
        forward_s=forward_s,
        backward_s=backward_s,
        input_s=tuple(whole - part for whole, part in zip(backward_s, weight_s, strict=True)),
        weight_s=weight_s,
        edge_s=(0.0,) * (len(cut) - 1),
    )
    return play(orders, seconds).makespan_s * (_WHOLE if base.is_whole else _FOLDED)


def _plan_changes(step: Step, program: Program) -> Iterator[Change]:
    cluster, plan = step.cluster, step.plan

    def change(words: str, changed: Plan, note: str = "") -> Change:
        return Change(words=words, kind="plan", note=note, cluster=cluster, plan=changed)

    for states in (("params",), ("grads",), ("optimizer",), ("params", "grads"), ("grads", "optimizer")):
        for outward in (False, True):
            moved = _moved(program.layout, plan, states, outward)
            if moved is not None:
                words = ", ".join(f'{state} = "{getattr(moved, state)}"' for state in states)
                yield change(words, crossing(cluster, moved))
    # A secondary copy belongs on a tier inside the placement of the parameters.
    copy = _next_tier(program.layout, program.layout.params, outward=False)
    if copy is not None and copy != DEVICE and not program.layout.has_secondary:
        tier = program.layout.tiers[copy]
        yield change(f'params_backward = "{tier}"', crossing(cluster, replace(plan, params_backward=tier)))
    yield change(f"prefetch = {plan.prefetch + 1}", replace(plan, prefetch=plan.prefetch + 1))
    if 2 * plan.unit <= step.num_micros:
        yield change(f"unit = {2 * plan.unit}", replace(plan, unit=2 * plan.unit), "keeps more activations")
    if plan.recompute:
        yield change("recompute = []", replace(plan, recompute=()), "keeps more activations")
    for tier in program.layout.tiers:
        yield change(f"int8 on tier {tier}", _int8(plan, program, tier), "rounds messages to 8 bits")


def _schedule_changes(step: Step) -> Iterator[Change]:
    cluster, plan, num_stages = step.cluster, step.plan, step.num_stages
    if num_stages == 1:
        return
    for name in schedule_names():
        if "memory_limit" not in takes(name):
            other = replace(plan, schedule=name)
            if plan.stages and num_virtual(other, num_stages) != len(plan.stages):
                # The named split is for another number of virtual stages: split the blocks again.
                other = replace(other, stages=())
            if name != plan_schedule(plan)[0]:
                yield Change(words=f'schedule = "{name}"', kind="plan", note="", cluster=cluster, plan=other)


def _cluster_changes(step: Step, program: Program) -> Iterator[Change]:
    cluster, plan = step.cluster, step.plan
    crossed = {tier for tier, degree in enumerate(program.model.stage_layout.degrees) if degree > 1}
    crossed |= {tier for tier, degree in enumerate(program.mesh.group("pipeline")) if degree > 1}

    def change(words: str, changed: Cluster) -> Change:
        return Change(words=words, kind="cluster", note="", cluster=changed, plan=plan)

    device = cluster.device
    faster = {dtype: 2 * peak for dtype, peak in device.peak_flops_per_s.items()}
    yield change("FLOP/s of the device x 2", replace(cluster, device=replace(device, peak_flops_per_s=faster)))
    for index in sorted(crossed):
        tier = cluster.tiers[index]
        wider = replace(tier, bandwidth_bytes_per_s=2 * tier.bandwidth_bytes_per_s)
        yield change(f"bandwidth of tier {tier.name} x 2", _with_tier(cluster, index, wider))
        nearer = replace(tier, latency_s=tier.latency_s / 2)
        yield change(f"latency of tier {tier.name} / 2", _with_tier(cluster, index, nearer))


def _with_tier(cluster: Cluster, index: int, tier: Tier) -> Cluster:
    return replace(cluster, tiers=tuple(tier if i == index else old for i, old in enumerate(cluster.tiers)))


def _next_tier(layout: Layout, index: int, *, outward: bool) -> int | None:
    # Tiers on which the state has the same number of shards would change nothing.
    tried = range(index + 1, layout.outermost + 1) if outward else range(index - 1, DEVICE - 1, -1)
    return next((other for other in tried if layout.span(other) != layout.span(index)), None)


def _moved(layout: Layout, plan: Plan, states: tuple[str, ...], outward: bool) -> Plan | None:
    places = {state: _next_tier(layout, getattr(layout, state), outward=outward) for state in states}
    names: dict[str, Any] = {
        state: "device" if at == DEVICE else layout.tiers[at] for state, at in places.items() if at is not None
    }
    return replace(plan, **names) if len(names) == len(states) else None


def _int8(plan: Plan, program: Program, tier: str) -> Plan:
    layout = program.model.stage_layout
    index = layout.tiers.index(tier)
    wire = {message: dict(row) for message, row in plan.wire.items()}
    for message in PLACEABLE:
        crosses = index in crossed_tiers(layout, message) and (message not in ROUTES or layout.degrees[index] > 1)
        # Messages that are in a block format already keep it.
        if crosses and not plan.wire_format(message, tier).block:
            wire.setdefault(message.value, {})[tier] = "int8"
    return replace(plan, wire=wire)
