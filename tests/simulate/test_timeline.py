"""The timeline: published bubbles, the rules of play, circles, the critical path, the picture, its speed."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import PlanError, ProgramError
from terrace.plan.stage import Pass
from terrace.program.schedules.csv_form import from_csv
from terrace.program.schedules.orders import Orders, StageTask
from terrace.program.schedules.registry import orders_for
from terrace.simulate.timeline import Timeline, play
from tests.support.bubbles import Row, rows, weight_share
from tests.support.effort import lines_run
from tests.support.schedules import any_orders, even_seconds, peak_activation_bytes, seconds_of

quick = settings(deadline=None, max_examples=60)


@rows
def test_published_bubbles_to_four_decimals(row: Row) -> None:
    model, micros, _, forward_s, input_s, weight_s, edge_s, *published = row
    seconds = even_seconds(8, forward_s=forward_s, input_s=input_s, weight_s=weight_s, edge_s=edge_s)
    played = {
        name: play(orders_for(name, num_stages=8, num_micros=micros, **given), seconds).bubble
        for name, given in (
            ("1f1b", {}),
            ("zb-h1", {}),
            ("zb-h2", {}),
            ("zb-1p", {"seconds": seconds, "weight_share": weight_share(model)}),
            ("zb-2p", {"seconds": seconds, "weight_share": weight_share(model)}),
        )
    }
    wanted = dict(zip(played, (published[0], *published[2:]), strict=True))
    assert {name: round(bubble, 4) for name, bubble in played.items()} == wanted


@rows
def test_interleaved_beside_the_published_closed_form(row: Row) -> None:
    """The published cost has num_stages messages fewer than a played round trip; without them it is the table's."""
    _, micros, chunks, forward_s, input_s, weight_s, edge_s, _, published, *_ = row
    orders = orders_for("interleaved", num_stages=8, num_chunks=chunks, num_micros=micros)
    parts = {"forward_s": forward_s / chunks, "input_s": input_s / chunks, "weight_s": weight_s / chunks}
    span_s = max(play(orders, even_seconds(8 * chunks, **parts, edge_s=edge_s)).spans_s)
    step_s = forward_s + input_s + weight_s
    assert span_s == pytest.approx(micros * step_s + 7 * step_s / chunks + (2 * 8 * chunks - 2) * edge_s)
    assert round(1 - micros * step_s / (span_s - 8 * edge_s), 4) == published


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Orders of any schedule played with unequal seconds."""
    orders = draw(any_orders())
    return play(orders, draw(seconds_of(orders.num_virtual)))


def arrivals_s(timeline: Timeline) -> dict[tuple[str, int, int], float]:
    """When the result of a task, by letter, virtual stage and micro-batch, is where it is read, by the rules."""
    orders, seconds, found = timeline.orders, timeline.seconds, {}
    for local, tasks, ends_s in zip(orders.placement, orders.tasks, timeline.ends_s, strict=True):
        sent_s = 0.0  # messages leave in order, one after the other
        for (pass_, chunk, micro), end_s in zip(tasks, ends_s, strict=True):
            k = local[chunk]
            reader = k + 1 if pass_ is Pass.FORWARD else k - 1
            edge_s = 0.0
            if pass_ is not Pass.BACKWARD_WEIGHT and 0 <= reader < orders.num_virtual and reader not in local:
                edge_s = seconds.edge_s[min(k, reader)]
            if edge_s:
                sent_s = max(sent_s, end_s) + edge_s
            found["B" if pass_.letter == "I" else pass_.letter, k, micro] = sent_s if edge_s else end_s
    return found


def ready_s(timeline: Timeline, arrived: dict[tuple[str, int, int], float], stage: int, task: StageTask) -> float:
    """When the input of a task is there."""
    orders = timeline.orders
    k, last = orders.placement[stage][task.chunk], orders.num_virtual - 1
    if task.pass_ is Pass.FORWARD:
        return arrived["F", k - 1, task.micro] if k else 0.0
    if task.pass_ is Pass.BACKWARD_WEIGHT:
        return next(
            end_s
            for made, end_s in zip(orders.tasks[stage], timeline.ends_s[stage], strict=True)
            if made == (Pass.BACKWARD_INPUT, *task[1:])
        )
    return arrived["F", k, task.micro] if k == last else arrived["B", k + 1, task.micro]


@quick
@given(timelines())
def test_every_task_starts_as_soon_as_it_can_and_no_sooner(timeline: Timeline) -> None:
    orders, arrived = timeline.orders, arrivals_s(timeline)
    for stage, tasks in enumerate(orders.tasks):
        free_s = 0.0
        for task, start_s, end_s in zip(tasks, timeline.starts_s[stage], timeline.ends_s[stage], strict=True):
            assert start_s == max(free_s, ready_s(timeline, arrived, stage, task))
            assert end_s - start_s == timeline.seconds.of(task.pass_)[orders.placement[stage][task.chunk]]
            free_s = end_s


@quick
@given(timelines())
def test_the_critical_path_fills_the_makespan(timeline: Timeline) -> None:
    path = timeline.critical_path()
    assert path[0].start_s == 0.0
    assert path[-1].end_s == timeline.makespan_s
    for before, after in pairwise(path):
        assert after.start_s == before.end_s + after.edge_s
        assert after.edge_s == 0.0 or after.stage != before.stage
        assert (after.messages > 0) == (after.stage != before.stage)
    for step in path:
        position = timeline.orders.tasks[step.stage].index(step.task)
        assert timeline.starts_s[step.stage][position] == step.start_s


@quick
@given(timelines())
def test_makespan_span_and_bubble_bound_one_another(timeline: Timeline) -> None:
    assert timeline.makespan_s >= max(timeline.spans_s) >= max(timeline.busy_s)
    assert 0.0 <= timeline.bubble <= 1.0
    assert (timeline.bubble == 0.0) == all(busy == max(timeline.spans_s) for busy in timeline.busy_s)


def test_unequal_stages_idle_by_what_they_lack() -> None:
    orders = orders_for("1f1b", num_stages=2, num_micros=3)
    seconds = replace(
        even_seconds(2, forward_s=1.0, input_s=1.0, weight_s=1.0), forward_s=(1.0, 2.0), backward_s=(2.0, 4.0)
    )
    timeline = play(orders, seconds)
    assert list(timeline.starts_s) == [[0, 1, 7, 9, 13, 19], [1, 3, 7, 9, 13, 15]]
    assert timeline.makespan_s == 21
    assert timeline.spans_s == [21, 18]
    assert timeline.busy_s == [9, 18]
    assert timeline.bubble == 1 - 27 / 42
    assert peak_activation_bytes(timeline.orders, [10.0, 7.0]) == [20, 7]


def test_messages_between_virtual_stages_of_one_stage_are_free() -> None:
    orders = orders_for("zbv", num_stages=1, num_micros=2)
    assert play(orders, even_seconds(2, forward_s=1.0, input_s=1.0, weight_s=1.0, edge_s=100.0)).makespan_s == 12


def test_the_messages_of_a_stage_leave_one_after_the_other() -> None:
    """Over a slow link they set the pace: three of 10 s to the second stage, then 10 s back each."""
    orders = orders_for("gpipe", num_stages=2, num_micros=3)
    timeline = play(orders, even_seconds(2, forward_s=1.0, input_s=1.0, weight_s=1.0, edge_s=10.0))
    assert list(timeline.starts_s) == [[0, 1, 2, 44, 54, 64], [11, 21, 31, 32, 34, 36]]
    path = timeline.critical_path()
    assert [(step.stage, str(step.task.pass_.letter), step.task.micro, step.messages) for step in path] == [
        (0, "F", 0, 0),
        (1, "F", 2, 3),
        (1, "B", 0, 0),
        (0, "B", 2, 3),
    ]


def test_stages_that_wait_in_a_circle_are_named() -> None:
    orders = from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    with pytest.raises(ProgramError) as caught:
        play(orders, even_seconds(2, forward_s=1.0, input_s=1.0, weight_s=1.0))
    assert str(caught.value) == (
        "schedule 'csv' does not end: stage 0 waits at position 1, BACKWARD of micro-batch 0, chunk 0, "
        "for BACKWARD of micro-batch 0, chunk 0, on stage 1; stage 1 waits at position 1, FORWARD of micro-batch 1, "
        "chunk 0, for FORWARD of micro-batch 1, chunk 0, on stage 0: a circle: let one of these tasks come later"
    )


def without(orders: Orders, stage: int, task: StageTask) -> Orders:
    tasks = list(orders.tasks)
    tasks[stage] = tuple(other for other in tasks[stage] if other != task)
    return replace(orders, tasks=tuple(tasks))


def test_a_task_that_is_in_no_order_is_named() -> None:
    orders = without(orders_for("1f1b", num_stages=3, num_micros=2), 1, StageTask(Pass.BACKWARD, 0, 1))
    with pytest.raises(
        ProgramError, match=r"stage 0 waits at position 3, BACKWARD of micro-batch 1, .* stage 1 has ended"
    ):
        play(orders, even_seconds(3, forward_s=1.0, input_s=1.0, weight_s=1.0))
    orders = without(orders_for("zb-h1", num_stages=1, num_micros=2), 0, StageTask(Pass.BACKWARD_INPUT, 0, 1))
    with pytest.raises(
        ProgramError, match="BACKWARD_WEIGHT of micro-batch 1, chunk 0, for BACKWARD_INPUT of micro-batch 1"
    ):
        play(orders, even_seconds(1, forward_s=1.0, input_s=1.0, weight_s=1.0))


def test_seconds_of_another_pipeline_are_refused() -> None:
    orders = orders_for("1f1b", num_stages=3, num_micros=2)
    seconds = even_seconds(4, forward_s=1.0, input_s=1.0, weight_s=1.0)
    with pytest.raises(PlanError, match="forward tasks: 4 of them; give 3"):
        play(orders, seconds)
    with pytest.raises(PlanError, match="edges: 1 of them; give 2"):
        play(orders, replace(even_seconds(3, forward_s=1.0, input_s=1.0, weight_s=1.0), edge_s=(1.0,)))


def test_the_largest_published_pipeline_plays_with_little_effort() -> None:
    """530B, Narayanan et al. 2104.04473, Table 1: 35 stages, 3 chunks, 280 micro-batches, at its ideal makespan."""
    orders = orders_for("interleaved", num_stages=35, num_chunks=3, num_micros=280)
    assert sum(map(len, orders.tasks)) == 58_800
    seconds = even_seconds(105, forward_s=1.0, input_s=1.0, weight_s=1.0)
    assert play(orders, seconds).makespan_s == (3 * 280 + 34) * 3
    assert lines_run(lambda: play(orders, seconds)) < 20 * 58_800
