"""Orders: the tasks of every stage of a pipeline in one step, as plain values.

A pipeline has `num_stages` stages (one a pipeline rank), each holding `num_chunks` pieces of the model. The pieces in
model order are the *virtual stages* 0 .. num_stages * num_chunks - 1. The *placement*, which belongs to the schedule,
gives the virtual stage of chunk c of stage r:

    looped    c * num_stages + r                   every chunk goes once round the stages
    V-shaped  r, then 2 * num_stages - 1 - r       two chunks; the first stage holds both ends of the model

A backward is one task (BACKWARD), or two: BACKWARD_INPUT makes the gradient of the input, which the stage before waits
for, and BACKWARD_WEIGHT the gradient of the weights, any time later (Qi et al. 2401.10241, section 2).

Orders hold no times and no messages: a task waits for its inputs, and terrace.simulate.timeline says when.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from terrace.base.errors import PlanError
from terrace.plan.stage import Kind


class Task(NamedTuple):
    """One micro-batch passes one chunk of a stage."""

    kind: Kind
    chunk: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind.name} of micro-batch {self.micro}, chunk {self.chunk}"


Placement = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The tasks of every stage in order; `placement[stage][chunk]` is the virtual stage."""

    schedule: str
    num_stages: int
    num_chunks: int
    num_micros: int
    placement: Placement
    tasks: tuple[tuple[Task, ...], ...]

    @property
    def num_virtual(self) -> int:
        """Number of pieces of the model."""
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


def tasks_of(kind: Kind, chunk: int, num_micros: int) -> tuple[Task, ...]:
    """The task of every micro-batch; stages share these values, so that orders stay small."""
    return tuple(Task(kind, chunk, micro) for micro in range(num_micros))


def build(
    schedule: str, placement: Placement, num_micros: int, tasks: Sequence[Sequence[Task]], num_chunks: int = 1
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


def positive(**numbers: int) -> None:
    """Raise `PlanError` for a number below one."""
    for name, value in numbers.items():
        if value < 1:
            raise PlanError(f"{name} = {value}: a pipeline needs at least 1; write {name} = 1 or more")


def nearest_multiple(value: int, of: int) -> int:
    """The multiple of `of` (at least one time) that is nearest to `value`, the larger of two."""
    return max(1, (2 * value + of) // (2 * of)) * of
