"""Pipeline schedules: every task once, no circle, activations and gathers as published, names, CSV."""

from collections import Counter
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.plan.stage import Pass
from terrace.program.schedules.csv_form import from_csv, to_csv
from terrace.program.schedules.orders import Orders, verify_orders
from terrace.program.schedules.registry import orders_for
from terrace.program.schedules.seconds import TaskSeconds
from terrace.simulate.timeline import play
from tests.support.schedules import SHARES, any_orders, even_seconds, numbers_of, peak_activation_bytes

quick = settings(deadline=None, max_examples=60)


def num_gathers(orders: Orders, *, weight_reads: bool = True) -> list[list[int]]:
    """How often each stage gathers each chunk when it drops parameters as soon as another chunk runs.

    `weight_reads`: a BACKWARD_WEIGHT reads parameters; if not, it neither gathers nor drops.
    """
    counts = []
    for tasks in orders.tasks:
        gathered = [0] * orders.num_chunks
        reads = (chunk for pass_, chunk, _ in tasks if weight_reads or pass_ is not Pass.BACKWARD_WEIGHT)
        for chunk, _ in groupby(reads):
            gathered[chunk] += 1
        counts.append(gathered)
    return counts


def order(orders: Orders, stage: int) -> str:
    return to_csv(orders).splitlines()[stage].replace(",", " ")


def peaks(orders: Orders, share: float = 1.0) -> list[float]:
    """Chunk activations kept, when a share of them waits for W."""
    return peak_activation_bytes(orders, [1.0] * orders.num_virtual, [share] * orders.num_virtual)


def idle_slots(orders: Orders) -> list[float]:
    """Idle slots within the span of every stage, with T_F = T_B = T_W = 1 and free messages."""
    timeline = play(orders, even_seconds(orders.num_virtual, forward_s=1.0, input_s=1.0, weight_s=1.0))
    return [span - busy for span, busy in zip(timeline.spans_s, timeline.busy_s, strict=True)]


@quick
@given(any_orders())
def test_every_task_runs_once_and_no_stage_waits_in_a_circle(orders: Orders) -> None:
    verify_orders(orders)
    for tasks in orders.tasks:
        count = Counter((task.pass_, task.chunk, task.micro) for task in tasks)
        assert set(count.values()) == {1}
        whole = any(task.pass_ is Pass.BACKWARD for task in tasks)
        assert len(tasks) == (2 if whole else 3) * orders.num_chunks * orders.num_micros
    timeline = play(orders, even_seconds(orders.num_virtual, forward_s=1.0, input_s=1.0, weight_s=1.0, edge_s=0.25))
    assert [len(starts) for starts in timeline.starts_s] == [len(tasks) for tasks in orders.tasks]


@quick
@given(any_orders())
def test_micro_batches_pass_a_chunk_first_in_first_out(orders: Orders) -> None:
    for tasks in orders.tasks:
        passed = Counter[tuple[Pass, int]]()
        for pass_, chunk, micro in tasks:
            assert micro == passed[pass_, chunk]
            passed[pass_, chunk] += 1


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
    as_whole = {Pass.BACKWARD_INPUT: Pass.BACKWARD}
    passes = [
        tuple(task._replace(pass_=as_whole.get(task.pass_, task.pass_)) for task in tasks if task.pass_.letter != "W")
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


def test_gathers_of_units_by_example() -> None:
    orders = orders_for("zeropp", num_stages=4, num_chunks=2, num_micros=16, unit=8)
    assert num_gathers(orders, weight_reads=False) == [[3, 2]] * 4
    assert num_gathers(orders) == [[4, 3], [4, 3], [4, 3], [3, 2]]  # the last stage puts no W off


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
    assert max(peaks(orders, numbers["weight_share"])) <= numbers["memory_limit"] * (1 + 1e-8)


def test_skipping_a_forward_can_pay() -> None:
    """Without that switch the best span of these unequal stages is 40."""
    seconds = TaskSeconds(
        forward_s=(4.0, 4.0, 2.0),
        backward_s=(5.0, 5.0, 4.0),
        input_s=(2.0, 3.0, 3.0),
        weight_s=(3.0, 2.0, 1.0),
        edge_s=(0.0, 0.0),
    )
    orders = orders_for("zb-2p", num_stages=3, num_micros=4, seconds=seconds, weight_share=0.5)
    assert max(play(orders, seconds).spans_s) == 39


@quick
@given(st.integers(1, 7), st.integers(0, 13), st.sampled_from((0.5, 1.0, 2.0)), st.sampled_from((0.0, 0.125)))
def test_the_automatic_schedule_is_no_worse_than_those_by_hand(
    stages: int, more: int, weight_s: float, edge_s: float
) -> None:
    seconds = even_seconds(stages, forward_s=2.0, input_s=2.0, weight_s=weight_s, edge_s=edge_s)
    for automatic, by_hand in (("zb-1p", "zb-h1"), ("zb-2p", "zb-h2")):
        numbers = {"num_stages": stages, "num_micros": stages + more}
        found = play(orders_for(automatic, **numbers, seconds=seconds, weight_share=0.4), seconds)
        assert max(found.spans_s) <= max(play(orders_for(by_hand, **numbers), seconds).spans_s)
