"""The fastest plan for each part of the memory that stays free is the one that trying everything finds."""

import math
from dataclasses import replace

import pytest

from terrace.planner.headroom import PARTS, headrooms
from terrace.planner.ranking import ranked
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.task import Task
from terrace.report.plans import headrooms_table
from tests.support.exhaustive import exhaustive
from tests.support.planner_cases import CLUSTERS, evaluator_of, small_task


def with_memory(task: Task, memory_bytes: float) -> Task:
    device = replace(task.cluster.device, memory_bytes=memory_bytes)
    return replace(task, cluster=replace(task.cluster, device=device))


@pytest.mark.parametrize("share", [1.0, 0.6, 0.2])
def test_the_fastest_plans_by_headroom_are_those_of_trying_everything(share: float) -> None:
    task = small_task(CLUSTERS["frontier 2x2x2"], batch=32)
    axes = ("data", "tensor")
    everything = exhaustive(Space(task=task, axes=axes), evaluator_of(task), math.inf)
    needs = sorted(each.needed_bytes for each in everything)
    memory = needs[int(share * (len(needs) - 1))]
    space = Space(task=with_memory(task, memory), axes=axes)
    found, evaluator = find(space)
    parts = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.9)
    rooms = headrooms(space, evaluator, found.best[0], 10**6, parts)
    assert [room.free for room in rooms] == list(parts)
    for room in rooms:
        fitting = ranked(each for each in everything if each.needed_bytes <= (1 - room.free) * memory)
        assert room.proved
        assert (room.best is None) == (not fitting)
        if room.best is not None:
            assert room.best.needed_bytes <= (1 - room.free) * memory
            assert room.best.candidate == fitting[0].candidate
    assert rooms[-1].best is None
    assert len({room.best.candidate for room in rooms if room.best is not None}) > 1


def test_a_table_writes_a_plan_once() -> None:
    task = small_task(CLUSTERS["frontier 2x2x2"], batch=32)
    space = Space(task=task, axes=("data",))
    found, evaluator = find(space)
    rooms = headrooms(space, evaluator, found.best[0], 400)
    assert all(room.best == found.best[0] for room in rooms)  # of 64 GB it needs little
    table = headrooms_table(task, rooms, "t")
    assert list(table.columns[0].cells) == [f"{100 * part:.0f} %" for part in PARTS]
    assert list(table.columns[-1].cells)[1:] == ["the same"] * 3


def test_a_search_that_stopped_early_says_so() -> None:
    task = small_task(CLUSTERS["frontier 2x2x2"], batch=32)
    space = Space(task=task, axes=("data",))
    found, _ = find(space)
    tight = with_memory(task, found.best[0].needed_bytes * 1.01)
    rooms = headrooms(replace(space, task=tight), evaluator_of(tight), found.best[0], 1, (0.0, 0.02, 0.05))
    assert rooms[0].proved
    assert not all(room.proved for room in rooms[1:])
    said = " ".join(str(cell) for cell in headrooms_table(tight, rooms, "t").columns[-1].cells)
    assert "--limit" in said
