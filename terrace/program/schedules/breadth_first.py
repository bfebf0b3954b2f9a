"""Breadth-first pipeline (Lamy-Poirier 2211.05953): all micro-batches pass a chunk before the next chunk."""

from terrace.plan.stage import Pass
from terrace.program.schedules.orders import Orders, build, looped, positive, tasks_of
from terrace.program.schedules.registry import schedule


@schedule("breadth-first")
def breadth_first(num_stages: int, num_chunks: int, num_micros: int) -> Orders:
    """F of all micro-batches chunk by chunk, then B chunk by chunk in reverse, first in first out.

    Invariants: every stage keeps num_micros num_chunks chunk activations; it gathers each chunk once a pass, and
    the last chunk once for both; with num_micros >= num_stages, equal stages and free messages the makespan is
    (num_micros + (num_stages - 1)/num_chunks)(forward + backward) of a whole stage. One chunk is GPipe.
    """
    positive(num_stages=num_stages, num_chunks=num_chunks, num_micros=num_micros)
    order = [task for chunk in range(num_chunks) for task in tasks_of(Pass.FORWARD, chunk, num_micros)]
    order += [task for chunk in reversed(range(num_chunks)) for task in tasks_of(Pass.BACKWARD, chunk, num_micros)]
    return build("breadth-first", looped(num_stages, num_chunks), num_micros, [order] * num_stages, num_chunks)
