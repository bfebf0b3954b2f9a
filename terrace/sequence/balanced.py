"""The group layout of `balance = "cost"`: attention is assigned by cost, and all ranks hold equally many local tokens.

Pure and deterministic: every rank computes the same layout on the host, before the step, from the document lengths of
a micro-step.
"""

import math
from collections.abc import Sequence
from heapq import heappop, heappush

from terrace.base.errors import PlanError
from terrace.sequence.assign import assign
from terrace.sequence.capacity import ring_rank_capacity
from terrace.sequence.cost import WorkCost
from terrace.sequence.group_layout import GroupLayout
from terrace.sequence.local_tokens import deal_local_tokens


def balanced_group_layout(
    lengths: Sequence[int], ring_degrees: Sequence[int], ulysses: int, num_local_tokens: int, cost: WorkCost
) -> GroupLayout:
    """Layout of the concatenated documents on a context group.

    Every member holds `num_local_tokens` (terrace.plan.context.local_tokens); `cost` is that of one Ulysses rank.
    Raises `PlanError` if the tokens do not fit.
    """
    num_ring_ranks = math.prod(ring_degrees)
    if sum(lengths) > num_ring_ranks * ulysses * num_local_tokens:
        raise PlanError(
            f"{sum(lengths)} tokens do not fit on {num_ring_ranks * ulysses} ranks that hold {num_local_tokens} each: "
            "lower the tokens of a micro-batch"
        )
    found = assign(lengths, ring_degrees, cost, ring_rank_capacity(lengths, num_ring_ranks, ulysses * num_local_tokens))
    return GroupLayout(
        segments=found.segments,
        documents=(),
        local_runs=deal_local_tokens(found.segments, ring_degrees, ulysses, num_local_tokens),
        ulysses=ulysses,
        num_local_tokens=num_local_tokens,
        window=cost.window,
    )


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
