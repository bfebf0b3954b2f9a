"""Counts of micro-batches in flight, and between the halves of a split backward, from orders."""

from terrace.plan.stage import Pass
from terrace.program.schedules.orders import Orders

Waiting = tuple[tuple[int, ...], ...]  # micro-batches by stage and chunk


def most_due(orders: Orders) -> Waiting:
    """By stage and chunk, micro-batches between the halves of their backward, when the stage has most of them.

    Empty for a stage without split backwards.
    """
    found = []
    halves, ends = int(Pass.BACKWARD_INPUT), int(Pass.BACKWARD_WEIGHT)
    for tasks in orders.tasks:
        now, most, peak = [0] * orders.num_chunks, tuple[int, ...](), 0
        for pass_, chunk, _ in tasks:
            if pass_ == halves:
                now[chunk] += 1
                if sum(now) > peak:
                    most, peak = tuple(now), sum(now)
            elif pass_ == ends:
                now[chunk] -= 1
        found.append(most)
    return tuple(found)


def most_waiting(orders: Orders) -> Waiting:
    """By stage and chunk, micro-batches in flight when the stage has most of them."""
    found = []
    # Plain integers: this loop runs over every task of every candidate schedule.
    forward, backward_input = int(Pass.FORWARD), int(Pass.BACKWARD_INPUT)
    for tasks in orders.tasks:
        now, most, total, peak = [0] * orders.num_chunks, (0,) * orders.num_chunks, 0, 0
        for pass_, chunk, _ in tasks:
            if pass_ == forward:
                now[chunk] += 1
                total += 1
                # Only the first moment with the most is kept.
                if total > peak:
                    most, peak = tuple(now), total
            # A micro-batch leaves when its whole backward or its weight half ends.
            elif pass_ != backward_input:
                now[chunk] -= 1
                total -= 1
        found.append(most)
    return tuple(found)
