"""The least loop of islands is the one that trying every loop finds, and nearly as fast as the fastest."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from terrace.base.errors import PlanError, TerraceError
from terrace.cluster.cluster import Cluster
from terrace.plan.outer import Outer
from terrace.planner.evaluate import step_of
from terrace.planner.formats import parse_allowed
from terrace.planner.loops import NEAR, Loop, Row, island_pins, island_task, least_loop, rows_of
from terrace.planner.outer_bounds import OuterBounds, parse_outer
from terrace.planner.pins import Pins, parse_pins
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.task import Islands, Task, plan_of
from terrace.simulate.step import predict_step
from tests.support.nightly import nightly
from tests.support.planner_cases import CLUSTERS, SMALL, slow

CODED = ("outer=int8", "outer=int4+feedback")


def task_on(cluster: Cluster, batch: int = 16) -> Task:
    return Task(model=SMALL, cluster=cluster, batch=batch, sequence=256, compute="fp32")


def chosen(task: Task, text: str, allowed: Sequence[str] = ()) -> tuple[Loop, OuterBounds, list[Row]]:
    tiers = [tier.name for tier in task.cluster.tiers]
    bounds = parse_outer(text, tiers[-1])
    rows = rows_of(parse_allowed(allowed, task, islands=True), tiers)
    island = island_task(task, bounds, rows)
    best = find(Space(task=island), count=1)[0].best[0]
    return least_loop(island, best, plan_of(island, best.candidate), bounds, rows), bounds, rows


def every_loop(loop: Loop, bounds: OuterBounds, rows: Sequence[Row]) -> Iterator[tuple[tuple[int, ...], float]]:
    """All loops of the bounds by the order in which they are preferred, with their mean steps."""
    for every in range(bounds.every[0], bounds.every[1] + 1):
        for delay in range(bounds.delay[0], min(every, bounds.delay[1]) + 1):
            for number, row in enumerate(rows):
                for fragments in range(bounds.fragments[0], bounds.fragments[1] + 1):
                    outer = bounds.loop(every, delay, fragments)
                    plan = replace(loop.plan, outer=outer, wire={"outer": dict(row)} if row else {})
                    try:
                        found = predict_step(step_of(loop.task, plan))
                    except PlanError:
                        continue
                    yield (every, delay, number, fragments), found.step_s


@pytest.mark.parametrize(
    ("cluster", "rate", "text", "allowed"),
    [
        ("dgx 4x2", 2e8, "every<=6,fragments<=3", ()),
        ("dgx 4x2", 1e8, "every<=4", CODED),
        *nightly(
            ("dgx 4x2", 1e8, "every<=9", CODED),
            ("lab 2x2x2", 1e6, "every<=4", CODED[1:]),
            ("dgx 4x2", 3e8, "every<=8,delay<=2", CODED),
            ("dgx 4x2", 1e7, "every<=7,delay<=3,fragments<=2", CODED),
            ("dgx 2x3", 5e7, "every<=8,keep=0.5", CODED),
            ("frontier 2x2x2", 1e8, "every<=10,optimizer=average", CODED),
            ("lab 2x2x2", 1e6, "every<=6", CODED),
            ("ethernet 2x2", 1e8, "every>=4,every<=8", CODED),
        ),
    ],
)
def test_the_least_loop_is_what_trying_all_finds(cluster: str, rate: float, text: str, allowed: Sequence[str]) -> None:
    task = task_on(slow(rate, cluster), 18 if cluster == "dgx 2x3" else 16)
    loop, bounds, rows = chosen(task, text, allowed)
    tried = dict(every_loop(loop, bounds, rows))
    fastest_s = min(tried.values())
    least = min(order for order, step_s in tried.items() if step_s <= (1 + NEAR) * fastest_s)
    outer, row = loop.cycle.outer, tuple(loop.plan.wire.get("outer", {}).items())
    assert (outer.every, outer.delay, rows.index(row), outer.fragments) == least
    assert loop.prediction.step_s == tried[least] <= (1 + NEAR) * fastest_s
    assert loop.fastest_s == pytest.approx(fastest_s, rel=1e-3)
    assert loop.num_played < len(tried)


def test_a_link_is_hidden_by_the_fewest_steps_and_the_widest_format() -> None:
    """More bytes need more steps; with a bound on the steps a narrower format takes the place of more of them."""
    task = task_on(slow(2e7))
    wide, _, _ = chosen(task, "every<=1000")
    narrow, _, _ = chosen(task, "every<=1000", CODED)
    for each in (wide, narrow):
        assert each.prediction.step_s <= (1 + NEAR) * each.fastest_s <= (1 + 1.1 * NEAR) * each.cycle.plain_s
    assert narrow.cycle.outer.every < 0.6 * wide.cycle.outer.every
    assert narrow.plan.wire == {"outer": {"system": "int4+feedback"}}
    room, _, _ = chosen(task, f"every={wide.cycle.outer.every},delay={wide.cycle.outer.delay}", CODED)
    assert "outer" not in room.plan.wire
    assert room.cycle.outer == wide.cycle.outer
    assert wide.num_played < 60


def test_the_step_is_that_of_all_islands_and_fits() -> None:
    loop, _, _ = chosen(task_on(slow(1e8)), "every<=50")
    assert loop.estimate.step_s == sum(loop.estimate.time_s.values()) == pytest.approx(loop.prediction.step_s)
    assert loop.estimate.memory_bytes["outer"] == loop.prediction.reports[0].memory_bytes["outer"] > 0
    assert {message for message, tier in loop.estimate.sent_bytes if tier == "system"} <= {"outer"}
    assert loop.task.cluster.world_size == 8
    assert loop.task.batch == 16


def test_memory_for_the_outer_state_is_kept_free() -> None:
    """With the memory of the plan that is fastest otherwise, the search takes another that leaves room."""
    task = task_on(slow(1e8))
    bounds = parse_outer("every<=50", "system")
    island = island_task(task, bounds, [()])
    alone, _ = find(Space(task=replace(island, islands=Islands())), count=1)
    device = replace(task.cluster.device, memory_bytes=float(alone.best[0].needed_bytes), headroom="0%")
    loop, _, _ = chosen(replace(task, cluster=replace(task.cluster, device=device)), "every<=50")
    assert loop.estimate.needed_bytes <= device.memory_bytes


@pytest.mark.parametrize(
    ("text", "every", "delay", "fragments"),
    [
        ("every<=100", (1, 100), (0, 100), (1, 1)),
        ("every<=100, delay<=20", (1, 100), (0, 20), (1, 1)),
        ("every=30,delay>=2,fragments<=3", (30, 30), (2, 30), (1, 3)),
        ("diloco", (1, 100), (0, 0), (1, 1)),
        ("streaming-diloco,every<=50", (1, 50), (0, 5), (1, 5)),
        ("co2,every<=50,delay<=50", (1, 50), (1, 50), (1, 1)),
        ("diloco,every>=50", (50, 100), (0, 0), (1, 1)),
        ("diloco,every>=50,every<=200", (50, 200), (0, 0), (1, 1)),
        ("diloco,every<=200", (1, 200), (0, 0), (1, 1)),
        ("streaming-diloco,delay>=2", (1, 100), (2, 5), (1, 5)),
        ("every<=9,fragments>=2", (1, 9), (0, 9), (2, 9)),
        ("every<=9,penalty=true", (1, 9), (1, 9), (1, 1)),
    ],
)
def test_bounds(text: str, every: object, delay: object, fragments: object) -> None:
    found = parse_outer(text, "system")
    assert (found.every, found.delay, found.fragments) == (every, delay, fragments)


def test_a_preset_gives_the_outer_step() -> None:
    found = parse_outer("co2,momentum=0.5", "system").outer
    assert (found.optimizer, found.beta, found.keep, found.penalty, found.clip) == ("momentum", 0.5, 0.0, True, 1.0)
    assert parse_outer("every<=9,optimizer=average,lr=0.5", "system").loop(3, 1, 1) == Outer(
        tier="system", every=3, delay=1, optimizer="average", lr=0.5
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "name a preset (local-sgd, diloco, streaming-diloco, co2) or bounds"),
        ("dilocco", "did you mean 'diloco'"),
        ("every", "is no preset and no bound such as every<=100"),
        ("delay<=5", "does not bound every: add every<=100"),
        ("evry<=5", "did you mean 'every'"),
        ("every<=x", "'x' is not a whole number"),
        ("every<=0", "every is from 1"),
        ("every<=5,every>=6", "nothing satisfies every>=6"),
        ("diloco,every>=150", "every is from 1 to 100; to allow it, write every<=150"),
        ("every<=50,diloco", "the preset stands first, and there is one: write diloco,every<=50"),
        ("diloco,co2,every<=50", "there is one: write diloco,every<=50"),
        ("every<=5,delay>=6", "delay is at most every, so at most 5, not 6"),
        ("every<=5,lr<=1", "lr is not searched; write lr=1"),
        ("every<=5,lr=-1", "outer.lr = -1"),
        ("every<=5,momentum=high", "--outer.momentum"),
        ("every<=5,delay=0,keep=0", "outer.keep has no effect without a delay"),
        ("every<=5,optimizer=adam", "--outer.optimizer = 'adam'"),
        ("every<=5,tier=node", "names 'tier'"),
    ],
)
def test_bounds_that_are_no_bounds(text: str, said: str) -> None:
    with pytest.raises(TerraceError) as error:
        parse_outer(text, "system")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_islands_need_members_and_a_batch_that_divides() -> None:
    bounds = parse_outer("every<=9", "system")
    one = task_on(CLUSTERS["dgx 4x2"].resized(1))
    with pytest.raises(PlanError, match="has one member, so there is one island"):
        island_task(one, bounds, [()])
    with pytest.raises(PlanError, match="--batch 16 does not divide over the 3 islands of tier 'system': use 15 or 18"):
        island_task(task_on(CLUSTERS["dgx 2x3"]), bounds, [()])


def test_states_are_pinned_inside_an_island() -> None:
    task = task_on(CLUSTERS["dgx 4x2"])
    pins = parse_pins(["optimizer>=node", "tensor=2"], task.cluster, [])
    assert island_pins(task, pins) == Pins({"optimizer": (0, 0), "tensor": (2, 2)})
    with pytest.raises(PlanError, match="--pin params=system: with --outer every island keeps all states"):
        island_pins(task, parse_pins(["params=system"], task.cluster, []))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("every>=5,every<=7,fragments=4", "every (5 to 7) is no multiple of fragments (4): use every=4 or every=8"),
        (
            "every<=10,delay>=8,fragments=6",
            "every (8 to 10, since delay is at least 8) is no multiple of fragments (6): use every=12",
        ),
        ("every=1009,fragments>=2", "every (1009) is no multiple of fragments (2 to 6): use every=1008 or every=1010"),
    ],
)
def test_fragments_that_divide_no_cycle_are_one_line(text: str, said: str) -> None:
    with pytest.raises(PlanError) as error:
        chosen(task_on(slow(1e8)), text)
    assert str(error.value) == f"--outer: {said}"


def test_more_fragments_than_blocks_are_refused() -> None:
    with pytest.raises(PlanError, match=r"outer.fragments = 9: the 6 blocks that train take turns"):
        chosen(task_on(slow(1e8)), "every<=18,fragments=9")
