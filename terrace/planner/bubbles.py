"""A schedule in numbers: its bubble, micro-batches in flight, and when the first stage begins and ends with each chunk.

They are read off the schedule's own orders, played on at most `_STAGES` equal stages, and grow in proportion to the
number of stages and of micro-batches: under every registered schedule the bubble of p stages is that of two times p - 1
(tests/planner/test_price.py). So a schedule that is added needs no formula.
"""

from functools import lru_cache
from typing import NamedTuple

from terrace.base.errors import PlanError
from terrace.plan.stage import Pass
from terrace.planner.stages import traits
from terrace.program.schedules.orders import Orders, most_waiting
from terrace.program.schedules.registry import orders_for, takes_unit
from terrace.program.schedules.seconds import TaskSeconds
from terrace.simulate.timeline import Timeline, play

_STAGES = 4
_WHOLE = (1 / 3, 0.0)  # where backwards are whole, only the sum with the forward counts
_MOST_EXTRA = 4.0
_NO_EDGE, _EDGE = 1e-3, 0.1  # a stage's seconds: shorter messages are left out; up to here they count in proportion


class Shape(NamedTuple):
    """Numbers in seconds of a stage with one micro-batch.

    The step takes its micro-batches, the `bubble`, the `waits` of stages for messages between them, and what its
    longest stage takes beyond the others. Chunk c of the first stage has its first forward `before[c]` after the step
    begins, its last backward `after[c]` before it ends.
    """

    bubble: float
    before: tuple[float, ...]
    after: tuple[float, ...]
    waits: float = 0.0


def shape_of(
    schedule: str,
    num_stages: int,
    chunks: int,
    num_micros: int,
    work: tuple[float, float, float],
    edge_s: float,
    extra_s: float,
) -> Shape:
    """The numbers of a schedule for stages with `work` (forward, backward, weight gradient), of any unit of time.

    `edge_s` is a message between stages, `extra_s` the part of a micro-batch by which the last virtual stage, which has
    the logits, takes longer than the others.
    """
    stage_s = work[0] + work[1]
    # Rounded, so that many candidates share a play.
    forward, weight = (
        shares_of(work) if traits()[schedule].split else _WHOLE
    )  # of whole backwards only their sum counts
    extra = min(_MOST_EXTRA, round(20 * extra_s / stage_s) / 20)
    numbers = schedule, num_stages, chunks, num_micros, forward, weight, extra
    edge, without = edge_s / stage_s, _shape(*numbers, 0.0)
    if edge < _NO_EDGE:
        return without
    if edge > _EDGE:
        with_edge = _shape(*numbers, float(f"{edge:.2g}"))
        return with_edge._replace(bubble=without.bubble, waits=with_edge.bubble - without.bubble)
    # Shorter messages make a step longer in proportion.
    return without._replace(waits=edge / _EDGE * (_shape(*numbers, _EDGE).bubble - without.bubble))


def shares_of(work: tuple[float, float, float], parts: int = 50) -> tuple[float, float]:
    """Shares of the forward and of the weight gradients in a stage's seconds, rounded to one of `parts`."""
    stage_s = work[0] + work[1]
    forward = min(parts, max(0, round(parts * work[0] / stage_s)))
    return forward / parts, min(parts - forward, max(0, round(parts * work[2] / stage_s))) / parts


@lru_cache(maxsize=65536)
def least_bubble(most_chunks: int, schedules: tuple[tuple[str, int], ...], forward: float, weight: float) -> float:
    """The least bubble of two stages, in seconds of a stage with one micro-batch, with at most `most_chunks`."""
    found = [
        _played(schedule, 2, chunks, 4, *((forward, weight) if traits()[schedule].split else _WHOLE), 0.0, 0.0).bubble
        for schedule, chunks in schedules
        if chunks <= most_chunks
    ]
    return min(found, default=0.0)


def equal_shape(schedule: str, num_stages: int, chunks: int, num_micros: int, forward: float, weight: float) -> Shape:
    """The numbers for equal stages without messages, from the shares of `shares_of`."""
    work = (forward, weight) if traits()[schedule].split else _WHOLE
    return _shape(schedule, num_stages, chunks, num_micros, *work, 0.0, 0.0)


@lru_cache(maxsize=65536)
def _shape(
    schedule: str,
    num_stages: int,
    chunks: int,
    num_micros: int,
    forward: float,
    weight: float,
    extra: float,
    edge: float,
) -> Shape:
    few = min(num_stages, _STAGES)
    grows = num_stages / few
    if num_micros < 2 * num_stages:
        # Fewer micro-batches than fill the stages: as many for each stage.
        short = -(-num_micros * few // num_stages)
        found = _played(schedule, few, chunks, short, forward, weight, extra, edge)
        if num_micros < num_stages:
            bubble = ((1.0 + extra) * short + found.bubble) * grows - (1.0 + extra) * num_micros
        else:
            bubble = found.bubble * (num_stages - 1) / (few - 1)
        before, after = (tuple([grows * each for each in part]) for part in (found.before, found.after))
        return Shape(bubble, before, after)
    one, two = (_played(schedule, few, chunks, times * few, forward, weight, extra, edge) for times in (2, 3))
    more = (num_micros / grows - 2 * few) / few  # further rounds of the few stages, each as long as `grows` of its own
    # The bubble of p stages is p - 1 times that of two.
    each = (two.bubble - one.bubble) / few
    bubble = (one.bubble - 2 * few * each) * (num_stages - 1) / (few - 1) + each * num_micros
    before, after = (
        tuple([grows * (a + more * (b - a)) for a, b in zip(first, second, strict=True)])
        for first, second in ((one.before, two.before), (one.after, two.after))
    )
    return Shape(bubble, before, after)


@lru_cache(maxsize=65536)
def _played(
    schedule: str,
    num_stages: int,
    chunks: int,
    num_micros: int,
    forward: float,
    weight: float,
    extra: float,
    edge: float,
) -> Shape:
    orders, num_virtual = _orders(schedule, num_stages, chunks, num_micros), num_stages * chunks
    seconds = TaskSeconds(
        forward_s=(forward / chunks,) * num_virtual,
        backward_s=(*[(1.0 - forward) / chunks] * (num_virtual - 1), (1.0 - forward) / chunks + extra),
        input_s=(*[(1.0 - forward - weight) / chunks] * (num_virtual - 1), (1.0 - forward - weight) / chunks + extra),
        weight_s=(weight / chunks,) * num_virtual,
        edge_s=(edge,) * (num_virtual - 1),
    )
    timeline = play(orders, seconds)
    makespan_s = timeline.makespan_s
    before, after = _ends(timeline, makespan_s)
    return Shape(makespan_s - (1.0 + extra) * num_micros, before, after)


def _ends(timeline: Timeline, makespan_s: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    chunks = timeline.orders.num_chunks
    before, after = [0.0] * chunks, [0.0] * chunks
    seen = set[int]()
    for (pass_, chunk, _), start_s, end_s in zip(
        timeline.orders.tasks[0], timeline.starts_s[0], timeline.ends_of(0), strict=True
    ):
        if chunk not in seen:
            seen.add(chunk)
            before[chunk] = start_s
        if pass_ != Pass.FORWARD:
            after[chunk] = makespan_s - end_s
    return tuple(before), tuple(after)


def _orders(schedule: str, num_stages: int, chunks: int, num_micros: int) -> Orders:
    found = _orders_or_why_none(schedule, num_stages, chunks, num_micros)
    if isinstance(found, str):
        raise PlanError(found)
    return found


@lru_cache(maxsize=4096)
def _orders_or_why_none(schedule: str, num_stages: int, chunks: int, num_micros: int) -> Orders | str:
    # Refusals are cached, too: a search asks as often for numbers that a schedule does not take.
    numbers = {"unit": num_stages} if takes_unit(schedule) else {}
    try:
        return orders_for(schedule, num_stages=num_stages, num_micros=num_micros, num_chunks=chunks, **numbers)
    except PlanError as error:
        return str(error)


@lru_cache(maxsize=65536)
def in_flight(schedule: str, num_stages: int, chunks: int, num_micros: int) -> float:
    """Micro-batches of a whole stage that the fullest stage keeps at most, estimated."""
    few = min(num_stages, _STAGES)
    one, two = (max(map(sum, most_waiting(_orders(schedule, few, chunks, times * few)))) / chunks for times in (2, 4))
    if two > one:
        return num_micros * (two - one) / (2 * few)
    return min(one * num_stages / few, num_micros)
