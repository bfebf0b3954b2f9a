"""Assigns the rows of a global batch to micro-steps, with equal row counts and even costs."""

from collections.abc import Sequence
from heapq import heappop, heappush

from terrace.base.errors import PlanError


def micro_steps(row_costs: Sequence[float], num_micros: int) -> tuple[tuple[int, ...], ...]:
    """Row indices of each micro-step, ascending. Raises `PlanError` if the rows are no multiple of `num_micros`.

    Uneven micro-steps are not slower in themselves, but if one had several long documents and another none, they could
    not be balanced over the ring ranks.
    """
    if num_micros < 1 or len(row_costs) % num_micros:
        raise PlanError(f"{len(row_costs)} rows cannot be dealt to {num_micros} micro-steps: give a multiple of them")
    # Graham's rule: the costliest row first, to the cheapest micro-step that has room.
    room = len(row_costs) // num_micros
    steps: list[list[int]] = [[] for _ in range(num_micros)]
    heap = [(0.0, step) for step in range(num_micros)]
    for row in sorted(range(len(row_costs)), key=lambda index: (-row_costs[index], index)):
        cost, step = heappop(heap)
        steps[step].append(row)
        if len(steps[step]) < room:
            heappush(heap, (cost + row_costs[row], step))
    return tuple(tuple(sorted(rows)) for rows in steps)
