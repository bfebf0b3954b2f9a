"""Residencies of a block's full parameters in memory, and so the number of its gathers.

A step visits blocks in the order of its groups (terrace.plan.stage): at each visit all micro-batches of the group pass
the block. A *residency* is a run of visits that share one gather. Two visits share it when the block would still be
there at the moment its next gather had to be issued: with prefetch distance d that is when they are at most
max(1, d) visits apart. At the default distance of 1, the last block stays between its forward and its backward, and the
first block between the backward of one unit and the forward of the next. Where several micro-batches pass a chunk of
several blocks, all of these are there until the last one is through. The weight half of a backward reads no parameters
(terrace.runtime.linear), so it is no visit. Both the traffic formula and the program builder read this.

With one micro-batch a unit this is plain accumulation; with all of them in one unit, breadth-first (arXiv
2211.05953): blocks are gathered and gradients reduced once a unit, and its activations are kept at once.
"""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from terrace.model.spec import BlockSpec
from terrace.plan.flats import FlatParamSpec
from terrace.plan.plan import Plan
from terrace.plan.recompute import WHOLE, recomputed_parts
from terrace.plan.stage import Pass, Stage

_LAYERS = "layers.*"


@dataclass(frozen=True, slots=True)
class Visit:
    """A group passes a block. Visits are counted in the order in which the first micro-batch makes them.

    `number` is the visit's own, `until` the number of the visit during which the last micro-batch passes.
    """

    block: int
    backward: bool
    number: int
    until: int


@dataclass(frozen=True, slots=True)
class Residency:
    """The full parameters of `block` serve visits `first` to `last`; the gather is issued before visit `issue`.

    They are there until during visit `until`.
    """

    block: int
    issue: int
    first: int
    last: int
    until: int
    backward: bool  # whether the first visit is a backward
    opening: bool  # whether it is the first residency of this block in the step


def visits(stage: Stage) -> list[Visit]:
    """The visits of one step in order."""
    found: list[Visit] = []
    for group in stage.groups:
        # Weight gradients read no parameters.
        if group.pass_ is Pass.BACKWARD_WEIGHT:
            continue
        order = stage.traversal(group)
        begin, backward = len(found), group.pass_ is not Pass.FORWARD
        last = begin + len(order) - 1
        for offset, block in enumerate(order):
            # With several micro-batches the first block is needed again until the last of them has passed.
            until = begin + offset if len(group.micros) == 1 else last
            found.append(Visit(block, backward, begin + offset, until))
    return found


def residencies(stage: Stage, blocks: Sequence[BlockSpec], prefetch: int) -> list[Residency]:
    """The residencies of one step, ordered by first visit."""
    runs: list[list[Visit]] = []  # first and last visit
    owners: list[int] = []
    newest: dict[int, list[Visit]] = {}
    for visit in visits(stage):
        # A visit also needs the blocks it borrows from.
        for block in (visit.block, *blocks[visit.block].borrows):
            current = newest.get(block)
            # Freeing the block now would only force a second gather, so its stay is extended.
            if current is not None and visit.number - current[1].until <= max(1, prefetch):
                current[1] = visit
            else:
                newest[block] = [visit, visit]
                runs.append(newest[block])
                owners.append(block)
    seen: set[int] = set()
    result = []
    for block, (first, last) in zip(owners, runs, strict=True):
        result.append(
            Residency(
                block=block,
                issue=max(0, first.number - prefetch),
                first=first.number,
                last=last.number,
                until=last.until,
                backward=first.backward,
                # The first gather of a step reads the primary copy.
                opening=block not in seen,
            )
        )
        seen.add(block)
    return result


def gathers(
    stage: Stage, blocks: Sequence[BlockSpec], flats: Sequence[Sequence[FlatParamSpec]], prefetch: int
) -> list[Residency]:
    """The residencies that begin with a GATHER; `flats` are the flat buffers of every block.

    Parameters that are whole on every rank have none. A secondary copy that is whole is written by the first gather of
    a step and stays.
    """
    gathered = [any(flat.layout.gathers for flat in parts) for parts in flats]
    freed = [any(flat.layout.frees for flat in parts) for parts in flats]
    if not any(gathered):
        return []
    return [
        stay
        for stay in residencies(stage, blocks, prefetch)
        if gathered[stay.block] and (stay.opening or freed[stay.block])
    ]


def recomputed(plan: Plan, blocks: Sequence[BlockSpec]) -> frozenset[int]:
    """Indexes of the blocks whose backward runs their whole forward again."""
    parts = recomputed_parts(plan.recompute, blocks)
    return frozenset(index for index, each in enumerate(parts) if each == WHOLE)


def residual_patterns(blocks: Sequence[BlockSpec]) -> tuple[str, ...]:
    """Patterns for `recompute` of all blocks that work on the residual stream."""
    names = [block.name for block in blocks if not block.at_an_end]
    return (_LAYERS,) if all(fnmatch.fnmatchcase(name, _LAYERS) for name in names) else tuple(names)
