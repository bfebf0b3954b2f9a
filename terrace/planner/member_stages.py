"""Pipelines of unequal members: which member has which stages, blocks by their speeds, and a format for each boundary.

The order and the stages are those of the shortest predicted step: of up to `MOST_TRIED` members all orders are played,
of more, exchanges of two members as long as one helps. Where formats for messages between stages are allowed, all
boundaries begin with the narrowest; then each, from the fastest link to the slowest, takes the widest that leaves the
step practically as short. So the slowest boundary is coded just enough to leave the critical path, which is the aim of
AdaTopK (FusionLLM, arXiv 2410.12707).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, permutations

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.plan.members import boundary_links
from terrace.plan.plan import Plan
from terrace.plan.wire import BETWEEN, BETWEEN_STAGES
from terrace.planner.evaluate import step_of
from terrace.planner.ranking import TIE
from terrace.planner.task import Task
from terrace.simulate.step import Prediction, predict_step

MOST_TRIED = 4
Formats = Mapping[str, Sequence[str]]  # message class between stages -> formats that it may have, widest first


def best_pipeline(task: Task, plan: Plan, formats: Formats) -> Prediction:
    """The fastest order, stages and formats of a pipeline across the outermost tier of `task`'s cluster.

    Raises `PlanError` if no order fits.
    """
    plain = _ordered(task, replace(plan, stages=(), order=(), wire=_wire(task, plan, {})))
    if not formats:
        return plain
    size = task.cluster.tiers[-1].size - 1
    chosen = {message: [names[-1]] * size for message, names in formats.items()}
    coded = _ordered(task, replace(plan, stages=(), order=(), wire=_wire(task, plan, chosen)))
    if coded.step_s >= (1 - TIE) * plain.step_s:
        return plain
    order, found = coded.step.plan.order, coded
    links = boundary_links(task.cluster, coded.step.plan)[:size]
    for boundary in sorted(range(size), key=lambda each: links[each], reverse=True):
        for message, names in formats.items():
            for name in names:
                tried = {**chosen, message: [*chosen[message]]}
                tried[message][boundary] = name
                wire = _wire(task, plan, tried)
                played = predict_step(step_of(task, replace(plan, stages=(), order=order, wire=wire)))
                if played.step_s <= (1 + TIE) * coded.step_s:
                    chosen, found = tried, played
                    break
    return found


def _ordered(task: Task, plan: Plan) -> Prediction:
    """The step with the best order of members."""
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


def _wire(task: Task, plan: Plan, chosen: Mapping[str, Sequence[str]]) -> dict[str, dict[str, str]]:
    """The plan's table with these formats by boundary; the default of every boundary where a class has none."""
    tier = task.cluster.tiers[-1].name
    found = {message: dict(row) for message, row in plan.wire.items()}
    for message in BETWEEN_STAGES:
        row = found.setdefault(message.value, {})
        row.pop(tier, None)
        names = chosen.get(message.value, ())
        if set(names) - {plan.compute}:  # the default
            row[tier] = names[0] if len(set(names)) == 1 else f"{BETWEEN} ".join(names)
    return {message: row for message, row in found.items() if row}
