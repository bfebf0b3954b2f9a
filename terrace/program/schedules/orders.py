"""Orders: the tasks of every stage of a pipeline in one step, as plain values.

A pipeline has `num_stages` stages (one per pipeline rank) with `num_chunks` pieces of the model each. The pieces, in
model order, are the *virtual stages* 0 .. num_stages * num_chunks - 1. A schedule's *placement* is the virtual stage of
chunk c on stage r:

    looped    c * num_stages + r                   every chunk goes once round the stages
    V-shaped  r, then 2 * num_stages - 1 - r       two chunks; the first stage holds both ends of the model

A backward is one task (BACKWARD), or two: BACKWARD_INPUT computes the input gradient, which the previous stage waits
for, and BACKWARD_WEIGHT the weight gradients, any time later (Qi et al. 2401.10241, section 2).

Orders contain no times and no messages: a task waits for its inputs; terrace.simulate.timeline computes when it runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from terrace.base.errors import PlanError, ProgramError
from terrace.plan.stage import Pass

Waiting = tuple[tuple[int, ...], ...]  # micro-batches by stage and chunk


class StageTask(NamedTuple):
    pass_: Pass
    chunk: int
    micro: int

    def __str__(self) -> str:
        return f"{self.pass_.name} of micro-batch {self.micro}, chunk {self.chunk}"


Placement = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The tasks of every stage in order; `placement[stage][chunk]` is the virtual stage."""

    schedule: str
    num_stages: int
    num_chunks: int
    num_micros: int
    placement: Placement
    tasks: tuple[tuple[StageTask, ...], ...]

    @property
    def num_virtual(self) -> int:
        return self.num_stages * self.num_chunks

    def holders(self) -> list[tuple[int, int]]:
        """(stage, chunk) of every virtual stage."""
        found = {
            virtual: (stage, chunk) for stage, row in enumerate(self.placement) for chunk, virtual in enumerate(row)
        }
        return [found[virtual] for virtual in range(self.num_virtual)]


def looped(num_stages: int, num_chunks: int) -> Placement:
    """Chunk c of stage r is virtual stage c * num_stages + r."""
    return tuple(tuple(range(stage, num_stages * num_chunks, num_stages)) for stage in range(num_stages))


def v_shaped(num_stages: int) -> Placement:
    """Stage r holds virtual stages r and 2 * num_stages - 1 - r."""
    return tuple((stage, 2 * num_stages - 1 - stage) for stage in range(num_stages))


@lru_cache(maxsize=1024)
def tasks_of(pass_: Pass, chunk: int, num_micros: int) -> tuple[StageTask, ...]:
    """The task of every micro-batch; stages and orders share these values, so that orders stay small."""
    return tuple([StageTask(pass_, chunk, micro) for micro in range(num_micros)])


def build(
    schedule: str, placement: Placement, num_micros: int, tasks: Sequence[Sequence[StageTask]], num_chunks: int = 1
) -> Orders:
    """The orders of a schedule from the tasks of every stage."""
    return Orders(
        schedule=schedule,
        num_stages=len(placement),
        num_chunks=num_chunks,
        num_micros=num_micros,
        placement=placement,
        tasks=tuple(tuple(row) for row in tasks),
    )


def split_orders(schedule: str, num_stages: int, num_micros: int, row: Callable[..., list[StageTask]]) -> Orders:
    """Orders with one chunk per stage and split backwards; `row` returns a stage's order from its F, I and W."""
    positive(num_stages=num_stages, num_micros=num_micros)
    passes = [tasks_of(pass_, 0, num_micros) for pass_ in (Pass.FORWARD, Pass.BACKWARD_INPUT, Pass.BACKWARD_WEIGHT)]
    rows = [row(num_stages, stage, *passes) for stage in range(num_stages)]
    return build(schedule, looped(num_stages, 1), num_micros, rows)


def positive(**numbers: int) -> None:
    """Raise `PlanError` for a number below one."""
    for name, value in numbers.items():
        if value < 1:
            raise PlanError(f"{name} = {value}: a pipeline needs at least 1; write {name} = 1 or more")


def nearest_multiple(value: int, of: int) -> int:
    """The positive multiple of `of` nearest to `value`; the larger one in a tie."""
    return max(1, (2 * value + of) // (2 * of)) * of


def verify_orders(orders: Orders) -> None:
    """Check the order of each stage; raises `ProgramError` with stage, task and rule.

    The placement names every virtual stage once. In every chunk, every micro-batch has one forward and then one
    backward, whole or in two halves. Deadlocks between stages are detected when the orders are played
    (terrace.simulate.timeline).
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


def _verify_stage(orders: Orders, stage: int, tasks: Sequence[StageTask]) -> None:
    needed = {
        Pass.FORWARD: None,
        Pass.BACKWARD: Pass.FORWARD,
        Pass.BACKWARD_INPUT: Pass.FORWARD,
        Pass.BACKWARD_WEIGHT: Pass.BACKWARD_INPUT,
    }
    seen: set[StageTask] = set()
    for task in tasks:
        pass_, chunk, micro = task
        if not (0 <= chunk < orders.num_chunks and 0 <= micro < orders.num_micros):
            raise ProgramError(
                f"stage {stage}: {task}: there are {orders.num_chunks} chunks and {orders.num_micros} micro-batches"
            )
        before = needed[pass_]
        if before is not None and StageTask(before, chunk, micro) not in seen:
            raise ProgramError(f"stage {stage}: {task} stands before its {before.name}: put it after")
        # A whole backward and its input half exclude each other.
        twin = {Pass.BACKWARD: Pass.BACKWARD_INPUT, Pass.BACKWARD_INPUT: Pass.BACKWARD}.get(pass_)
        if task in seen or (twin is not None and StageTask(twin, chunk, micro) in seen):
            raise ProgramError(f"stage {stage}: {task} stands there twice: a micro-batch passes a chunk once")
        seen.add(task)
    for chunk in range(orders.num_chunks):
        for micro in range(orders.num_micros):
            # Presence is checked last: order and repetition were checked task by task.
            whole = StageTask(Pass.BACKWARD, chunk, micro) in seen
            if not whole and StageTask(Pass.BACKWARD_WEIGHT, chunk, micro) not in seen:
                raise ProgramError(f"stage {stage}: micro-batch {micro} of chunk {chunk} has no complete backward")


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
