"""Interleaved 1F1B (Narayanan et al. 2104.04473, section 2.2.2): several chunks a stage, depth first.

Micro-batches pass in groups of `num_stages`: a group runs through chunk 0, then through chunk 1, and so on, so
that the first micro-batch of a group is back from the last stage when the group has left the first.
"""

from terrace.base.errors import PlanError
from terrace.plan.stage import Pass
from terrace.program.schedules.one_f_one_b import alternate
from terrace.program.schedules.orders import Orders, StageTask, build, looped, nearest_multiple, positive, tasks_of
from terrace.program.schedules.registry import schedule


@schedule("interleaved", rounds=True)
def interleaved(num_stages: int, num_chunks: int, num_micros: int) -> Orders:
    """1F1B over (micro-batch, chunk) pairs, in groups of `num_stages` micro-batches.

    Stage r starts with 2(num_stages - 1 - r) + (num_chunks - 1) num_stages forwards; with one chunk it is 1F1B.

    Invariants: stage r keeps at most min(num_chunks num_micros, one more than it starts with) chunk activations; with
    equal stages and free messages the makespan is (num_micros + (num_stages - 1)/num_chunks)(forward + backward)
    of a whole stage. Raises `PlanError` when `num_micros` is not a multiple of `num_stages`.
    """
    positive(num_stages=num_stages, num_chunks=num_chunks, num_micros=num_micros)
    if num_micros % num_stages:
        raise PlanError(
            f"num_micros = {num_micros}: interleaved 1F1B passes micro-batches in groups of num_stages = "
            f"{num_stages}; write num_micros = {nearest_multiple(num_micros, num_stages)}, or use '1f1b'"
        )
    # All stages run the same order; they differ only in their warm-up.
    forwards = _in_groups(Pass.FORWARD, num_stages, list(range(num_chunks)), num_micros)
    backwards = _in_groups(Pass.BACKWARD, num_stages, list(reversed(range(num_chunks))), num_micros)
    # With several chunks an activation comes back round the ring, so each stage needs two more forwards than the next.
    hops = 1 if num_chunks == 1 else 2
    warmups = [hops * (num_stages - 1 - stage) + (num_chunks - 1) * num_stages for stage in range(num_stages)]
    rows = [alternate(forwards, backwards, num_warmup) for num_warmup in warmups]
    return build("interleaved", looped(num_stages, num_chunks), num_micros, rows, num_chunks)


def _in_groups(pass_: Pass, group: int, chunks: list[int], num_micros: int) -> list[StageTask]:
    tasks = {chunk: tasks_of(pass_, chunk, num_micros) for chunk in chunks}
    return [
        task
        for first in range(0, num_micros, group)
        for chunk in chunks
        for task in tasks[chunk][first : first + group]
    ]
