"""The fastest plan for each headroom is the one that trying everything finds; every search keeps to the headroom."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from terrace.cluster.device import headroom_bytes
from terrace.plan.search_limits import FINALISTS
from terrace.planner.evaluate import Evaluator
from terrace.planner.headroom import WIDER, headrooms, settled
from terrace.planner.ranking import Estimate, ranked
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.task import Task
from terrace.planner.ties import settle
from terrace.report.plans import headrooms_table
from terrace.report.uncertainty import is_tie
from tests.support.exhaustive import exhaustive
from tests.support.nightly import nightly
from tests.support.planner_cases import CLUSTERS, evaluator_of, long_13b, small_task


def with_memory(task: Task, memory_bytes: float, headroom: str = "0%") -> Task:
    device = replace(task.cluster.device, memory_bytes=memory_bytes, headroom=headroom)
    return replace(task, cluster=replace(task.cluster, device=device))


TASK, TWO = small_task(CLUSTERS["frontier 2x2x2"], batch=16), ("data", "tensor")


def _first(task: Task, evaluator: Evaluator, fitting: Sequence[Estimate]) -> Estimate:
    return settle(task, ranked(evaluator.played(each.candidate) for each in fitting[:FINALISTS])).best[0]


@pytest.fixture(scope="module")
def everything() -> list[Estimate]:
    """Every plan of the search below, whatever it needs."""
    return exhaustive(Space(task=TASK, axes=TWO), math.inf)


@pytest.mark.parametrize("share", [0.6, *nightly(1.0, 0.2)])
def test_the_fastest_plans_by_headroom_are_those_of_trying_everything(everything: list[Estimate], share: float) -> None:
    needs = sorted(each.needed_bytes for each in everything)
    memory = needs[int(share * (len(needs) - 1))]
    space = Space(task=with_memory(TASK, memory), axes=TWO)
    found, evaluator = find(space)
    wider = ("2%", "5%", "10%", "15%", "20%", "30%", "90%")
    first = settle(space.task, found.best).best[0]
    rooms = headrooms(space, evaluator, first, 10**6, wider)
    assert [room.headroom for room in rooms] == ["0%", *wider]
    before: Estimate | None = first
    for room in rooms:
        most = memory - headroom_bytes(room.headroom, memory)
        fitting = ranked(each for each in everything if each.needed_bytes <= most)
        assert room.is_complete
        assert (room.best is None) == (not fitting)
        if room.best is not None:
            assert room.best.needed_bytes <= most
            # The plan of the row above serves while it fits: it ties with the fastest.
            serves = before is not None and before.needed_bytes <= most
            chosen = before if serves else _first(space.task, evaluator, fitting)
            assert chosen is not None
            assert room.best.candidate == chosen.candidate
            assert is_tie(room.best.step_s, fitting[0].step_s)
        before = room.best
    assert rooms[-1].best is None
    assert len({room.best.candidate for room in rooms if room.best is not None}) > 1


def test_a_search_keeps_to_the_headroom_of_the_device(everything: list[Estimate]) -> None:
    """With a headroom of h bytes the plans are those of a device with h bytes less, and no narrower one is shown."""
    task, space = TASK, Space(task=TASK, axes=TWO)
    needs = sorted(each.needed_bytes for each in everything)
    memory = float(needs[len(needs) // 2])
    smaller, kept = (replace(space, task=with_memory(task, *of)) for of in ((memory,), (memory + 7e9, "7GB")))
    (plain, _), (found, evaluator) = find(smaller), find(kept)
    assert [each.candidate for each in found.best] == [each.candidate for each in plain.best]
    assert found.best[0].needed_bytes <= memory < needs[-1]
    rooms = headrooms(kept, evaluator, found.best[0], 400, ("1MB", "7GB", "8GB"))
    assert [room.headroom for room in rooms] == ["7GB", "8GB"]


def test_a_tying_plan_that_leaves_a_fifth_comes_before_those_that_fill_a_device() -> None:
    space = long_13b()
    whole = space.task.cluster.device.memory_bytes
    found, evaluator = find(space)
    assert all(each.needed_bytes > 0.93 * whole for each in found.best)
    ties = settled(space, evaluator, found.best)
    first, fastest = ties.best[0], min(found.best, key=lambda each: each.step_s)
    assert first.needed_bytes <= 0.8 * whole
    assert is_tie(first.step_s, fastest.step_s)
    assert ties.best[ties.fastest] == fastest
    table = headrooms(space, evaluator, first, 24)
    assert [room.best == first for room in table] == [True, True, True, False]


def test_a_table_writes_a_plan_once() -> None:
    task = small_task(CLUSTERS["frontier 2x2x2"], batch=32)
    space = Space(task=task, axes=("data",))
    found, evaluator = find(space)
    rooms = headrooms(space, evaluator, found.best[0], 400)
    assert all(room.best == found.best[0] for room in rooms)  # of 64 GB it needs little
    table = headrooms_table(task, rooms, "t")
    assert [row[0] for row in table.rows] == [task.cluster.device.headroom, *WIDER]
    assert [row[-1] for row in table.rows][1:] == ["the same"] * 3


def test_a_search_that_stopped_early_says_so() -> None:
    task = small_task(CLUSTERS["frontier 2x2x2"], batch=32)
    space = Space(task=task, axes=("data",))
    found, _ = find(space)
    tight = with_memory(task, found.best[0].needed_bytes * 1.01)
    rooms = headrooms(replace(space, task=tight), evaluator_of(tight), found.best[0], 1, ("2%", "5%"))
    assert rooms[0].is_complete
    assert not all(room.is_complete for room in rooms[1:])
    said = " ".join(str(cell) for *_, cell in headrooms_table(tight, rooms, "t").rows)
    assert "--limit" in said
