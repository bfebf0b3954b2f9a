"""`terrace plan --scale`: the predicted scaling curve of a plan, from one member of the outermost tier to many."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from terrace.base.errors import ConfigError, PlanError
from terrace.base.words import counted, filled
from terrace.cli.files import write_file
from terrace.cli.task import check_output, check_price, read_task, task_words, with_formats
from terrace.cli.terminal import Terminal
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import parse_cluster
from terrace.plan.as_software import run_as
from terrace.plan.plan import Plan
from terrace.plan.presets import PRESETS, command_plan
from terrace.plan.search_limits import FINALISTS
from terrace.planner.evaluate import step_of
from terrace.planner.headroom import settled
from terrace.planner.pins import Pins
from terrace.planner.scaling import PlanOf, Scaling, curve, preset_plan, sizes_up_to
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.task import Task, plan_of
from terrace.planner.verdicts import Point, lack
from terrace.report.plans import hidden_words, missing_words, numbers_words, plan_words, scaling_svg, scaling_table
from terrace.report.tables import outer_words
from terrace.report.uncertainty import scaling_bands_words
from terrace.simulate.hidden import hidden_between_nodes
from terrace.simulate.step import predict_step
from terrace.train.layers import section
from terrace.train.planned import Planned, read_planned


def show_scaling(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """Prints weak and strong scaling of `options.plan`, by default of the best data-parallel plan."""
    check_price(options.price)
    if options.picture is not None:
        check_output("--picture", options.picture, options)
    planned = read_planned(options.plan)
    task = read_task(options, rest, planned)
    plan, words = _plan(task, options.plan)
    if options.compute not in (None, plan.compute):  # a file's dtype: all else takes the task's
        raise ConfigError(
            f"--compute {options.compute}: plan {options.plan} computes in {plan.compute}; leave --compute out, or "
            f'set compute = "{options.compute}" in the plan'
        )
    plan = run_as(task.cluster, plan)
    task = with_formats(task, plan)
    outer, console = task.cluster.tiers[-1], Terminal()
    made_for = _made_for(options, task, planned)
    titles: dict[Scaling, str] = {
        "weak": f"weak scaling: {task.batch / made_for.world_size:.4g} sequences per device",
        "strong": f"strong scaling: {counted(task.batch, 'sequence')} a step",
    }
    sizes = sorted({*sizes_up_to(outer.size), min(made_for.tiers[-1].size, outer.size)})
    # A file is a whole plan; a preset leaves micro-batch, unit and recomputation open, so each size gets its own.
    known: Plan | PlanOf = plan
    if options.plan in PRESETS:
        known, words = partial(_of_preset, options.plan), f"{words.split('; ')[0]}; numbers for each size"
    curves = {scaling: curve(task, known, sizes, scaling, made_for.world_size) for scaling in titles}
    # A curve without points would print two tables of errors; a single error suffices.
    if not any(point.estimate for points in curves.values() for point in points):
        raise PlanError(f"plan {plan.name!r} runs at no size: {curves['strong'][-1].reason}")
    if options.picture is not None:  # first, so that a file that cannot be written is all there is to read
        title = f"predicted scaling of plan {plan.name} on {task.cluster.name}"
        named = {f"{scaling} scaling": points for scaling, points in curves.items()}
        write_file("--picture", options.picture, scaling_svg(named, title))
    print(filled(f"{task_words(task)}\nplan {plan.name}: {words}") + "\n")
    for scaling, title in titles.items():
        points, full = curves[scaling], options.full_attention_flops
        table = scaling_table(points, title, outer.name, options.price, full=full)
        if task.cluster.failures.are_known:
            # Imported here: where nothing fails there is nothing to add.
            from terrace.cli.goodput import of_points
            from terrace.report.goodput import add_columns

            add_columns(table, of_points(points))
        console.print(table)
        about = (
            scaling_bands_words(points, plan, outer.name),
            numbers_words(points, outer.name) if options.plan in PRESETS else "",
            _hidden_words(points),
            missing_words(points, outer.name),
        )
        print("\n".join(filter(None, about)) + "\n")
    if options.picture is not None:
        print(f"wrote {options.picture}")


def _hidden_words(points: Sequence[Point]) -> str:
    """A paragraph on messages between nodes that the largest feasible size relies on hiding; "" if there are none."""
    ran = [(point.task, point.plan) for point in points if point.plan]
    if not ran:
        return ""
    task, plan = ran[-1]
    outer, hidden = task.cluster.tiers[-1], hidden_between_nodes(predict_step(step_of(task, plan)))
    return filled(hidden_words(hidden, f"{outer.name} {outer.size}"))


def _of_preset(name: str, task: Task) -> Plan:
    return preset_plan(name, task)[0]


def _made_for(options: argparse.Namespace, task: Task, planned: Planned | None) -> Cluster:
    # The cluster whose batch the task has.
    if planned is None or options.batch is not None:
        return task.cluster
    # With --cluster, the batch counts as made for that cluster.
    return parse_cluster(dict(planned.cluster)) if options.cluster is None else task.cluster


def _plan(task: Task, name: str | None) -> tuple[Plan, str]:
    """The plan for the largest size, from a name, a file or a search, and a description."""
    if name is not None and name not in PRESETS:
        plan = command_plan(section("plan", name), task.cluster)
        words = f"params {plan.params}, grads {plan.grads}, optimizer {plan.optimizer}"
        islands = f"; {outer_words(plan.outer)}: a step is its cycle's mean" * plan.outer.has_islands
        return plan, f"{words}{islands}"
    if name is not None:
        try:
            plan, candidate = preset_plan(name, task)
        except PlanError as error:
            raise PlanError(
                f"preset {name!r} does not run at the largest size: {error}; use more nodes or another --batch"
            ) from error
        return plan, plan_words(replace(task, wire=plan.wire), candidate)
    space = Space(task=task, axes=("data",), pins=Pins())
    found, evaluator = find(space, count=FINALISTS)
    if not found.best:
        why = lack(task, found.nearest) if found.nearest else f"a batch of {task.batch} does not divide over the ranks"
        raise PlanError(f"no data-parallel plan runs at the largest size: {why}; use more nodes or another --batch")
    candidate = settled(space, evaluator, found.best).best[0].candidate
    return plan_of(task, candidate, name="planned"), plan_words(task, candidate)
