"""Builds programs of long steps from short ones.

After some micro-batches a schedule repeats, so a long step is a short one with more repetitions of a body. Comparing
three short steps, each with one more repetition, reveals the body and its position; the long step then gets as many
repetitions as it needs (terrace.base.repeated). The verifier checks the result independently
(terrace.program.verify_repeating).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from terrace.base.repeated import Repeated, repeated
from terrace.plan.stage import Group, Stage
from terrace.program.instruction import Instruction
from terrace.program.segments import Run, Segments

if TYPE_CHECKING:
    from terrace.program.program import Program

_TRIES = 3


def repeating(
    stages_of: Callable[[int], Sequence[Stage]],
    lower: "Callable[[Sequence[Stage]], Sequence[Program]]",
    num_micros: int,
    num_stages: int,
    every: int,
) -> "list[Program] | None":
    """Programs of a step of `num_micros` micro-batches whose body has `every` micro-batches.

    `stages_of` returns the stages for a number of micro-batches, `lower` their programs. None if much shorter steps do
    not reveal a body.
    """
    # After the first micro-batches, which fill the pipeline or the lanes of a single rank.
    least = max(num_stages + 2, 2 * every, 8)
    for _ in range(_TRIES):
        short = least + (num_micros - least) % every
        if short + 2 * every > num_micros // 2:
            return None
        steps = [stages_of(short + bodies * every) for bodies in range(3)]
        # Compare groups first: there are fewer of them than instructions.
        if all(repeated([each.groups for each in builds], every) for builds in zip(*steps, strict=True)):
            found = joined([lower(stages) for stages in steps], num_micros)
            if found is not None:
                return found
        least *= 2
    return None


def joined(steps: "Sequence[Sequence[Program]]", num_micros: int) -> "list[Program] | None":
    """Programs of a step of `num_micros` micro-batches from three `steps`, each with one more repetition of a body.

    None if they have no common body.
    """
    found = []
    for builds in zip(*steps, strict=True):
        _, long, longer = builds
        every = longer.num_micros - long.num_micros
        bodies: dict[tuple[Instruction, ...], int] = {}
        orders = []
        for each in builds:
            numbers = [bodies.setdefault(body, len(bodies)) for body in each.segments.bodies]
            orders.append([Run(numbers[body], micro) for body, micro in each.segments.order])
        order = repeated(orders, every)
        groups: Repeated[Group] | None = repeated([each.stage.groups for each in builds], every)
        if order is None or groups is None:
            return None
        times = 1 + (num_micros - long.num_micros) // every
        stage = replace(long.stage, num_micros=num_micros, groups=groups.times(times))
        found.append(replace(long, stage=stage, instructions=Segments(tuple(bodies), order.times(times))))
    return found
