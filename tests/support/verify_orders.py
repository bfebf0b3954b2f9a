"""The rules of an order: every task once, in its place; the check that tests hold schedules to."""

from collections.abc import Sequence

from terrace.base.errors import ProgramError
from terrace.plan.stage import Kind
from terrace.program.schedules.orders import Orders, Task


def verify_orders(orders: Orders) -> None:
    """Check every rule that one stage's order can break; raises `ProgramError` with stage, task and rule.

    The placement names every virtual stage once. Every stage runs each of its micro-batches forward once in every chunk
    and backward once, whole or in two halves, in this order. Circular waits between stages show when the orders are
    played (terrace.simulate.timeline).
    """
    # A virtual stage with two holders, or none, would break the chain of activations.
    placed = sorted(virtual for row in orders.placement for virtual in row)
    if placed != list(range(orders.num_virtual)) or any(len(row) != orders.num_chunks for row in orders.placement):
        raise ProgramError(
            f"placement {orders.placement}: every virtual stage 0 .. {orders.num_virtual - 1} needs one holder, and "
            f"every stage {orders.num_chunks} of them"
        )
    for stage, tasks in enumerate(orders.tasks):
        _verify_stage(orders, stage, tasks)


def _verify_stage(orders: Orders, stage: int, tasks: Sequence[Task]) -> None:
    needed = {
        Kind.FORWARD: None,
        Kind.BACKWARD: Kind.FORWARD,
        Kind.BACKWARD_INPUT: Kind.FORWARD,
        Kind.BACKWARD_WEIGHT: Kind.BACKWARD_INPUT,
    }
    seen: set[Task] = set()
    for task in tasks:
        kind, chunk, micro = task
        if not (0 <= chunk < orders.num_chunks and 0 <= micro < orders.num_micros):
            raise ProgramError(
                f"stage {stage}: {task}: there are {orders.num_chunks} chunks and {orders.num_micros} micro-batches"
            )
        before = needed[kind]
        if before is not None and Task(before, chunk, micro) not in seen:
            raise ProgramError(f"stage {stage}: {task} stands before its {before.name}: put it after")
        # A whole backward and its input half exclude each other.
        twin = {Kind.BACKWARD: Kind.BACKWARD_INPUT, Kind.BACKWARD_INPUT: Kind.BACKWARD}.get(kind)
        if task in seen or (twin is not None and Task(twin, chunk, micro) in seen):
            raise ProgramError(f"stage {stage}: {task} stands there twice: a micro-batch passes a chunk once")
        seen.add(task)
    for chunk in range(orders.num_chunks):
        for micro in range(orders.num_micros):
            # Presence is checked last: order and repetition were checked task by task.
            whole = Task(Kind.BACKWARD, chunk, micro) in seen
            if not whole and Task(Kind.BACKWARD_WEIGHT, chunk, micro) not in seen:
                raise ProgramError(f"stage {stage}: micro-batch {micro} of chunk {chunk} has no complete backward")
