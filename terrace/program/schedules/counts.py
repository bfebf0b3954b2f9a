"""Activations that a stage keeps, by the order of its tasks alone."""

from collections.abc import Sequence
from itertools import accumulate

from terrace.plan.stage import Kind
from terrace.program.schedules.orders import Orders


def peak_activation_bytes(
    orders: Orders, forward_bytes: Sequence[float], weight_bytes: Sequence[float] | None = None
) -> list[float]:
    """Return the most activation bytes that each stage keeps at once.

    By virtual stage, `forward_bytes` is what the forward of a micro-batch keeps (M_B of Qi et al. 2401.10241,
    section 2) and `weight_bytes` what its BACKWARD_INPUT leaves for the BACKWARD_WEIGHT (M_W; all of it if None).
    A whole backward and a BACKWARD_WEIGHT free all that is left. A task frees what it frees when it ends.
    """
    kept = forward_bytes if weight_bytes is None else weight_bytes
    peaks = []
    for row, tasks in zip(orders.placement, orders.tasks, strict=True):
        change = {
            Kind.FORWARD: [forward_bytes[virtual] for virtual in row],
            Kind.BACKWARD: [-forward_bytes[virtual] for virtual in row],
            Kind.BACKWARD_INPUT: [kept[virtual] - forward_bytes[virtual] for virtual in row],
            Kind.BACKWARD_WEIGHT: [-kept[virtual] for virtual in row],
        }
        peaks.append(max(accumulate(change[kind][chunk] for kind, chunk, _ in tasks), default=0))
    return peaks
