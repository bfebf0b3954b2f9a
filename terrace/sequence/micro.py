"""Which rows of a global batch are a micro-step: equal numbers, even costs."""

from collections.abc import Sequence
from heapq import heappop, heappush

from terrace.base.errors import PlanError


def micro_steps(row_costs: Sequence[float], num_micros: int) -> tuple[tuple[int, ...], ...]:
    """Return the rows of each micro-step, rising: the costliest first, to the cheapest one with room (Graham's rule).

    A micro-step goes on when its slowest place is done, so what is uneven between micro-steps costs nothing by itself;
    but one with several long documents and one with none could not be evened out over places. Raises `PlanError` when
    the rows are no multiple of `num_micros`.
    """
    if num_micros < 1 or len(row_costs) % num_micros:
        raise PlanError(f"{len(row_costs)} rows cannot be dealt to {num_micros} micro-steps: give a multiple of them")
    room = len(row_costs) // num_micros
    steps: list[list[int]] = [[] for _ in range(num_micros)]
    heap = [(0.0, step) for step in range(num_micros)]
    for row in sorted(range(len(row_costs)), key=lambda index: (-row_costs[index], index)):
        cost, step = heappop(heap)
        steps[step].append(row)
        if len(steps[step]) < room:
            heappush(heap, (cost + row_costs[row], step))
    return tuple(tuple(sorted(rows)) for rows in steps)
