"""Changes with which a model fits where a plan does not, found by searches: another plan, fewer pins, or more nodes."""

from collections.abc import Sequence
from dataclasses import replace

from terrace.plan.plan import AXES
from terrace.planner.least_nodes import MAX_GROWTH, least_nodes
from terrace.planner.pins import Pins
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.task import Task
from terrace.report.plans import plan_words
from terrace.report.tables import seconds


def fitting_words(task: Task, limit: int, plan_command: str = "") -> str:
    """The fastest plan of a task that fits, in words, or else the fewest nodes; at most `limit` plans are simulated.

    `plan_command` writes such a plan.
    """
    space = Space(task=task)
    best = find(space, 1, limit)[0].best
    if not best:
        return f"no plan fits here; {nodes_words(space, limit)}"
    written = f"; to have it written: {plan_command}" if plan_command else ""
    words = plan_words(task, best[0].candidate)
    return f"the fastest plan that fits takes {seconds(best[0].step_s)} a step: {words}{written}"


def freer_words(space: Space, pinned: Sequence[str], limit: int) -> str:
    """Pins that a search without a result may leave out so that some plan fits, or else the fewest nodes.

    `pinned` are its pins as they were written.
    """
    task = space.task
    pins, axes = f"without {' and '.join(pinned)}", "with --axes all"
    freer = [(replace(space, pins=Pins()), pins)] if pinned else []
    if {*space.axes} != {*AXES}:
        freer.append((replace(space, axes=AXES), axes))
        freer += [(Space(task=task), f"{pins} and {axes}")] if pinned else []
    for each, words in freer:
        best = find(each, 1, limit)[0].best
        if best:
            return f"{words} one fits: {plan_words(task, best[0].candidate)}"
    if task.islands is not None:  # further islands do not change the memory of one
        return "no plan of an island does: make islands larger, with more members on the tiers inside"
    return nodes_words(space, limit)


def nodes_words(space: Space, limit: int) -> str:
    """The fewest members of the outermost tier with which some plan of a space fits, in words."""
    task, larger = space.task, least_nodes(space, limit=limit)
    if larger is None and tuple(space.axes) == ("data",):
        larger = least_nodes(space, limit=limit, grow_batch=True)
    if larger is None:
        return f"nor with up to {MAX_GROWTH} times as many members of {task.cluster.tiers[-1].name!r}"
    there, found = larger
    batch = "" if there.batch == task.batch else f" --batch {there.batch}"
    options = f"--nodes {there.cluster.tiers[-1].size}{batch}"
    return f"{options}, the fewest with which one fits, has room for: {plan_words(there, found.candidate)}"
