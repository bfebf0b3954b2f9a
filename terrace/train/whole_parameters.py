"""Whole parameters, gathered from the ranks of an engine."""

from collections.abc import Iterator

import torch
from torch import Tensor

from terrace.base.boxes import Box, whole, within
from terrace.checkpoint.parts import parts_of, slices_of
from terrace.runtime.engine import Engine


def whole_values(engine: Engine) -> Iterator[tuple[str, str, Tensor]]:
    """(block, parameter, value) of the whole model on every rank: CPU tensors, in the master dtype if trained.

    With islands these are the anchor, which every island has after `Engine.finish`.
    Every rank calls this and consumes all of it. One block is in flight at a time: each rank sends the boxes that it is
    the first to hold, as for a checkpoint.
    """
    # Refreshes of the last step may still write parameters.
    engine.drain()
    slices = slices_of(engine.program.mesh, engine.rank)
    for index, spec in enumerate(engine.state.specs):
        boxes: list[tuple[str, Box]] = []
        values: list[Tensor] = []
        # Only the first holder of a box sends it, so nothing travels twice.
        for _, part in parts_of(engine.state.flats.get(index, ()), slices, first=True, own=False):
            value = next(iter(part.values.values()))  # the first kind of state is the value
            boxes.append((part.parameter, part.box))
            values.append(value.detach().to("cpu", copy=True))
        found: dict[str, Tensor] = {}
        shapes = {param.name: param.shape for param in spec.params}
        # Boxes of all ranks together tile each parameter.
        everywhere = zip(engine.comm.exchange(boxes), engine.comm.exchange_tensors(values), strict=True)
        for boxes_there, values_there in everywhere:
            for (name, plain), value in zip(boxes_there, values_there, strict=True):
                box = tuple((begin, end) for begin, end in plain)
                if name not in found:
                    found[name] = torch.empty(shapes[name], dtype=value.dtype)
                found[name][within(box, whole(shapes[name]))].copy_(value)
        for name, shape in shapes.items():
            yield spec.name, name, found.get(name, torch.empty(shape))  # one without elements is nobody's
