"""Pipelines of unequal members: which member has which stages, blocks by their speeds, and a format for each boundary.

The order and the stages are those of the shortest predicted step: of up to `MOST_TRIED` members all orders are played,
of more, exchanges of two members as long as one helps. Where formats for messages between stages are allowed, all
boundaries begin with the narrowest; then each, from the fastest link to the slowest, takes the widest that leaves the
step practically as short. So the slowest boundary is coded just enough to leave the critical path, which is the aim of
AdaTopK (FusionLLM, arXiv 2410.12707). A run whose links have changed chooses its formats by the same rule.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, permutations

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.plan.members import boundary_formats, boundary_links, with_formats
from terrace.plan.plan import Plan
from terrace.planner.evaluate import step_of
from terrace.planner.ranking import TIE
from terrace.planner.task import Task
from terrace.simulate.step import Prediction, Step, predict_step

MOST_TRIED = 4
Formats = Mapping[str, Sequence[str]]  # message class between stages -> formats that it may have, widest first
Allowed = Mapping[str, Sequence[Sequence[str]]]  # the same by boundary
Play = Callable[[Mapping[str, Sequence[str]]], Prediction]  # of the step with formats by boundary


def best_pipeline(task: Task, plan: Plan, formats: Formats) -> Prediction:
    """The fastest order, stages and formats of a pipeline across the outermost tier of `task`'s cluster.

    Raises `PlanError` if no order fits.
    """
    cluster = task.cluster
    plan = replace(plan, stages=(), order=())
    plain = _ordered(task, with_formats(plan, cluster, {}))
    if not formats:
        return plain
    size = cluster.tiers[-1].size - 1
    allowed = {message: [names] * size for message, names in formats.items()}
    coded = _ordered(task, with_formats(plan, cluster, _narrowest(allowed)))
    if coded.step_s >= (1 - TIE) * plain.step_s:
        return plain
    placed = replace(plan, order=coded.step.plan.order)
    links = boundary_links(cluster, placed)[:size]
    return _just_enough(
        lambda chosen: predict_step(step_of(task, with_formats(placed, cluster, chosen))), links, allowed, coded
    )


def formats_anew(step: Step, allowed: Allowed) -> tuple[dict[str, tuple[str, ...]], float, float]:
    """The formats that a pipeline over members has by the rule above, on the links of `step`.

    Returns these formats, and the predicted seconds of the step with its own formats and with these.
    """

    def play(chosen: Mapping[str, Sequence[str]]) -> Prediction:
        return predict_step(replace(step, plan=with_formats(step.plan, step.cluster, chosen)))

    plain = play({message: [names[0] for names in each] for message, each in allowed.items()})
    coded = play(_narrowest(allowed))
    found = plain if coded.step_s >= (1 - TIE) * plain.step_s else _just_enough(play, step.links, allowed, coded)
    return boundary_formats(step.cluster, found.step.plan), predict_step(step).step_s, found.step_s


def _narrowest(allowed: Allowed) -> dict[str, list[str]]:
    return {message: [names[-1] for names in each] for message, each in allowed.items()}


def _just_enough(play: Play, links: Sequence[tuple[float, float]], allowed: Allowed, coded: Prediction) -> Prediction:
    """The step whose boundaries have the widest formats with which it is practically as short as `coded`, the step with
    the narrowest.
    """
    chosen, found = _narrowest(allowed), coded
    for boundary in sorted(range(len(links)), key=lambda each: links[each], reverse=True):
        for message, names in allowed.items():
            for name in names[boundary]:
                tried = {**chosen, message: [*chosen[message]]}
                tried[message][boundary] = name
                played = play(tried)
                if played.step_s <= (1 + TIE) * coded.step_s:
                    chosen, found = tried, played
                    break
    return found


def _ordered(task: Task, plan: Plan) -> Prediction:
    found, cluster = list[Prediction](), task.cluster
    size = cluster.tiers[-1].size
    if size <= MOST_TRIED:
        for order in _distinct(cluster, permutations(range(size))):
            with suppress(PlanError):  # a stage that does not fit
                found.append(_played(task, plan, order))
        if not found:
            return _played(task, plan, tuple(range(size)))  # raises why
        return min(found, key=lambda each: each.step_s)
    best, order = _played(task, plan, tuple(range(size))), tuple(range(size))
    helps = True
    while helps:
        helps = False
        for one, other in combinations(range(size), 2):
            swapped = list(order)
            swapped[one], swapped[other] = order[other], order[one]
            with suppress(PlanError):
                played = _played(task, plan, tuple(swapped))
                if played.step_s < (1 - TIE) * best.step_s:
                    best, order, helps = played, tuple(swapped), True
    return best


def _played(task: Task, plan: Plan, order: tuple[int, ...]) -> Prediction:
    # A plan without `order` has the members in their own order.
    own = () if order == tuple(range(len(order))) else order
    return predict_step(step_of(task, replace(plan, order=own)))


def _distinct(cluster: Cluster, orders: Iterator[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Orders that differ in the kinds of their members: members of one table are alike."""
    tables = [number for number, each in enumerate(cluster.tiers[-1].members) for _ in range(each.count)]
    seen = set[tuple[int, ...]]()
    for order in orders:
        kinds = tuple(tables[member] for member in order)
        if kinds not in seen:
            seen.add(kinds)
            yield order
