"""Boxes of whole parameters that each rank holds in training and needs in generation. No tensors."""

import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import Literal

from terrace.base.boxes import Box, numel
from terrace.model.spec import BlockSpec
from terrace.plan.flats import FlatParamSpec
from terrace.plan.holdings import flat_boxes
from terrace.plan.mesh import Mesh
from terrace.plan.slices import rank_slices, slice_blocks
from terrace.rl.hand_over.moves import Parts


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
