"""When the full parameters of a block are in memory, and so how often they are gathered.

A step visits blocks in a fixed order: for every unit of micro-batches, forward through blocks 0 .. L-1,
then backward through L-1 .. 0; at each visit all micro-batches of the unit pass, one after the other. A
*residency* is a run of visits that share one gather. Two visits share it when the block would still be
there at the moment its next gather had to be issued: with prefetch distance d that is when they are at
most max(1, d) visits apart. At the default distance of 1, the last block stays between its forward and
its backward, and the first block between the backward of one unit and the forward of the next. Both the
traffic formula and the program builder read this.

With one micro-batch a unit this is plain accumulation; with all of them in one unit, breadth-first (arXiv
2211.05953): blocks are gathered and gradients reduced once a unit, and its activations are kept at once.
"""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from terrace.model.spec import BlockSpec
from terrace.plan.plan import Plan


@dataclass(frozen=True)
class Visit:
    """The micro-batches `micros` pass a block, forward or backward."""

    block: int
    micros: range
    backward: bool


@dataclass(frozen=True)
class Residency:
    """The full parameters of `block` serve visits `first` to `last`; the gather is issued before visit `issue`."""

    block: int
    issue: int
    first: int
    last: int
    backward: bool  # whether the first visit is a backward
    opening: bool  # whether it is the first residency of this block in the step


def units(num_micros: int, unit: int) -> list[range]:
    """Return the micro-batches of every unit; the last may hold fewer."""
    return [range(first, min(first + unit, num_micros)) for first in range(0, num_micros, unit)]


def step_visits(num_blocks: int, num_micros: int, unit: int) -> list[Visit]:
    """Return the visits of one step in order."""
    forward = range(num_blocks)
    visits = []
    for micros in units(num_micros, unit):
        visits += [Visit(block, micros, backward=False) for block in forward]
        visits += [Visit(block, micros, backward=True) for block in reversed(forward)]
    return visits


def residencies(blocks: Sequence[BlockSpec], num_micros: int, unit: int, prefetch: int) -> list[Residency]:
    """Return the residencies of one step, ordered by first visit."""
    visits = step_visits(len(blocks), num_micros, unit)
    spans: list[list[int]] = []  # [block, first, last]
    newest: dict[int, list[int]] = {}
    for position, visit in enumerate(visits):
        for block in (visit.block, *blocks[visit.block].borrows):
            current = newest.get(block)
            if current is not None and position - current[2] <= max(1, prefetch):
                current[2] = position
            else:
                newest[block] = [block, position, position]
                spans.append(newest[block])
    seen: set[int] = set()
    result = []
    for block, first, last in spans:
        result.append(
            Residency(
                block=block,
                issue=max(0, first - prefetch),
                first=first,
                last=last,
                backward=visits[first].backward,
                opening=block not in seen,
            )
        )
        seen.add(block)
    return result


def recomputed(plan: Plan, blocks: Sequence[BlockSpec]) -> frozenset[int]:
    """Return the indexes of the blocks whose forward is run again in the backward."""
    return frozenset(
        index
        for index, block in enumerate(blocks)
        if any(fnmatch.fnmatchcase(block.name, pattern) for pattern in plan.recompute)
    )
