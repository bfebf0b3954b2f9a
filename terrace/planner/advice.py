"""The adviser: small changes of a plan or a cluster, each predicted or refused; advice is the best of them.

A change of the plan changes one thing: a placement by one tier, the prefetch distance, the unit, recomputation, the
wire format on one tier, the schedule of a pipeline, the tier or the chunks of experts, the delay of islands. A step
that does not fit is also tried with the rows of its embedding spread over ranks. A change of the cluster doubles one
bandwidth or the device's FLOP/s, or halves one latency. Invalid plans are skipped, as are those that need more memory
than the device has (or than the present step, if that exceeds it), with activations, context and allocator losses.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from math import fsum, inf
from typing import Any, Literal, cast

from terrace.base.errors import PlanError
from terrace.base.words import counted
from terrace.cluster.cluster import Cluster, Tier
from terrace.plan.keep import HOST, Medium
from terrace.plan.layout import DEVICE, Layout
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.residency import recomputed
from terrace.plan.routes import crossed_tiers
from terrace.plan.table_rules import vocabulary_words, whole_vocabulary
from terrace.plan.wire import PLACEABLE, ROUTES
from terrace.plan.wire_rules import crossing
from terrace.planner.divisions import one_tier_out, table_words
from terrace.planner.ranking import Cost
from terrace.program.program import Program
from terrace.program.schedules.registry import schedule_names, takes
from terrace.program.schedules.seconds import TaskSeconds
from terrace.program.stages import num_virtual, plan_orders, plan_schedule
from terrace.simulate.chunks import Numbers
from terrace.simulate.cycle import Cycle
from terrace.simulate.fullest import Job, fullest_stage
from terrace.simulate.step import Prediction, Step, predict_on, predict_step, resolved
from terrace.simulate.timeline import play
from terrace.simulate.with_lengths import with_lengths
from terrace.simulate.work import Work

# Safety factors of a lower bound: rounding of sums for steps played whole, twice the error of extrapolation for folded
# ones.
_WHOLE, _FOLDED = 1 - 1e-9, 0.99
_HIDDEN = 1e-3  # part of a cycle in which exchanges may be waited for
_GAIN = 1e-3  # part of a step by which a change must shorten it to be advice
_TRIES = 4  # delays of islands that are tried


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of a plan or a cluster, or another plan altogether, with its cost; `reason` says why it cannot run."""

    words: str  # such as 'params = "node"'
    kind: Literal["plan", "cluster"] = "plan"
    note: str = ""  # effects other than on seconds and memory
    cluster: Cluster
    plan: Plan
    cost: Cost | None = None  # also of a plan that does not fit; None if it could not be priced
    reason: str = ""

    @property
    def step_s(self) -> float:
        return inf if self.cost is None else self.cost.step_s


def setting_words(values: Mapping[str, object]) -> str:
    """Keys of a plan with their values, as its file has them: `params = "node", unit = 2`; None is a key left out."""
    # JSON writes strings, numbers and lists of strings as TOML does.
    each = (f"{key} left out" if value is None else f"{key} = {json.dumps(value)}" for key, value in values.items())
    return ", ".join(each)


def best_change(candidates: Sequence[Change], step_s: float, kind: Literal["plan", "cluster"]) -> Change | None:
    """The change of this kind with the largest gain over `step_s`; None if none gains 0.1 %."""
    best = next((change for change in candidates if change.kind == kind), None)
    return best if best is not None and best.step_s < (1 - _GAIN) * step_s else None


def cost_of(predicted: Prediction) -> Cost:
    """Cost of a predicted step, with the memory of the stage that needs most.

    Activations are unknown, and not counted, where a step is priced from FLOPs.
    """
    step = predicted.step
    memory = max((program.state_bytes for program in predicted.programs), key=lambda each: sum(each.values()))
    if isinstance(step.work, Work):
        job = Job(cluster=step.cluster, plan=step.plan, num_micros=step.num_micros, beside=step.beside)
        fullest = fullest_stage(job, step.blocks, step.sequence)[1]
        memory = max(fullest, memory, key=lambda each: sum(each.values()))
    return Cost(
        num_micros=step.num_micros,
        step_s=predicted.step_s,
        time_s=predicted.times_s[predicted.busiest],
        memory_bytes=memory,
    )


def _room(base: Prediction) -> float:
    """Bytes that a changed step may need: all that the device has, or as many as the step needs now."""
    return max(base.step.cluster.device.usable_bytes, cost_of(base).needed_bytes)


def changes(step: Step, base: Prediction | None = None) -> list[Change]:
    """All candidates with their predicted steps, shortest first; ties in the order tried.

    `base` is the step's prediction, if known. The number of micro-batches is fixed, so every candidate does the same
    work. A changed pipeline reassigns blocks to stages unless the plan names its stages.
    """
    found: list[Change] = []
    base = base or predict_step(step)
    room = _room(base)
    for change in _candidates(step, base):
        # An invalid plan is simply not a candidate.
        with suppress(PlanError):
            cost = cost_of(_predicted(base, change, _changed(step, change)))
            if cost.needed_bytes <= room:
                found.append(replace(change, cost=cost))
    return sorted(found, key=lambda change: change.step_s)


def best_changes(step: Step, base: Prediction) -> list[Change]:
    """The best candidate of each kind in `changes`.

    Candidates are tried in order of a lower bound on their steps, and skipped once it exceeds the best step of their
    kind.
    """
    tried: list[tuple[float, int, Change, Step]] = []
    bounds: dict[tuple[object, ...], float] = {}  # by all that passes depend on
    for number, change in enumerate(_candidates(step, base)):
        with suppress(PlanError):
            changed = resolved(_changed(step, change))
            plan = changed.plan
            key = (plan.schedule, plan.stages, plan.unit, plan.recompute, change.cluster.device is step.cluster.device)
            if key not in bounds:
                bounds[key] = _least_s(base, changed)
            tried.append((bounds[key], number, change, changed))
    best: dict[str, tuple[float, int, Change]] = {}
    room = _room(base)
    for least_s, number, change, changed in sorted(tried, key=lambda each: each[:2]):
        known = best.get(change.kind, (inf, number, change))
        if least_s > known[0]:
            continue
        with suppress(PlanError):
            predicted = _predicted(base, change, changed)
            # The memory of a candidate that is not the best does not matter.
            if (predicted.step_s, number) < known[:2] and (cost := cost_of(predicted)).needed_bytes <= room:
                best[change.kind] = (predicted.step_s, number, replace(change, cost=cost))
    return sorted((change for _, _, change in best.values()), key=lambda change: change.step_s)


def _candidates(step: Step, base: Prediction) -> Iterator[Change]:
    program, seen, hides = base.programs[0], [step.plan], hiding(base)
    delays = _delays(base) if hides is None else [hides]
    own = (*_plan_changes(step, program), *_schedule_changes(step), *_expert_changes(step), *delays)
    for change in (*own, *_table_changes(base), *_cluster_changes(step, program)):
        # A change may have no effect, such as int8 on a tier that no message crosses.
        if change.kind == "cluster" or change.plan not in seen:
            seen.append(change.plan)
            yield change


def _changed(step: Step, change: Change) -> Step:
    work = step.work
    if isinstance(work, Work) and change.plan.experts != step.plan.experts:
        expert, rows = Mesh.of(change.cluster, change.plan).stack_degrees
        work = replace(work, expert=expert, expert_rows=rows)
    changed = replace(step, cluster=change.cluster, plan=change.plan, work=work)
    # Which ranks meet when, and how documents are dealt, depends on the plan and the cluster.
    return with_lengths(changed, work.ragged.lengths) if isinstance(work, Work) else changed


def _predicted(base: Prediction, change: Change, changed: Step) -> Prediction:
    if change.kind == "cluster":
        return predict_on(base, changed)
    try:
        return predict_step(changed)
    except PlanError:
        if not changed.plan.expert_gaps or changed.plan.experts == base.step.plan.experts:
            raise
        # Experts further out may not share a lane with gradients.
        return predict_step(replace(changed, plan=replace(changed.plan, expert_gaps=())))


def _least_s(base: Prediction, step: Step) -> float:
    """Lower bound in seconds on a step with the blocks of `base`: its schedule with free messages and updates.

    0 without a pipeline, for another device, and for experts elsewhere.
    """
    if step.num_stages == 1 or step.cluster.device != base.step.cluster.device or step.work != base.step.work:
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
        return Change(words=words, note=note, cluster=cluster, plan=changed)

    for states in (("params",), ("grads",), ("optimizer",), ("params", "grads"), ("grads", "optimizer")):
        for outward in (False, True):
            moved = _moved(program.layout, plan, states, outward)
            if moved is not None:
                words = setting_words({state: getattr(moved, state) for state in states})
                yield change(words, crossing(cluster, moved))
    # A secondary copy belongs on a tier inside the placement of the parameters.
    copy = _next_tier(program.layout, program.layout.params, outward=False)
    if copy is not None and copy != DEVICE and not program.layout.has_secondary:
        tier = program.layout.tiers[copy]
        yield change(setting_words({"params_backward": tier}), crossing(cluster, replace(plan, params_backward=tier)))
    yield change(setting_words({"prefetch": plan.prefetch + 1}), replace(plan, prefetch=plan.prefetch + 1))
    unit = 2 * plan.unit
    if unit <= step.num_micros:
        yield change(setting_words({"unit": unit}), replace(plan, unit=unit), "keeps more activations")
    if plan.recompute:
        yield change(setting_words({"recompute": ()}), replace(plan, recompute=()), "keeps more activations")
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
                yield Change(words=setting_words({"schedule": name}), cluster=cluster, plan=other)


def expert_changes(base: Prediction) -> list[Change]:
    """Tokens in one chunk, chunks in another order, and experts one tier further out, predicted, whatever they gain.

    The plan must name its chunks. A change that cannot run has a reason.
    """
    found = []
    for change in _expert_changes(base.step):
        try:
            predicted = _predicted(base, change, _changed(base.step, change))
            found.append(replace(change, cost=cost_of(predicted), plan=predicted.step.plan))
        except PlanError as error:
            found.append(replace(change, reason=str(error)))
    return found


def _expert_changes(step: Step) -> Iterator[Change]:
    plan, tiers = step.plan, [tier.name for tier in step.cluster.tiers]
    if not plan.experts:
        return

    def change(words: str, changed: Plan) -> Change:
        return Change(words=words, cluster=step.cluster, plan=changed)

    # Shares of gradients depend on the number of chunks, so they are searched again with another number.
    numbers, searched = Numbers(**plan.expert_chunks), replace(plan, expert_gaps="auto" if plan.expert_gaps else ())
    if numbers.pieces > 1:
        yield change("tokens in one chunk", replace(searched, expert_chunks=Numbers().table))
    if numbers.pieces > 2 and plan.expert_hops > 1:
        ahead = numbers.pieces - 1 if numbers.ahead == 1 else 1
        others = numbers._replace(ahead=ahead).table
        yield change(f"{counted(ahead, 'chunk')} ahead", replace(plan, expert_chunks=others))
    further = one_tier_out(Mesh.of(step.cluster, plan))
    if further is not None:
        table = further.stack_table(tiers)
        moved = crossing(step.cluster, replace(searched, experts=table, expert_chunks={}))
        yield change(f"experts one tier out ({table_words(table)})", moved)


def _table_changes(base: Prediction) -> Iterator[Change]:
    """The rows of the embedding spread over all ranks synchronised every step, or below them, if memory is short."""
    plan, cluster = base.step.plan, base.step.cluster
    if cost_of(base).needed_bytes <= cluster.device.usable_bytes:
        return
    table, note = plan.vocabulary or whole_vocabulary(cluster, plan), "rows that a step does not use are not updated"
    if not plan.vocabulary:
        yield Change(words=vocabulary_words(table), note=note, cluster=cluster, plan=replace(plan, vocabulary=table))
    for medium in cluster.device.below if not plan.keep.table_below else ():
        own, keep = not plan.vocabulary, replace(plan.keep, table=cast(Medium, medium))
        words = f"{vocabulary_words(table)} with " * own + f"keep.table = {medium!r}"
        yield Change(words=words, note=note * own, cluster=cluster, plan=replace(plan, vocabulary=table, keep=keep))


def hiding(base: Prediction) -> Change | None:
    """The least delay that hides the exchanges of a prediction's islands, with the shortest cycle that it needs.

    None if they are hidden already, or if no delay within a few steps of the estimate hides them and shortens the step.
    """
    for change in _delays(base):
        with suppress(PlanError):
            found = predict_step(replace(base.step, plan=change.plan))
            if found.cycle is not None and is_hidden(found.cycle):
                return replace(change, cost=cost_of(found)) if found.step_s < (1 - _GAIN) * base.step_s else None
    return None


def is_hidden(cycle: Cycle) -> bool:
    return cycle.waited_s <= _HIDDEN * cycle.cycle_s


def steps_of_exchange(cycle: Cycle) -> float:
    """Duration of the longest exchange, in steps without exchanges."""
    return cycle.exchange_s / cycle.plain_s if cycle.plain_s else math.inf


def _delays(base: Prediction) -> Iterator[Change]:
    """Longer delays of islands whose exchanges are waited for, each with the shortest cycle at least as long as now."""
    cycle, plan = base.cycle, base.step.plan
    if cycle is None or is_hidden(cycle):
        return
    outer, needed = cycle.outer, max(1, math.ceil(steps_of_exchange(cycle)))
    first = max(needed, outer.delay + 1)
    for delay in range(first, first + _TRIES):
        # Exchanges of all fragments share one link, one at a time.
        every = max(outer.every, delay, outer.fragments * needed)
        every = math.ceil(every / outer.fragments) * outer.fragments
        words = f"outer.delay = {delay}" + (f" with outer.every = {every}" if every != outer.every else "")
        changed = replace(plan, outer=replace(outer, delay=delay, every=every))
        yield Change(words=words, note="changes what is learned", cluster=base.step.cluster, plan=changed)


def _cluster_changes(step: Step, program: Program) -> Iterator[Change]:
    cluster, plan = step.cluster, step.plan
    crossed = {tier for tier, degree in enumerate(program.model.stage_layout.degrees) if degree > 1}
    crossed |= {tier for tier, degree in enumerate(program.mesh.group("pipeline")) if degree > 1}

    def change(words: str, changed: Cluster) -> Change:
        return Change(words=words, kind="cluster", cluster=changed, plan=plan)

    device = cluster.device
    faster = {dtype: 2 * peak for dtype, peak in device.peak_flops_per_s.items()}
    yield change("FLOP/s of the device x 2", replace(cluster, device=replace(device, peak_flops_per_s=faster)))
    for name in plan.keep.media:
        medium = device.below[name]
        read, write = 2 * medium.read_bytes_per_s, 2 * medium.write_bytes_per_s
        below = {**device.below, name: replace(medium, read_bytes_per_s=read, write_bytes_per_s=write)}
        yield change(f"bytes/s of the {name} x 2", replace(cluster, device=replace(device, below=below)))
    if plan.keep.hands_over:
        faster_host = replace(device.below[HOST], update_bytes_per_s=2 * device.below[HOST].update_bytes_per_s)
        below = {**device.below, HOST: faster_host}
        yield change("updates on the host's cores x 2", replace(cluster, device=replace(device, below=below)))
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
