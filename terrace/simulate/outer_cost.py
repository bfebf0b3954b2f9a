"""Compute seconds of the outer loop: passes over a rank's slices in `plan.sums`.

Each function lists the operations of `terrace.runtime.outer_state` by the number of slices that each reads and writes.
Scaling of a change by its island's weight, on the lane, is omitted, as casts are: links are slower than memory.
"""

from collections.abc import Sequence

from terrace.cluster.cluster import Device
from terrace.plan.flats import FlatParamSpec
from terrace.plan.outer import Outer
from terrace.plan.wire import FORMATS
from terrace.simulate.kernels import stream_s

# Per 4 bytes: read, widened to 8, multiplied by an 8-byte index and summed. A pass each, whatever the caches.
_DIGEST = (4 + 8 + 8 + 24 + 8) // 4

_SUB = 3  # reads two, writes one
_COPY, _NORM = 2, 1


def take_passes(outer: Outer) -> list[int]:
    """Operations on a slice's change before it is sent: the change, its norm, the anchor's digest."""
    # If the next exchange starts when the last is applied, OUTER_APPLY has already computed the change.
    change = [] if outer.sends_last else [_SUB]
    return [*change, *([_COPY] if outer.delay else []), _NORM, _DIGEST]


def apply_passes(outer: Outer) -> list[int]:
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
    """Seconds of operations on the slices of a block's flat buffers that a rank owns."""
    trained = [flat for flat in flats if flat.trainable]
    owned = sum(flat.padded // flat.layout.span(flat.layout.optimizer) for flat in trained)
    num_bytes = owned * FORMATS[summed].element_bytes
    return stream_s(device, sum(passes) * num_bytes, len(passes) * len(trained))
