"""Narrow optimizer states are stored where they are allowed and shorten the step, and never unasked."""

import math
from dataclasses import replace

import pytest

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.planner.narrow_states import Way, find_stored, parse_ways
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.task import plan_of
from terrace.report.loops import stored_words
from terrace.simulate.layers import optimizer_s
from tests.support.planner_cases import CLUSTERS, task_on


def with_memory(cluster: Cluster, memory_bytes: float) -> Cluster:
    return replace(cluster, device=replace(cluster.device, memory_bytes=memory_bytes))


def test_nothing_is_narrowed_unasked() -> None:
    task = task_on(CLUSTERS["dgx 4x2"])
    space = Space(task=task)
    ways, rest = parse_ways(["sync=int8"], task)
    searched, plain_s = find_stored(space, {}, ways, 2, 400)
    assert (ways, rest) == ([], ["sync=int8"])
    assert searched.found == find(space, 2, 400)[0]
    assert searched.found.best[0].step_s == plain_s
    assert stored_words(ways, task, plain_s, plain_s) == ""


def test_states_are_narrowed_where_nothing_fits_without() -> None:
    cluster = CLUSTERS["dgx 4x2"]
    task = task_on(cluster)
    ways, rest = parse_ways(["optimizer_states=int8", "optimizer_states=bf16", "master=bf16"], task)
    assert rest == []
    assert ways[0] == Way("bf16", None)
    assert ways[-1] == Way("bf16", "int8")
    assert len(ways) == 5
    sizes = [way.element_bytes for way in ways]
    assert sizes == sorted(sizes, reverse=True)

    def fits(way: Way, memory_bytes: float) -> bool:
        narrow = replace(way.task(task), cluster=with_memory(cluster, memory_bytes))
        return bool(find(Space(task=narrow, axes=("data",)), 1, 400)[0].best)

    low, high = 1e9, 8e9
    for _ in range(16):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(Way("fp32", None), middle) else (middle, high)
    memory = low
    assert fits(ways[-1], memory)
    space = Space(task=replace(task, cluster=with_memory(cluster, memory)), axes=("data",))
    searched, plain_s = find_stored(space, {}, ways, 1, 400)
    chosen, best = searched.space.task, searched.found.best[0]
    assert plain_s == math.inf
    assert Way(chosen.master, chosen.optimizer_states) in ways
    assert best.needed_bytes <= memory
    plan = plan_of(chosen, best.candidate)
    assert (plan.master, plan.optimizer_states) == (chosen.master, chosen.optimizer_states)
    words = stored_words(ways, chosen, best.step_s, plain_s)
    assert f"parameters are stored in {plan.master} and optimizer states in" in words
    assert "nothing fits without" in words


def test_an_update_of_narrow_states_is_priced_by_what_rounding_reads_and_writes() -> None:
    task = task_on(CLUSTERS["dgx 4x2"])
    device = task.cluster.device
    plain_s = optimizer_s(device, 1e11) - device.kernels.optimizer_s
    each = [
        optimizer_s(device, 1e11, Way(*pair).task(task).rounding_bytes) - device.kernels.optimizer_s
        for pair in (("fp32", None), ("fp32", "bf16"), ("fp32", "int8"), ("bf16", None), ("bf16", "int8"))
    ]
    # 44 bytes; two moments of 8 - 4 and 8 - 2.03 bytes less, and of each 110 or 175 bytes of rounding and 8 of a copy.
    int8 = 2 * (2 * (1 + 4 / 256) - 8 + 8 + 175)
    wanted = [44, 44 + 2 * (4 - 8 + 8 + 110), 44 + int8, 44 + 4 + 110, 44 + int8 + 4 + 110]
    assert [seconds / plain_s for seconds in each] == pytest.approx([size / 44 for size in wanted], rel=1e-3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optimizer_states=fp8", "--allow optimizer_states=fp8: optimizer_states can be stored in bf16 or int8"),
        ("master=int8", "--allow master=int8: master can be stored in bf16; write master=bf16$"),
        ("optimizer_states.node=int8", "optimizer_states belongs to no tier; write optimizer_states=int8"),
        ("optimizer_states=", "optimizer_states can be stored in bf16 or int8"),
    ],
)
def test_what_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        parse_ways([text], task_on(CLUSTERS["dgx 4x2"]))


def test_what_has_no_effect_is_refused() -> None:
    task = replace(task_on(CLUSTERS["dgx 4x2"]), optimizer_states="int8", compute="fp32")
    with pytest.raises(PlanError, match="has no effect: optimizer_states is stored in int8 anyway"):
        parse_ways(["optimizer_states=int8"], task)
    with pytest.raises(PlanError, match="parameters that are computed with in fp32 would lose bits in bf16"):
        parse_ways(["master=bf16"], task)
