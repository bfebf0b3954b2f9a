"""Every schedule by name, orders and seconds drawn at random."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from hypothesis import strategies as st

from terrace.plan.stage import Pass
from terrace.program.schedules.orders import Orders
from terrace.program.schedules.registry import orders_for
from terrace.program.schedules.seconds import TaskSeconds

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

AUTOMATIC = ("zb-1p", "zb-2p", "zb-auto")
CHUNKED = ("breadth-first", "interleaved", "zeropp")
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
    if name in AUTOMATIC:
        numbers["seconds"] = draw(seconds_of(stages))
        numbers["weight_share"] = draw(SHARES)
    if name == "zb-auto":
        numbers["memory_limit"] = draw(st.sampled_from((1, 1.5, 2, stages, stages + 0.3, 2 * stages, 100)))
    return numbers


@st.composite
def seconds_of(draw: st.DrawFn, num: int) -> TaskSeconds:
    """Unequal seconds of `num` virtual stages, in quarters so that sums are exact, some of them 0."""
    quarters = [
        draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)) for size in (num, num, num, num, num - 1)
    ]
    forward, backward, inputs, weights, edge = (tuple(value / 4 for value in row) for row in quarters)
    return TaskSeconds(forward_s=forward, backward_s=backward, input_s=inputs, weight_s=weights, edge_s=edge)


@st.composite
def any_orders(draw: st.DrawFn) -> Orders:
    """Orders of any schedule."""
    name = draw(st.sampled_from(NAMES))
    return orders_for(name, **draw(numbers_of(name)))


def even_seconds(
    num_virtual: int, *, forward_s: float, input_s: float, weight_s: float, edge_s: float = 0.0
) -> TaskSeconds:
    """Equal seconds for every virtual stage; a whole backward takes both halves."""
    return TaskSeconds(
        forward_s=(forward_s,) * num_virtual,
        backward_s=(input_s + weight_s,) * num_virtual,
        input_s=(input_s,) * num_virtual,
        weight_s=(weight_s,) * num_virtual,
        edge_s=(edge_s,) * (num_virtual - 1),
    )


def peak_activation_bytes(
    orders: Orders, forward_bytes: Sequence[float], weight_bytes: Sequence[float] | None = None
) -> list[float]:
    """Peak activation bytes of each stage.

    Both lists are by virtual stage: `forward_bytes` is kept by the forward of a micro-batch (M_B of Qi et al.
    2401.10241, section 2) and `weight_bytes` is left by its BACKWARD_INPUT for the BACKWARD_WEIGHT (M_W; all of it if
    None). A whole backward and a BACKWARD_WEIGHT free the rest. Memory is freed when the task ends.
    """
    kept = forward_bytes if weight_bytes is None else weight_bytes
    peaks = []
    for row, tasks in zip(orders.placement, orders.tasks, strict=True):
        # Bytes that each task adds (+) or frees (-), by chunk.
        change = {
            Pass.FORWARD: [forward_bytes[virtual] for virtual in row],
            Pass.BACKWARD: [-forward_bytes[virtual] for virtual in row],
            Pass.BACKWARD_INPUT: [kept[virtual] - forward_bytes[virtual] for virtual in row],
            Pass.BACKWARD_WEIGHT: [-kept[virtual] for virtual in row],
        }
        peaks.append(max(accumulate(change[pass_][chunk] for pass_, chunk, _ in tasks), default=0))
    return peaks
