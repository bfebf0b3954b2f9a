"""Pipeline schedules: every task once, no circle, activations and gathers as published, names, CSV."""

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import PlanError, ProgramError
from terrace.program import schedules
from terrace.program.schedules import (
    Kind,
    Orders,
    Task,
    from_csv,
    num_gathers,
    orders_for,
    peak_activation_bytes,
    registry,
    schedule_names,
    to_csv,
    verify_orders,
)
from terrace.program.schedules.automatic import StageTimes
from terrace.simulate.timeline import even_seconds, play

NAMES = (
    "1f1b",
    "breadth-first",
    "gpipe",
    "interleaved",
    "zb-1p",
    "zb-2p",
    "zb-auto",
    "zb-h1",
    "zb-h2",
    "zbv",
    "zeropp",
)
CHUNKED = ("breadth-first", "interleaved", "zeropp")
quick = settings(deadline=None, max_examples=60)
SHARES = st.sampled_from((0.0, 0.25, 0.4, 1.0))  # M_W / M_B


@st.composite
def numbers_of(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """Numbers that the schedule accepts, odd ones and 1 among them."""
    stages = draw(st.integers(1, 7))
    numbers: dict[str, Any] = {"num_stages": stages, "num_micros": draw(st.integers(1, 20))}
    if name in CHUNKED:
        numbers["num_chunks"] = draw(st.integers(1, 4))
    if name == "interleaved":
        numbers["num_micros"] = stages * draw(st.integers(1, 4))
    if name == "zeropp":
        numbers["unit"] = draw(st.integers(1, 9))
    if name.startswith("zb-") and name not in ("zb-h1", "zb-h2"):
        numbers["times"] = draw(stage_times(stages))
    if name == "zb-auto":
        numbers["memory_limit"] = draw(st.sampled_from((1, 1.5, 2, stages, stages + 0.3, 2 * stages, 100)))
    return numbers


@st.composite
def stage_times(draw: st.DrawFn, stages: int) -> StageTimes:
    """Times of unequal stages, in halves of a second, some of them 0."""
    rows = [draw(st.lists(st.integers(0, 8), min_size=stages, max_size=stages)) for _ in range(4)]
    forward, backward, weight, edge = (tuple(value / 2 for value in row) for row in rows)
    return StageTimes(
        forward_s=forward, input_s=backward, weight_s=weight, edge_s=edge[: stages - 1], weight_share=draw(SHARES)
    )


@st.composite
def any_orders(draw: st.DrawFn) -> Orders:
    """Orders of any schedule."""
    name = draw(st.sampled_from(NAMES))
    return orders_for(name, **draw(numbers_of(name)))


def order(orders: Orders, stage: int) -> str:
    return to_csv(orders).splitlines()[stage].replace(",", " ")


def peaks(orders: Orders, share: float = 1.0) -> list[float]:
    """Chunk activations kept, when a share of them waits for W."""
    return peak_activation_bytes(orders, [1.0] * orders.num_virtual, [share] * orders.num_virtual)


def idle_slots(orders: Orders) -> list[float]:
    """Idle slots within the span of every stage, with T_F = T_B = T_W = 1 and free messages."""
    timeline = play(orders, even_seconds(orders.num_virtual, forward_s=1.0, input_s=1.0, weight_s=1.0))
    return [span - busy for span, busy in zip(timeline.spans_s, timeline.busy_s, strict=True)]


def test_the_names_are_those_of_the_folder() -> None:
    assert schedule_names() == sorted(NAMES)


@quick
@given(any_orders())
def test_every_task_runs_once_and_no_stage_waits_in_a_circle(orders: Orders) -> None:
    verify_orders(orders)
    for tasks in orders.tasks:
        count = Counter((task.kind, task.chunk, task.micro) for task in tasks)
        assert set(count.values()) == {1}
        whole = any(task.kind is Kind.BACKWARD for task in tasks)
        assert len(tasks) == (2 if whole else 3) * orders.num_chunks * orders.num_micros
    timeline = play(orders, even_seconds(orders.num_virtual, forward_s=1.0, input_s=1.0, weight_s=1.0, edge_s=0.25))
    assert [len(starts) for starts in timeline.starts_s] == [len(tasks) for tasks in orders.tasks]


@quick
@given(any_orders())
def test_micro_batches_pass_a_chunk_first_in_first_out(orders: Orders) -> None:
    for tasks in orders.tasks:
        passed = Counter[tuple[Kind, int]]()
        for kind, chunk, micro in tasks:
            assert micro == passed[kind, chunk]
            passed[kind, chunk] += 1


@quick
@given(any_orders())
def test_csv_keeps_everything(orders: Orders) -> None:
    assert from_csv(to_csv(orders), orders.schedule) == orders


def test_1f1b_by_example() -> None:
    orders = orders_for("1f1b", num_stages=3, num_micros=4)
    assert [order(orders, stage) for stage in range(3)] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


@quick
@given(numbers_of("1f1b"))
def test_1f1b_and_gpipe_activations_and_makespan(numbers: dict[str, Any]) -> None:
    stages, micros = numbers["num_stages"], numbers["num_micros"]
    one, all_first = orders_for("1f1b", **numbers), orders_for("gpipe", **numbers)
    assert peaks(one) == [min(micros, stages - stage) for stage in range(stages)]
    assert peaks(all_first) == [micros] * stages
    for orders in (one, all_first):
        timeline = play(orders, even_seconds(stages, forward_s=1.0, input_s=1.0, weight_s=1.5))
        assert timeline.makespan_s == (micros + stages - 1) * 3.5


@quick
@given(numbers_of("interleaved"))
def test_interleaved_activations_and_makespan(numbers: dict[str, Any]) -> None:
    stages, chunks, micros = numbers["num_stages"], numbers["num_chunks"], numbers["num_micros"]
    orders = orders_for("interleaved", **numbers)
    if chunks == 1:
        assert orders.tasks == orders_for("1f1b", num_stages=stages, num_micros=micros).tasks
    else:
        warmups = [2 * (stages - 1 - stage) + (chunks - 1) * stages for stage in range(stages)]
        assert peaks(orders) == [min(warmup + 1, chunks * micros) for warmup in warmups]
    timeline = play(orders, even_seconds(stages * chunks, forward_s=1.0, input_s=1.0, weight_s=1.5))
    assert timeline.makespan_s == (chunks * micros + stages - 1) * 3.5


@quick
@given(numbers_of("breadth-first"))
def test_breadth_first_activations_gathers_and_makespan(numbers: dict[str, Any]) -> None:
    stages, chunks, micros = numbers["num_stages"], numbers["num_chunks"], numbers["num_micros"]
    orders = orders_for("breadth-first", **numbers)
    assert peaks(orders) == [micros * chunks] * stages
    assert num_gathers(orders) == [[2] * (chunks - 1) + [1]] * stages
    if micros >= stages:
        timeline = play(orders, even_seconds(stages * chunks, forward_s=1.0, input_s=1.0, weight_s=1.5))
        assert timeline.makespan_s == (chunks * micros + stages - 1) * 3.5
    if chunks == 1:
        assert orders.tasks == orders_for("gpipe", num_stages=stages, num_micros=micros).tasks


@quick
@given(numbers_of("zb-h1"), SHARES)
def test_zb_h1_keeps_the_order_and_the_memory_of_1f1b(numbers: dict[str, Any], share: float) -> None:
    stages, micros = numbers["num_stages"], numbers["num_micros"]
    orders = orders_for("zb-h1", **numbers)
    as_whole = {Kind.BACKWARD_INPUT: Kind.BACKWARD}
    passes = [
        tuple(task._replace(kind=as_whole.get(task.kind, task.kind)) for task in tasks if task.kind.letter != "W")
        for tasks in orders.tasks
    ]
    assert tuple(passes) == orders_for("1f1b", **numbers).tasks
    for stage, peak in enumerate(peaks(orders, share)):
        bound = stages - stage + stage * share
        assert peak <= bound + 1e-9
        if micros >= 2 * stages:
            assert peak == pytest.approx(bound)


@quick
@given(st.integers(1, 7), st.integers(0, 8), st.integers(1, 4), st.integers(0, 3), st.integers(0, 3))
def test_zb_h1_bubble(stages: int, more: int, weight: int, forward: int, backward: int) -> None:
    forward_s, input_s = float(weight + forward), float(weight + backward)
    orders = orders_for("zb-h1", num_stages=stages, num_micros=2 * stages + more)
    timeline = play(orders, even_seconds(stages, forward_s=forward_s, input_s=input_s, weight_s=float(weight)))
    work_s = (2 * stages + more) * (forward_s + input_s + weight)
    assert max(timeline.spans_s) == work_s + (stages - 1) * (forward_s + input_s - weight)


@quick
@given(numbers_of("zb-h2"), SHARES)
def test_zb_h2_fills_the_bubble_at_twice_the_memory(numbers: dict[str, Any], share: float) -> None:
    stages, micros = numbers["num_stages"], numbers["num_micros"]
    orders = orders_for("zb-h2", **numbers)
    for stage, peak in enumerate(peaks(orders, share)):
        assert peak <= 2 * (stages - stage) - 1 + 2 * stage * share + 1e-9
    if micros >= 2 * stages - 1:
        assert idle_slots(orders) == [0.0] * stages


@quick
@given(numbers_of("zbv"))
def test_zbv_fills_the_bubble_at_the_memory_of_1f1b(numbers: dict[str, Any]) -> None:
    stages, micros = numbers["num_stages"], numbers["num_micros"]
    orders = orders_for("zbv", **numbers)
    assert orders.placement == tuple((stage, 2 * stages - 1 - stage) for stage in range(stages))
    assert max(peaks(orders)) <= 2 * stages
    if micros >= 2 * stages - 1:
        assert idle_slots(orders) == [0.0] * stages


@quick
@given(numbers_of("zeropp"), SHARES)
def test_zeropp_activations_gathers_and_bubble(numbers: dict[str, Any], share: float) -> None:
    stages, chunks, micros, unit = (numbers[name] for name in ("num_stages", "num_chunks", "num_micros", "unit"))
    orders = orders_for("zeropp", **numbers)
    for stage, peak in enumerate(peaks(orders, share)):
        assert peak <= unit * chunks + min(unit * chunks, 2 * (stages - 1 - stage)) * share + 1e-9
    units = -(-micros // unit)
    for gathered in num_gathers(orders, weight_reads=False):
        assert sum(gathered) == 1 + 2 * (chunks - 1) * units  # two a unit, the chunk at either end once for both passes
        assert max(gathered) <= 2 * units
    if unit >= 2 * (stages - 1):
        for first, *others in num_gathers(orders):
            assert first <= 3 * units  # W of chunk 0 that are put off stand apart
            assert max(others, default=0) <= 2 * units
    if unit >= stages and unit * chunks >= 2 * (stages - 1) and micros % unit == 0:
        assert idle_slots(orders) == [2 * (stages - 1 - stage) for stage in range(stages)]


@quick
@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 3))
def test_units_gather_less_often_than_depth_first(stages: int, chunks: int, groups: int) -> None:
    numbers = {"num_stages": stages, "num_chunks": chunks, "num_micros": 2 * stages * groups}
    in_units = num_gathers(orders_for("zeropp", unit=2 * stages, **numbers))
    depth_first = num_gathers(orders_for("interleaved", **numbers))
    assert all(sum(few) < sum(many) for few, many in zip(in_units, depth_first, strict=True))


@quick
@given(numbers_of("zb-auto"))
def test_the_automatic_schedule_keeps_its_memory_limit(numbers: dict[str, Any]) -> None:
    orders = orders_for("zb-auto", **numbers)
    assert max(peaks(orders, numbers["times"].weight_share)) <= numbers["memory_limit"] * (1 + 1e-8)


@quick
@given(numbers_of("zb-1p"))
def test_the_automatic_schedule_is_no_worse_than_zb_h1_at_its_memory(numbers: dict[str, Any]) -> None:
    stages, micros = numbers["num_stages"], max(numbers["num_micros"], numbers["num_stages"])
    times = StageTimes(
        forward_s=(2.0,) * stages,
        input_s=(2.0,) * stages,
        weight_s=(1.0,) * stages,
        edge_s=(0.0,) * (stages - 1),
        weight_share=0.4,
    )
    seconds = even_seconds(stages, forward_s=2.0, input_s=2.0, weight_s=1.0)
    automatic = play(orders_for("zb-1p", num_stages=stages, num_micros=micros, times=times), seconds)
    by_hand = play(orders_for("zb-h1", num_stages=stages, num_micros=micros), seconds)
    assert max(automatic.spans_s) <= max(by_hand.spans_s)


@pytest.mark.parametrize(
    ("name", "numbers", "words"),
    [
        ("interleaved", {"num_stages": 4, "num_chunks": 2, "num_micros": 10}, "write num_micros = 12"),
        ("interleaved", {"num_stages": 4, "num_chunks": 2, "num_micros": 9}, "write num_micros = 8"),
        ("interleaved", {"num_stages": 4, "num_chunks": 2, "num_micros": 1}, "write num_micros = 4"),
        ("zbv", {"num_stages": 4, "num_chunks": 3, "num_micros": 8}, "write num_chunks = 2"),
        ("1f1b", {"num_stages": 4, "num_chunks": 2, "num_micros": 8}, "leave num_chunks out"),
        ("1f1b", {"num_stages": 4, "num_micros": 0}, "write num_micros = 1 or more"),
        ("zeropp", {"num_stages": 4, "num_chunks": 2, "num_micros": 8}, "needs unit"),
        ("zeropp", {"num_stages": 4, "num_chunks": 2, "num_micros": 8, "unit": 0}, "write unit = 1 or more"),
        ("zb-h3", {"num_stages": 4, "num_micros": 8}, "did you mean 'zb-h"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_fix(name: str, numbers: dict[str, int], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        orders_for(name, **numbers)


@pytest.mark.parametrize(
    ("change", "limit", "words"),
    [
        ({}, 0.5, "write 1 or more"),
        ({"edge_s": (1.0, 1.0)}, 2, "times.edge_s"),
        ({"forward_s": (1.0, -1.0)}, 2, "none below 0"),
        ({"weight_share": 1.5}, 2, "write 0 to 1"),
    ],
)
def test_the_automatic_schedule_refuses_what_it_cannot_use(change: dict[str, Any], limit: float, words: str) -> None:
    values = {
        "forward_s": (1.0, 1.0),
        "input_s": (1.0, 1.0),
        "weight_s": (1.0, 1.0),
        "edge_s": (0.0,),
        "weight_share": 0.4,
    }
    with pytest.raises(PlanError, match=words):
        orders_for("zb-auto", num_stages=2, num_micros=4, times=StageTimes(**{**values, **change}), memory_limit=limit)


def test_one_chunk_needs_no_mention() -> None:
    assert orders_for("1f1b", num_stages=2, num_chunks=1, num_micros=3) == orders_for(
        "1f1b", num_stages=2, num_micros=3
    )


def test_adding_a_schedule_is_adding_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "added.py").write_text(
        "from terrace.program.schedules.one_f_one_b import one_f_one_b\n"
        "from terrace.program.schedules.orders import Orders\n"
        "from terrace.program.schedules.registry import schedule\n\n\n"
        '@schedule("added")\n'
        "def added(num_stages: int, num_micros: int) -> Orders:\n"
        "    return one_f_one_b(num_stages, num_micros)\n"
    )
    monkeypatch.setattr(schedules, "__path__", [*schedules.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "_found", dict(registry._found))
    registry._schedules.cache_clear()
    importlib.invalidate_caches()
    try:
        assert "added" in schedule_names()
        assert (
            orders_for("added", num_stages=2, num_micros=3).tasks
            == orders_for("1f1b", num_stages=2, num_micros=3).tasks
        )
    finally:
        registry._schedules.cache_clear()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0B0\n1F0,1X0\n", "row 1: cell '1X0'"),
        ("0F0,0B0\n1F0,1SEND_B0,1B0\n", "messages, gathers and reductions"),
        ("0F0,0B0\n2F0,2B0\n", "every virtual stage"),
        ("0F0,0B0\n1B0,1F0\n", "stage 1: BACKWARD of micro-batch 0, chunk 0 stands before its FORWARD"),
        ("0F0,0B0\n1F0,1W0,1I0\n", "stands before its BACKWARD_INPUT"),
        ("0F0,0B0,0I0\n1F0,1B0\n", "stands there twice"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B1\n", "stage 1: micro-batch 0 of chunk 0 has no complete backward"),
        ("0F0,0I0\n1F0,1B0\n", "no complete backward"),
        ("", "without tasks"),
    ],
)
def test_csv_that_breaks_a_rule_is_refused(text: str, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        from_csv(text)


def test_a_task_outside_the_numbers_is_refused() -> None:
    orders = from_csv("0F0,0B0\n1F0,1B0\n")
    for wrong in (Task(Kind.FORWARD, 1, 0), Task(Kind.FORWARD, 0, 7)):
        broken = Orders(**{**vars(orders), "tasks": ((wrong, *orders.tasks[0]), orders.tasks[1])})
        with pytest.raises(ProgramError, match="there are 1 chunks and 1 micro-batches"):
            verify_orders(broken)
