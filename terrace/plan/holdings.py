"""Which boxes of whole parameters a range of a flat buffer holds. No tensors.

A rank keeps a range of a flat buffer. The buffer holds slices of parameters, padded if a dim does not divide:

    range of the buffer -> range of each parameter's slice -> boxes of the slice -> clip the padding and shift by the
    slice's start: boxes of the whole parameter

The result does not depend on the plan, so checkpoints (terrace.checkpoint.parts) of one plan can be read under another.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from terrace.base.boxes import Box, cut, numel, overlap, shifted
from terrace.model.params import ParamSpec

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
