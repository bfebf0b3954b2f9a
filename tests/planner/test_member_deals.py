"""Shares of unequal members: the least longest step of all shares, and its prediction."""

from dataclasses import replace
from functools import partial
from itertools import pairwise, permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.model.config import ModelConfig
from terrace.plan.outer import diloco
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.planner.evaluate import step_of
from terrace.planner.members import deal, least_shares, slowest
from terrace.planner.ranking import TIE, Estimate
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.task import Task
from terrace.program.shares import share_apart
from terrace.simulate.members import predict_member
from terrace.simulate.step import predict_alike, predict_step
from tests.support.member_cases import partitions, unequal
from tests.support.planner_cases import gpt

MODEL = gpt(2, 64, 2, vocab=257, positions=64)
DEEP = gpt(12, 64, 2, vocab=257, positions=64)
SPEEDS = (0.9, 0.5, 0.3, 0.3)


def line(start: float, slope: float, number: int) -> float:
    return start + slope * number


@settings(max_examples=60)
@given(
    slopes=st.lists(st.floats(0.1, 10), min_size=1, max_size=4),
    starts=st.lists(st.floats(0, 5), min_size=4, max_size=4),
    more=st.integers(0, 8),
)
def test_greedy_shares_are_the_best_of_all(slopes: list[float], starts: list[float], more: int) -> None:
    total = len(slopes) + more
    seconds = [partial(line, start, slope) for slope, start in zip(slopes, starts, strict=False)]

    def longest_s(shares: tuple[int, ...]) -> float:
        return max(each(share) for each, share in zip(seconds, shares, strict=True))

    best_s = min(map(longest_s, partitions(total, len(slopes))))
    assert longest_s(least_shares(total, seconds)) == pytest.approx(best_s)


def test_fewer_micro_batches_than_members_are_refused() -> None:
    with pytest.raises(PlanError, match="2 micro-batches for 3 members"):
        least_shares(2, [float] * 3)


def found(cluster: Cluster, plan: Plan, batch: int, model: ModelConfig = MODEL) -> tuple[Task, Plan, Estimate]:
    task = Task(model=model, cluster=cluster, batch=batch, sequence=16, compute="fp32")
    alike = replace(task, cluster=slowest(cluster, "fp32"))
    (estimate, *_) = find(Space(task=alike), count=1)[0].best
    return task, plan, estimate


@pytest.mark.parametrize("islands", [False, True])
def test_chosen_shares_are_the_best_of_all_played(islands: bool) -> None:
    """Four members; all shares of 12 micro-batches are predicted."""
    cluster = unequal(*SPEEDS)
    plan = replace(preset("ddp", cluster), micro_batch=1)
    if islands:
        plan = replace(plan, outer=replace(diloco("node"), every=4))
    task, plan, estimate = found(cluster, plan, 12)
    chosen = deal(task, plan, estimate)
    step = step_of(task, plan)
    own_s = {
        (alike, number): predict_alike(replace(step, cluster=alike, num_micros=number)).step_s
        for alike, _ in cluster.alike
        for number in range(1, 10)
    }
    clusters = [alike for alike, _ in cluster.alike]

    def longest_s(shares: tuple[int, ...]) -> float:
        return max(own_s[alike, share] for alike, share in zip(clusters, shares, strict=True))

    assert chosen.estimate.step_s == pytest.approx(min(map(longest_s, partitions(12, 4))), rel=1e-9)
    assert chosen.estimate.step_s == pytest.approx(longest_s(chosen.plan.shares), rel=1e-9)
    assert chosen.even_s == pytest.approx(longest_s((3, 3, 3, 3)), rel=1e-9)
    assert sum(chosen.plan.shares) == 12
    assert chosen.gain > 1.25
    assert min(chosen.waits_s) == pytest.approx(0.0, abs=1e-9)


def test_every_member_sees_the_step_of_the_slowest() -> None:
    cluster = unequal(1.0, 0.25)
    plan = replace(preset("ddp", cluster), micro_batch=1, shares=(6, 2))
    task = Task(model=MODEL, cluster=cluster, batch=8, sequence=16, compute="fp32")
    step = step_of(task, plan)
    whole = predict_step(step)
    for member, share in enumerate(plan.shares):
        seen = predict_member(step, member)
        assert seen.step_s == pytest.approx(whole.step_s)
        assert seen.programs[0].num_micros == share
    slow = predict_alike(replace(step, cluster=cluster.alike[1][0], num_micros=2))
    assert whole.step_s == slow.step_s
    # The faster member waits in the messages where it meets the other.
    assert predict_member(step, 0).times_s[0]["wait sync"] > slow.times_s[0].get("wait sync", 0.0)
    # Equal shares are decided by the slow member, too.
    even = replace(step, plan=replace(plan, shares=()), num_micros=4)
    assert predict_step(even).step_s == predict_alike(replace(even, cluster=cluster.alike[1][0])).step_s


def pipeline(cluster: Cluster) -> Plan:
    return replace(preset("ddp", cluster), micro_batch=1, mapping={"node": {"pipeline": cluster.tiers[-1].size}})


def test_a_pipeline_of_members_that_are_alike_is_that_of_their_speed() -> None:
    """Stages priced one by one are the pipeline of the slowed cluster."""
    cluster = unequal(0.5, 0.5)
    task = Task(model=DEEP, cluster=cluster, batch=8, sequence=16, compute="fp32")
    apart = predict_step(step_of(task, pipeline(cluster)))
    alike = cluster.alike[0][0]
    whole = predict_step(step_of(replace(task, cluster=alike), pipeline(cluster)))
    assert apart.step.plan.stages == whole.step.plan.stages
    assert apart.step_s == pytest.approx(whole.step_s, rel=1e-9)


def test_stages_follow_the_speeds_of_three_members() -> None:
    """The longest stage is the least of all splits, and the step shorter than that of even stages."""
    cluster = unequal(1.0, 0.5, 0.25)
    task, plan, estimate = found(cluster, pipeline(cluster), 12, model=DEEP)
    even = replace(plan, stages=(5, 5, 4))
    chosen = deal(task, even, estimate)
    stages, order = chosen.plan.stages, chosen.plan.order or (0, 1, 2)
    fast, middle, slow = (stages[order.index(member)] for member in range(3))
    assert fast > middle > slow
    assert chosen.gain > 1.25
    steps = [
        predict_step(step_of(task, replace(plan, stages=each, order=order))).step_s
        for each in partitions(14, 3)
        if abs(each[0] - stages[0]) + abs(each[1] - stages[1]) <= 2
    ]
    assert chosen.estimate.step_s == pytest.approx(min(steps), rel=0.03)
    assert chosen.estimate.step_s <= predict_step(step_of(task, even)).step_s


@pytest.mark.parametrize("schedule", ["interleaved:2", "zbv"])
def test_chunks_of_a_member_follow_its_speed(schedule: str) -> None:
    """Two chunks a member, in turns or as a V: more blocks the faster it is, a shorter step than with even chunks."""
    cluster = unequal(1.0, 0.5, 0.25)
    task, plan, _ = found(cluster, pipeline(cluster), 12, model=DEEP)
    plan = replace(plan, schedule=schedule, stages=())
    chosen = predict_step(step_of(task, plan))
    stages = chosen.step.plan.stages
    holders = [0, 1, 2, 0, 1, 2] if schedule == "interleaved:2" else [0, 1, 2, 2, 1, 0]
    own = [sum(stages[virtual] for virtual, holder in enumerate(holders) if holder == member) for member in range(3)]
    assert own[0] > own[1] > own[2]
    even = predict_step(step_of(task, replace(plan, stages=(3, 2, 2, 2, 2, 3))))
    assert chosen.step_s < 0.85 * even.step_s


LINKS = (None, None, 2e6, None)  # bytes/s


def linked(*speeds: float) -> Cluster:
    cluster = unequal(*speeds)
    *inner, tier = cluster.tiers
    members = zip(tier.members, LINKS, strict=True)
    slow = tuple(replace(member, bandwidth_bytes_per_s=link) for member, link in members)
    return replace(cluster, tiers=(*inner, replace(tier, members=slow)))


def test_the_chosen_order_is_the_best_of_all_and_slow_boundaries_are_coded_just_enough() -> None:
    """Four members, one with a slow link; every order is predicted, and every choice of two formats in that chosen."""
    cluster = linked(1.0, 0.5, 0.8, 0.6)
    task, plan, estimate = found(cluster, pipeline(cluster), 12, model=DEEP)

    def step_s(**changes: Any) -> float:
        return predict_step(step_of(task, replace(plan, stages=(), **changes))).step_s

    plain = deal(task, plan, estimate)
    assert plain.estimate.step_s == pytest.approx(min(step_s(order=order) for order in permutations(range(4))))
    assert plain.plan.wire == {}
    assert plain.plan.order
    names = ("fp32", "int8", "int4")
    allowed = {"pipeline": names, "pipeline_backward": names}
    coded = deal(task, plan, estimate, allowed)
    assert coded.estimate.step_s < 0.8 * plain.estimate.step_s
    order = coded.plan.order
    slow = [number for number, pair in enumerate(pairwise(order)) if 2 in pair]
    formats = {message: [*map(str.strip, coded.plan.wire[message]["node"].split(","))] for message in allowed}
    least_s = step_s(order=order, wire={each: {"node": "int4"} for each in allowed})
    for message, own in formats.items():
        widths = [names.index(name) for name in own]
        assert max(width for number, width in enumerate(widths) if number not in slow) < max(widths)
        # A wider format of any boundary makes the step longer.
        for number, name in enumerate(own):
            for wider in names[: names.index(name)]:
                tried = {**formats, message: [*own[:number], wider, *own[number + 1 :]]}
                wire = {each: {"node": ", ".join(row)} for each, row in tried.items()}
                assert step_s(order=order, wire=wire) > (1 + TIE) * least_s
    assert coded.estimate.step_s <= (1 + TIE) * least_s


@given(
    costs=st.lists(st.integers(1, 9), min_size=3, max_size=7), paces=st.lists(st.integers(1, 5), min_size=1, max_size=3)
)
def test_unequal_parts_are_as_short_as_can_be(costs: list[int], paces: list[int]) -> None:
    apart = [[cost * pace for cost in costs] for pace in paces]

    def longest(sizes: tuple[int, ...]) -> int:
        stops = [sum(sizes[: part + 1]) for part in range(len(sizes))]
        return max(sum(own[stop - size : stop]) for own, stop, size in zip(apart, stops, sizes, strict=True))

    split = tuple(map(len, share_apart(apart)))
    assert longest(split) == min(map(longest, partitions(len(costs), len(paces))))
    # Memory: at most as many blocks a part as have room, where that can be.
    room = -(-len(costs) // len(paces))
    assert max(map(len, share_apart(apart, [1] * len(costs), room))) <= room
