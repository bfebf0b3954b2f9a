"""Residencies of a block's full parameters in memory, which determine the number of gathers.

A step visits blocks in the order of its groups (terrace.plan.stage): on each visit all micro-batches of the group pass
the block. A *residency* is a run of visits that share one gather. Two visits share it if the block would still be
resident when its next gather had to be issued: with prefetch distance d, if they are at most max(1, d) visits apart. At
the default distance of 1, the last block stays resident between its forward and its backward, and the first block
between the backward of one unit and the forward of the next. If several micro-batches pass a chunk of several blocks,
all of its blocks stay resident until the last micro-batch has passed. The weight half of a backward reads no parameters
(terrace.runtime.linear), so it is not a visit. Both the traffic formula and the program builder use this.

One micro-batch per unit is plain gradient accumulation; all micro-batches in one unit is breadth-first (arXiv
2211.05953): one gather and one reduction per unit, with the activations of the whole unit kept at once.
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
    """A pass of a group through a block, numbered in the order of the group's first micro-batch.

    `until` is the number of the visit during which the last micro-batch passes this block.
    """

    block: int
    backward: bool
    number: int
    until: int


@dataclass(frozen=True, slots=True)
class Residency:
    """The full parameters of `block` serve visits `first` to `last`.

    The gather is issued before visit `issue`; the parameters are freed during visit `until`.
    """

    block: int
    issue: int
    first: int
    last: int
    until: int
    backward: bool  # whether the first visit is a backward
    opening: bool  # whether it is the first residency of this block in the step


def visits(stage: Stage) -> list[Visit]:
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
        # A visit also needs the blocks that it is tied to.
        for block in (visit.block, *blocks[visit.block].tied_to):
            current = newest.get(block)
            # Freeing the block now would force a second gather at once, so extend its residency.
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

    Parameters that are whole on every rank have none. With a whole secondary copy, only the first gather of a step is
    needed, which writes the copy.
    """
    # Equal blocks mostly share their flat buffers.
    distinct = {id(parts): parts for parts in flats}
    gathered = {key for key, parts in distinct.items() if any(flat.layout.gathers for flat in parts)}
    freed = {key for key, parts in distinct.items() if any(flat.layout.frees for flat in parts)}
    if not gathered:
        return []
    return [
        residency
        for residency in residencies(stage, blocks, prefetch)
        if id(flats[residency.block]) in gathered and (residency.opening or id(flats[residency.block]) in freed)
    ]


def recomputed(plan: Plan, blocks: Sequence[BlockSpec]) -> frozenset[int]:
    """Indexes of the blocks that are recomputed whole."""
    parts = recomputed_parts(plan.recompute, blocks)
    return frozenset(index for index, each in enumerate(parts) if each == WHOLE)


def residual_patterns(blocks: Sequence[BlockSpec]) -> tuple[str, ...]:
    """`recompute` patterns that match all blocks except embedding and head."""
    names = [block.name for block in blocks if not block.at_an_end]
    return (_LAYERS,) if all(fnmatch.fnmatchcase(name, _LAYERS) for name in names) else tuple(names)
