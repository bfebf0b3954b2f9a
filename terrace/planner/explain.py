"""Why this plan, and why not another: verdicts on the presets and on the neighbours of a choice.

A verdict is a predicted step, or what stands against the plan: the rule it breaks, or the memory it lacks.
"""

from dataclasses import dataclass, replace

from terrace.base.errors import ClusterError, PlanError
from terrace.plan import PRESETS, Layout, Plan, num_micro_batches, preset, validate
from terrace.planner.bound import Bounds
from terrace.planner.estimate import Estimator
from terrace.planner.evaluate import Estimate, Evaluator
from terrace.planner.pins import Pins
from terrace.planner.search import attempt, find
from terrace.planner.space import Space, divisors, micro_batches, passing_units, placements, shape_of, units
from terrace.planner.stages import SERIAL, traits
from terrace.planner.task import PIPELINE, Choice, Placement, Task, num_micros, plan_of, schedule_text
from terrace.program.schedules import takes_unit
from terrace.simulate.changes import Change, cluster_changes


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a plan or a change of one costs, or why it is not possible. `what` names it."""

    what: str
    estimate: Estimate | None = None  # also of a plan that does not fit
    reason: str = ""  # empty for a plan that fits
    note: str = ""  # what the seconds do not show


def placement_of(task: Task, plan: Plan) -> Placement:
    """Return where a plan places its states; raises `ClusterError` for an unknown tier."""
    layout = Layout.of(task.cluster, plan)
    backward = -1 if plan.params_backward is None else layout.params_backward
    return Placement(layout.params, layout.grads, layout.optimizer, backward)


def preset_verdicts(task: Task, pins: Pins) -> list[Verdict]:
    """Return a verdict on every preset, with the micro-batch, unit and recomputation that suit it best.

    Pins on these numbers hold; the placements and wire formats are the preset's own.
    """
    numbers = {name: allowed for name, allowed in pins.ranges.items() if name in ("micro_batch", "unit", "recompute")}
    return [_preset_verdict(name, task, Pins(numbers)) for name in PRESETS]


def _preset_verdict(name: str, task: Task, pins: Pins) -> Verdict:
    plan = replace(preset(name, task.cluster), compute=task.compute, master=task.master)
    try:
        layout = validate(task.cluster, plan, task.blocks)
        num_micro_batches(plan, layout, task.batch)
    except (PlanError, ClusterError) as error:
        return Verdict(what=name, reason=str(error))
    own = replace(task, wire=plan.wire)
    space = Space(task=own, axes=("data",), pins=pins, placements=(placement_of(own, plan),))
    found, _ = find(space, count=1)
    if found.best:
        return Verdict(what=name, estimate=found.best[0], note=_rounded(plan))
    if found.nearest is None:
        return Verdict(what=name, reason="the pins leave it no micro-batch")
    return Verdict(what=name, estimate=found.nearest, reason=lack(task, found.nearest))


def _rounded(plan: Plan) -> str:
    formats = [f"{message} to {', '.join(dict.fromkeys(row.values()))}" for message, row in plan.wire.items()]
    return f"rounds {' and '.join(formats)}" if formats else ""


def lack(task: Task, estimate: Estimate) -> str:
    """Return what memory a plan lacks, and what takes most of it."""
    capacity = task.cluster.device.memory_bytes
    largest = sorted(estimate.memory_bytes.items(), key=lambda item: -item[1])[:2]
    most = ", ".join(f"{name} {size_words(size)}" for name, size in largest)
    needed, missing = estimate.needed_bytes, estimate.needed_bytes - capacity
    return f"needs {size_words(needed)} of {size_words(capacity)}, {size_words(missing)} too much; most are {most}"


def size_words(num_bytes: float) -> str:
    """Return a number of bytes in GB, or in TB where GB would take four digits."""
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes < 999.5e9 else f"{num_bytes / 1e12:.3g} TB"


def reasons(space: Space, evaluator: Evaluator, choice: Choice) -> list[Verdict]:
    """Return a verdict on every plan one step away from a choice: each says why its value was not taken."""
    found = []
    for what, other in _neighbours(space, choice):
        try:
            estimate = evaluator.evaluate(other)
        except PlanError as error:
            found.append(Verdict(what=what, reason=str(error)))
            continue
        fits = estimate.needed_bytes <= space.task.cluster.device.memory_bytes
        found.append(Verdict(what=what, estimate=estimate, reason="" if fits else lack(space.task, estimate)))
    return found


def _neighbours(space: Space, choice: Choice) -> list[tuple[str, Choice]]:
    task, shape = space.task, shape_of(choice.rows)
    free = Space(task=task, axes=space.axes)  # also what the pins rule out is worth a verdict
    tiers = ["device", *(tier.name for tier in task.cluster.tiers)]
    found = []
    for placement in placements(free, shape):
        states = ("params", "grads", "optimizer", "backward")
        moved = [state for state in states if getattr(placement, state) != getattr(choice.placement, state)]
        if len(moved) == 1:
            name = "params_backward" if moved[0] == "backward" else moved[0]
            place = getattr(placement, moved[0])
            word = "none" if name == "params_backward" and place < 0 else tiers[place + 1]
            found.append((f"{name} = {word}", choice._replace(placement=placement)))
    sizes = micro_batches(free, shape.data)
    at = sizes.index(choice.micro_batch)
    for size in (*sizes[max(0, at - 1) : at], *sizes[at + 1 : at + 2]):
        micros = task.batch // (shape.data * size)
        unit = max(unit for unit in divisors(micros) if unit <= choice.unit)
        found.append((f"micro_batch = {size}", choice._replace(micro_batch=size, unit=unit)))
    word = "none" if choice.recompute else "layers.*"
    found.append((f"recompute = {word}", choice._replace(recompute=1 - choice.recompute)))
    micros = num_micros(task, choice)
    if takes_unit(choice.schedule):
        options = passing_units(free, micros)
    else:
        options = units(free, micros, choice.placement, choice.schedule != SERIAL)
    at = options.index(choice.unit) if choice.unit in options else 0
    for unit in (*options[max(0, at - 1) : at], *options[at + 1 : at + 2]):
        found.append((f"unit = {unit}", choice._replace(unit=unit)))
    return found


def choice_changes(evaluator: Evaluator, choice: Choice) -> list[Change]:
    """Return the changes of one thing, of the plan or of the cluster, that fit the device, the shortest step first.

    Of the plan: a placement, the micro-batch, recomputation, the unit, the schedule of a pipeline and its chunks.
    """
    task, plan = evaluator.task, plan_of(evaluator.task, choice)
    own_bytes = evaluator.evaluate(choice).needed_bytes
    found = []
    verdicts = [*reasons(Space(task=task), evaluator, choice), *_schedules(evaluator, choice)]
    for verdict in verdicts:
        if verdict.estimate is not None and not verdict.reason:
            needed = verdict.estimate.needed_bytes
            note = f"memory {size_words(needed)}" if abs(needed / own_bytes - 1) > 0.02 else ""
            other = plan_of(task, verdict.estimate.choice)
            found.append(
                Change(
                    words=verdict.what,
                    kind="plan",
                    note=note,
                    cluster=task.cluster,
                    plan=other,
                    step_s=verdict.estimate.step_s,
                )
            )
    crossed = [tier for tier, here in enumerate(task.cluster.tiers) if here.size > 1]
    for change in cluster_changes(task.cluster, plan, crossed):
        faster = Evaluator(Bounds(Estimator(replace(task, cluster=change.cluster))))
        found.append(replace(change, step_s=faster.evaluate(choice).step_s))
    return sorted(found, key=lambda change: change.step_s)


def _schedules(evaluator: Evaluator, choice: Choice) -> list[Verdict]:
    if choice.schedule == SERIAL:
        return []
    found = []
    for name, trait in traits().items():
        for chunks in trait.chunks:
            if (name, chunks) != (choice.schedule, choice.chunks):
                unit = _unit(evaluator.task, choice) if takes_unit(name) else 1
                estimate = attempt(evaluator, choice._replace(schedule=name, chunks=chunks, unit=unit))
                if estimate is not None:
                    fits = estimate.needed_bytes <= evaluator.task.cluster.device.memory_bytes
                    reason = "" if fits else lack(evaluator.task, estimate)
                    words = f'schedule = "{schedule_text(name, chunks)}"'
                    found.append(Verdict(what=words, estimate=estimate, reason=reason))
    return found


def _unit(task: Task, choice: Choice) -> int:
    """Return the unit of another schedule: the choice's, or the shortest that keeps all its stages busy."""
    options = passing_units(Space(task=task), num_micros(task, choice))
    enough = [unit for unit in options if unit >= choice.degree(PIPELINE)]
    return choice.unit if choice.unit > 1 else min(enough, default=options[-1])
