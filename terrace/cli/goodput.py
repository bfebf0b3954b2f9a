"""Goodput on the screens of `terrace plan`, imported where the cluster's file says how often its parts fail."""

from collections.abc import Sequence

from terrace.cli.terminal import Terminal
from terrace.cluster.cluster import Cluster
from terrace.plan.plan import Plan
from terrace.planner.evaluate import Evaluator, step_of
from terrace.planner.outlook import Outlook, outlook
from terrace.planner.ranking import Estimate
from terrace.planner.task import Task, plan_of
from terrace.planner.verdicts import Point
from terrace.report.goodput import ways_table, ways_words
from terrace.simulate.step import predict_step
from terrace.train.planned import num_machines


def of_estimates(cluster: Cluster, evaluator: Evaluator, estimates: Sequence[Estimate]) -> list[Outlook | None]:
    """The outlook of each plan of a search on `cluster`, of which the task may be one island."""
    task, found = evaluator.task, list[Outlook | None]()
    for each in estimates:
        plan = plan_of(task, each.candidate)
        found.append(outlook(cluster, evaluator.predicted(step_of(task, plan)), num_machines(cluster)))
    return found


def of_points(points: Sequence[Point]) -> list[Outlook | None]:
    """The outlook of each size of a scaling curve; None for one at which the plan does not run."""
    return [None if point.plan is None else _of_plan(point.task, point.plan) for point in points]


def show_ways(task: Task, plan: Plan, console: Terminal) -> None:
    found = _of_plan(task, plan)
    console.print(ways_table(found))
    print(f"{ways_words(found)}\n")


def _of_plan(task: Task, plan: Plan) -> Outlook:
    return outlook(task.cluster, predict_step(step_of(task, plan)), num_machines(task.cluster))
