"""Reasons for a plan: the presets and the candidate's neighbours as changes, predicted or refused."""

from dataclasses import replace

from terrace.base.errors import ClusterError, PlanError
from terrace.plan.as_software import run_as
from terrace.plan.layout import Layout
from terrace.plan.plan import Plan
from terrace.plan.presets import PRESETS, preset
from terrace.plan.validate import num_micro_batches, validate
from terrace.planner.advice import Change, setting_words
from terrace.planner.divisions import divisors, neighbours
from terrace.planner.evaluate import Evaluator
from terrace.planner.pins import Pins
from terrace.planner.search import find
from terrace.planner.space import Space, micro_batches, passing_units, placements, recomputations, units
from terrace.planner.stages import SERIAL
from terrace.planner.task import Candidate, Placement, Task, num_micros, plan_of, with_dtypes
from terrace.planner.verdicts import lack
from terrace.program.schedules.registry import takes_unit


def placement_of(task: Task, plan: Plan) -> Placement:
    """Tier index of each state of a plan. Raises `ClusterError` for an unknown tier."""
    layout = Layout.written(task.cluster, plan)
    if task.islands.num > 1:
        layout = layout.settled()  # on all islands a state of the outermost tier would not lie inside
    second = plan.params_backward is not None and (task.islands.num == 1 or layout.params_backward < layout.params)
    backward = layout.params_backward if second else -1
    return Placement(layout.params, layout.grads, layout.optimizer, backward)


def preset_changes(task: Task, pins: Pins) -> list[Change]:
    """Every preset with its best micro-batch, unit and recomputation.

    Pins on these numbers apply; placements and wire formats are the preset's.
    """
    numbers = {name: allowed for name, allowed in pins.ranges.items() if name in ("micro_batch", "unit", "recompute")}
    return [_preset_change(name, task, Pins(numbers)) for name in PRESETS]


def _preset_change(name: str, task: Task, pins: Pins) -> Change:
    plan = run_as(task.cluster, with_dtypes(task, preset(name, task.cluster)))
    change = Change(words=name, cluster=task.cluster, plan=plan)
    try:
        layout = validate(task.cluster, plan, task.blocks)
        num_micro_batches(plan, layout, task.batch)
    except (PlanError, ClusterError) as error:
        return replace(change, reason=str(error))
    own = replace(task, wire=plan.wire)
    space = Space(task=own, axes=("data",), pins=pins, placements=(placement_of(own, plan),))
    found, _ = find(space, count=1)
    if found.best:
        plan = plan_of(own, found.best[0].candidate)
        return replace(change, plan=plan, cost=found.best[0], note=_rounded(plan))
    if found.nearest is None:
        return replace(change, reason="the pins leave it no micro-batch")
    plan = plan_of(own, found.nearest.candidate)
    return replace(change, plan=plan, cost=found.nearest, reason=lack(task, found.nearest))


def _rounded(plan: Plan) -> str:
    formats = [f"{message} to {', '.join(dict.fromkeys(row.values()))}" for message, row in plan.wire.items()]
    return f"rounds {' and '.join(formats)}" if formats else ""


def reasons(space: Space, evaluator: Evaluator, candidate: Candidate) -> list[Change]:
    """Every plan one step away from a candidate."""
    task, found = space.task, list[Change]()
    for words, other in _neighbours(space, candidate):
        change = Change(words=words, cluster=task.cluster, plan=plan_of(task, other))
        try:
            cost = evaluator.played(other)
        except PlanError as error:
            found.append(replace(change, reason=str(error)))
            continue
        fits = cost.needed_bytes <= task.cluster.device.usable_bytes
        note = "" if _is_searched(space, other) else "ruled out by a pin"
        found.append(replace(change, cost=cost, note=note, reason="" if fits else lack(task, cost)))
    return found


def _is_searched(space: Space, candidate: Candidate) -> bool:
    """Whether the pins leave the numbers and the placement of a neighbour to the search."""
    mesh, pins = candidate.mesh, space.pins
    return (
        pins.allows("micro_batch", candidate.micro_batch)
        and pins.allows("unit", candidate.unit)
        and candidate.recompute in recomputations(space, mesh)
        and candidate.placement in placements(space, mesh)
    )


def _neighbours(space: Space, candidate: Candidate) -> list[tuple[str, Candidate]]:
    task, mesh = space.task, candidate.mesh
    free = Space(task=task, axes=space.axes)  # values that the pins rule out are shown, too
    tiers = ["device", *(tier.name for tier in task.cluster.tiers)]
    found = []
    for placement in placements(free, mesh):
        states = ("params", "grads", "optimizer", "backward")
        moved = [state for state in states if getattr(placement, state) != getattr(candidate.placement, state)]
        # Neighbours differ in one placement only, so that each has one cause.
        if len(moved) == 1:
            name = "params_backward" if moved[0] == "backward" else moved[0]
            place = getattr(placement, moved[0])
            tier = None if name == "params_backward" and place < 0 else tiers[place + 1]
            found.append((setting_words({name: tier}), candidate._replace(placement=placement)))
    sizes = micro_batches(free, mesh.total("data"))
    at = sizes.index(candidate.micro_batch)
    for size in (*sizes[max(0, at - 1) : at], *sizes[at + 1 : at + 2]):
        micros = task.batch // (mesh.total("data") * size)
        # Another micro-batch size changes their number, which the unit must still divide.
        unit = max(unit for unit in divisors(micros) if unit <= candidate.unit)
        found.append((setting_words({"micro_batch": size}), candidate._replace(micro_batch=size, unit=unit)))
    found += [(words, candidate._replace(mesh=other)) for words, other in neighbours(free.task, free.pins, mesh)]
    found += _recompute_neighbours(task, candidate)
    micros = num_micros(task, candidate)
    if takes_unit(candidate.schedule):
        options = passing_units(free, micros)
    else:
        options = units(free, micros, candidate.placement, candidate.schedule != SERIAL)
    at = options.index(candidate.unit) if candidate.unit in options else 0
    for unit in (*options[max(0, at - 1) : at], *options[at + 1 : at + 2]):
        found.append((setting_words({"unit": unit}), candidate._replace(unit=unit)))
    return found


def _recompute_neighbours(task: Task, candidate: Candidate) -> list[tuple[str, Candidate]]:
    """Other values of `recompute` for all layers: none, the first of the chain, whole layers."""
    axes = {axis: candidate.mesh.total(axis) > 1 for axis in ("tensor", "context")}
    chain = task.recomputations.chain(**axes, partly=False)
    # The candidate's value may treat its first layers differently.
    others = dict.fromkeys(
        value for value in (*chain[:2], chain[-1]) if (value, 0) != (candidate.recompute, candidate.first)
    )
    return [
        (setting_words({"recompute": task.recomputed(value)}), candidate._replace(recompute=value, first=0))
        for value in others
    ]
