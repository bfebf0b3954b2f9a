"""Seconds of measuring the largest attention score of each head (terrace.runtime.scores)."""

import math

from terrace.cluster.cluster import Device
from terrace.plan.score_clip import MOST_SCORES, part_rows
from terrace.plan.wire import FORMATS
from terrace.simulate.kernels import gemm_s, memory_s
from terrace.simulate.masks import causal_pairs
from terrace.simulate.work import Work

_PART_KERNELS = 8  # of a part of the scores besides its product, most of them for its mask
_IN_CACHE = 0.5  # seconds of a pass over scores that fit a CPU's cache, relative to memory; a guess


def scores_s(device: Device, work: Work) -> float:
    """Seconds in which a forward measures the largest score of each head (terrace.runtime.scores): a product, and
    4 passes over the scores, of the product, the mask (2) and the maximum.
    """
    core, item = work.layer.core, FORMATS[work.compute].element_bytes
    if not work.measures_scores or not core.heads:
        return 0.0
    heads, length = work.attended_heads, math.ceil(work.attended / work.micro_batch)
    keys = min(length, core.window or length)
    rows = min(length, part_rows(keys // 2, MOST_SCORES[device.type] // heads))
    scores = work.micro_batch * heads * causal_pairs(work.sequence, core.window) / work.num_ring_ranks
    parts = scores / (heads * rows * keys)
    passes = 4 * item * heads * rows * keys * (_IN_CACHE if device.type == "cpu" else 1)
    product_s = gemm_s(device, rows, core.head_dim, keys, heads, work.compute)
    return parts * (product_s + memory_s(device, passes, _PART_KERNELS))
