"""Seconds of the outer loop's own computing: passes over a rank's slices in `plan.sums`.

Each function lists the operations of `terrace.runtime.outer_state`, as the number of slices that each reads and writes.
The scaling of a change by its island's weight, on the lane, is left out, as casts are: links are slower than memory.
"""

from collections.abc import Sequence

from terrace.cluster.cluster import Device
from terrace.plan.flats import FlatParamSpec
from terrace.plan.outer import Outer
from terrace.plan.wire import FORMATS
from terrace.simulate.kernels import stream_s

# Of 4 bytes: read, widened to 8, multiplied by 8 bytes of a place's number and added up. A pass each, caches or not.
_DIGEST = (4 + 8 + 8 + 24 + 8) // 4

_SUB = 3  # reads two, writes one
_COPY, _NORM = 2, 1


def take_passes(outer: Outer) -> list[int]:
    """Operations on the change of a slice before it is sent: the change, its norm, the anchor's digest."""
    # Where the next exchange starts as the last is applied, OUTER_APPLY leaves the change.
    change = [] if outer.sends_last else [_SUB]
    return [*change, *([_COPY] if outer.delay else []), _NORM, _DIGEST]


def apply_passes(outer: Outer) -> list[int]:
    """Operations of an OUTER_APPLY on a slice."""
    mean = [_COPY] * outer.penalty + [_NORM]  # divided in place, then its norm
    if outer.optimizer == "average":
        step = [_SUB]
    else:
        momentum = [_COPY, _SUB] + [_COPY] * (outer.clip > 0)
        step = [*momentum, *([_SUB, _SUB] if outer.optimizer == "nesterov" else [_SUB])]
    if not outer.delay:
        return [*mean, *step, _COPY]
    return [*mean, *step, _SUB, _NORM, _SUB, *([_COPY] if outer.sends_last else [])]


def passes_s(device: Device, flats: Sequence[FlatParamSpec], summed: str, passes: Sequence[int]) -> float:
    """Seconds of operations on the slices that a rank owns of the flat buffers of a block."""
    trained = [flat for flat in flats if flat.trainable]
    owned = sum(flat.padded // flat.layout.span(flat.layout.optimizer) for flat in trained)
    num_bytes = owned * FORMATS[summed].element_bytes
    return stream_s(device, sum(passes) * num_bytes, len(passes) * len(trained))
