"""When the full parameters of a block are in memory, and so how often they are gathered.

A step uses blocks in a fixed order: for every micro-batch, forward through blocks 0 .. L-1, then
backward through L-1 .. 0. A *residency* is a run of uses that share one gather. Two uses share it
when the block would still be there at the moment its next gather had to be issued: with prefetch
distance d that is when they are at most max(1, d) uses apart. At the default distance of 1, the last
block stays between its forward and its backward, and the first block between the backward of one
micro-batch and the forward of the next. Both the traffic formula and the program builder read this.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from terrace.model.spec import BlockSpec


@dataclass(frozen=True)
class Use:
    """One visit to a block."""

    block: int
    micro: int
    backward: bool


@dataclass(frozen=True)
class Residency:
    """The full parameters of `block` serve uses `first` to `last`; the gather is issued before use `issue`."""

    block: int
    issue: int
    first: int
    last: int
    backward: bool  # whether the first use is a backward
    opening: bool  # whether it is the first residency of this block in the step


def step_uses(num_blocks: int, num_micros: int) -> list[Use]:
    """Return the uses of one step in order."""
    forward = range(num_blocks)
    uses = []
    for micro in range(num_micros):
        uses += [Use(block, micro, backward=False) for block in forward]
        uses += [Use(block, micro, backward=True) for block in reversed(forward)]
    return uses


def residencies(blocks: Sequence[BlockSpec], num_micros: int, prefetch: int) -> list[Residency]:
    """Return the residencies of one step, ordered by first use."""
    uses = step_uses(len(blocks), num_micros)
    spans: list[list[int]] = []  # [block, first, last]
    newest: dict[int, list[int]] = {}
    for position, use in enumerate(uses):
        for block in (use.block, *blocks[use.block].borrows):
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
                backward=uses[first].backward,
                opening=block not in seen,
            )
        )
        seen.add(block)
    return result
