"""The plan with the least regret over scenarios, and the term that an advantage rests on."""

from dataclasses import replace

import pytest

from terrace.planner.evaluate import Evaluator, step_of
from terrace.planner.headroom import headrooms
from terrace.planner.ranking import TIE, Estimate
from terrace.planner.robust import FULL_LONGER, KERNELS, LINKS, doubt, least_regret, scenarios
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.task import Task
from terrace.planner.ties import FULL, Ties, settle
from terrace.report.uncertainty import doubt_words, ties_words
from terrace.simulate.step import predict_step
from tests.support.planner_cases import CLUSTERS, small_task
from tests.support.planning import Planning, here

__all__ = ["here"]

TASK = small_task(CLUSTERS["dgx 4x2"], batch=32)


@pytest.fixture(scope="module")
def searched() -> tuple[Ties, Evaluator]:
    found, evaluator = find(Space(task=TASK, axes=("data",)))
    return settle(TASK, found.best), evaluator


def _step_s(task: Task, estimate: Estimate, evaluator: Evaluator) -> float:
    plan = replace(evaluator.plan(estimate.candidate), **estimate.chosen)
    return predict_step(step_of(task, plan)).step_s


def test_regrets_are_those_of_steps_predicted_anew_on_each_scenario(searched: tuple[Ties, Evaluator]) -> None:
    ties, evaluator = searched
    cases = scenarios(TASK.cluster)
    names = ["as described", "node slow", "node fast", "system slow", "system fast", "kernels slow", "launches slow"]
    assert [case.name for case in cases] == [*names, "full device slow"]
    found = least_regret(evaluator, ties, ties.best, cases)  # plans that are known already are compared once
    assert sorted(each.candidate for each in found.best) == sorted(each.candidate for each in ties.best)
    tasks = [replace(TASK, cluster=case.cluster) for case in cases]  # none of these plans fills a device
    table = [[_step_s(task, each, evaluator) for task in tasks] for each in found.best]
    least = [min(column) for column in zip(*table, strict=True)]
    worst = [max(a / b - 1 for a, b in zip(row, least, strict=True)) for row in table]
    assert [each.share for each in found.regrets] == pytest.approx(worst, abs=1e-9)
    assert worst[0] <= min(worst) + TIE
    assert found == least_regret(evaluator, ties, (), cases)


def test_each_scenario_is_slower_or_faster_than_described(searched: tuple[Ties, Evaluator]) -> None:
    ties, evaluator = searched
    described, *others = scenarios(TASK.cluster)
    own_s = _step_s(replace(TASK, cluster=described.cluster), ties.best[0], evaluator)
    for case in others[:-1]:
        step_s = _step_s(replace(TASK, cluster=case.cluster), ties.best[0], evaluator)
        assert (step_s < own_s) if case.name.endswith("fast") else (step_s > own_s), case.name
    rates = [case.cluster.tiers[0].bandwidth_bytes_per_s for case in others[:2]]
    assert rates[0] / rates[1] == pytest.approx((1 - LINKS) / (1 + LINKS))


def test_a_plan_that_fills_the_device_loses_to_one_that_leaves_room(searched: tuple[Ties, Evaluator]) -> None:
    """The room of a headroom's plan is worth what a full device may cost, and no more."""
    ties, evaluator = searched
    device = TASK.cluster.device
    full = replace(ties.best[0], memory_bytes={"params": int(device.memory_bytes * (FULL + 0.01))})
    roomy = replace(ties.best[1], memory_bytes={"params": int(device.memory_bytes * (FULL - 0.01))})
    cases = [scenarios(TASK.cluster)[0], scenarios(TASK.cluster)[-1]]
    two = ties._replace(best=(full,), num_tied=1)
    near, far = (replace(roomy, step_s=factor * full.step_s) for factor in (1 + FULL_LONGER / 4, 1 + FULL_LONGER))
    first = least_regret(evaluator, two, [near], cases)
    assert first.best == (near, full)
    assert first.regrets[1].scenario == "full device slow"
    assert first.regrets[0].share == pytest.approx(FULL_LONGER / 4)
    assert least_regret(evaluator, two, [far], cases).best == (full, far)
    assert "Plan 1 has the least, 1.2 % (as described), where the shortest" in " ".join(ties_words(first, 2).split())


def test_the_doubt_is_the_term_that_is_unsure_by_more_than_the_advantage(searched: tuple[Ties, Evaluator]) -> None:
    ties, _ = searched
    base = ties.best[0]

    def estimate(passes_s: float, wait_s: float) -> Estimate:
        times = {"forward": passes_s / 3, "backward": passes_s * 2 / 3, "wait gather": wait_s}
        return replace(base, step_s=passes_s + wait_s, time_s=times)

    one, other = estimate(1.0, 0.1), estimate(0.8, 0.32)
    found = doubt(one, other)
    assert found.term == "wait gather"
    assert found.advantage_s == pytest.approx(0.02)
    assert found.unsure_s == pytest.approx(LINKS * 0.22)
    assert found.unsure_s > KERNELS * 0.2, "the passes are less unsure"
    assert not doubt(other, one).term, "a slower plan has no advantage"
    assert not doubt(estimate(1.0, 0.1), estimate(1.2, 0.1)).term, "a fifth of the passes is less than the advantage"
    said = " ".join(doubt_words(ties._replace(best=(one, other)), 2).split())
    assert said.startswith("plan 1 is 20.0 ms faster than plan 2, which rests on wait gather: 100.0 ms of plan 1")
    assert doubt_words(ties._replace(best=(one, other)), 1) == ""


def test_a_headroom_gives_a_plan_that_the_finalists_lack() -> None:
    task = small_task(CLUSTERS["frontier 2x2x2"], batch=32)
    found, evaluator = find(Space(task=task, axes=("data",)))
    device = replace(task.cluster.device, memory_bytes=1.06 * max(each.needed_bytes for each in found.best))
    tight = replace(task, cluster=replace(task.cluster, device=device))
    space = Space(task=tight, axes=("data",))
    found, evaluator = find(space)
    ties = settle(tight, found.best)
    rooms = [each.best for each in headrooms(space, evaluator, ties.best[0], 24) if each.best is not None]
    chosen = least_regret(evaluator, ties, rooms, scenarios(tight.cluster))
    assert len(chosen.best) > len(ties.best)
    assert len({each.candidate for each in chosen.best}) == len(chosen.best) == len(chosen.regrets)


def test_the_command_writes_the_plan_with_the_least_regret_and_shows_all(here: Planning) -> None:
    words = ("--nodes", "2", "--axes", "data", "--robust")
    code, out, _ = here.say("plan", *words, batch=32)
    assert code == 0
    said = " ".join(out.split())
    assert "regret: by how much a plan is slower than the fastest of these" in said
    assert " regret " in next(line for line in out.splitlines() if "tokens/s" in line)
    assert "--robust has no effect with --scale" in here.refused("plan", "--scale", "--nodes", "2", "--robust")
