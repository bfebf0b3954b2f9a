"""Which boxes of whole parameters each rank holds in training and needs in generation. No tensors.

A rank keeps a range of a flat buffer. The buffer holds slices of parameters, padded if a dim does not divide:

    range of the buffer -> range of each parameter's slice -> boxes of the slice -> clip the padding and shift by the
    slice's start: boxes of the whole parameter

The result does not depend on the plan; checkpoints (terrace.checkpoint.parts) and the hand-over
(terrace.plan.hand_over) use it.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

from terrace.base.boxes import Box, cut, numel, overlap, shifted
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.flats import FlatParamSpec
from terrace.plan.hand_over import Parts
from terrace.plan.mesh import Mesh
from terrace.plan.slices import rank_slices, slice_blocks

Slices = Callable[[ParamSpec], tuple[slice, ...]]  # the slice of a whole parameter that a rank holds


class FlatBox(NamedTuple):
    """A box of a rank's slice of a parameter, contiguous in the flat buffer."""

    param: ParamSpec
    start: int  # its first element in the buffer
    padded: Box  # in the slice, padding included
    real: Box  # in the slice, without padding
    whole: Box  # `real` in the whole parameter


def flat_boxes(params: Sequence[ParamSpec], start: int, stop: int, slices: Slices) -> Iterator[FlatBox]:
    """Boxes of elements [start, stop) of the flat buffer of `params`, in order; pure padding is skipped."""
    last = 0
    for param in params:
        first, last = last, last + param.numel
        # Most parameters lie outside a small range.
        if last <= start or stop <= first:
            continue
        place = slices(param)
        # The slice without padding, which lies outside the whole parameter.
        real = tuple((0, part.stop - part.start) for part in place)
        at = max(start, first)
        for box in cut(param.shape, at - first, min(stop, last) - first):
            clipped = overlap(box, real)
            if clipped is not None:
                yield FlatBox(param, at, box, clipped, shifted(clipped, [part.start for part in place]))
            at += numel(box)


def training_parts(
    flats: Sequence[FlatParamSpec],
    mesh: Mesh,
    stages: Collection[int],
    source: Literal["params", "optimizer"] = "params",
) -> list[Parts]:
    """Boxes of a block's parameters that each rank holds after a step; empty outside `stages`.

    `source` "params": the working copies. "optimizer": the masters, of which a rank has fewer, but which need no
    refresh first; frozen parameters have no masters, so their working copies count.
    """
    found = list[Parts]()
    for rank in range(math.prod(map(math.prod, mesh.degrees))):
        own: dict[str, list[Box]] = {}
        for flat in flats if mesh.stage(rank) in stages else ():
            layout = flat.layout
            tier = layout.optimizer if source == "optimizer" and flat.trainable else layout.params
            part = layout.slice(tier, layout.coordinates(rank), flat.padded)
            slices = partial(rank_slices, mesh=mesh, rank=rank)
            for box in flat_boxes(flat.params, part.start, part.stop, slices):
                own.setdefault(box.param.name, []).append(box.whole)
        found.append(own)
    return found


def generation_slices(block: BlockSpec, rows: int) -> list[Parts]:
    """Boxes of a whole block that each of a replica's `rows` tensor ranks needs.

    Raises `PlanError` if `rows` cannot cut the block (terrace.plan.slices).
    """
    mesh = Mesh.build(1, rows=(rows,))
    (sliced,) = slice_blocks([block], mesh)
    found = list[Parts]()
    for row in range(rows):
        boxes = {
            param.name: tuple((part.start, part.stop) for part in rank_slices(param, mesh, row))
            for param in sliced.params
        }
        found.append({name: [box] for name, box in boxes.items() if numel(box)})
    return found
