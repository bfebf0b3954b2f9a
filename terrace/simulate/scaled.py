"""Seconds of products in 8-bit floats, with the passes that quantise their operands (terrace.runtime.scaled_products).

A product of (m, k) and (k, n) has the share of the fp8 peak that its shape has of any other, which no run on hardware
has confirmed; it reads a byte an element and writes e bytes, those of the compute dtype. An operand of p elements
takes, in bytes,

    GPU    e for the largest magnitude; e + 1 for the codes; 2 more where it is transposed
    CPU    3e and e + 9 for the same, operator by operator; 5 for the codes in fp32; 2 more where it is transposed

and a weight that is held as codes nothing but what follows them: 0 on a GPU, 5 on a CPU, and 2 where it is transposed,
and a weight gradient is copied into its place, 2e an element, where nothing is added there. Query, key and value
quantise their input each by itself, and so do gate and up. On a CPU the product itself is one in fp32.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from terrace.cluster.cluster import Device
from terrace.plan.wire import FORMATS
from terrace.simulate.kernels import gemm_s, gemm_share, memory_s, peak_flops_per_s, stream_s

_KERNELS = 2  # of a quantisation: a reduction, and the codes


class Matrices(NamedTuple):
    """Matrices (inputs, outputs) side by side that multiply the same tokens: `number` of them."""

    tokens: int
    inputs: int
    outputs: int
    number: int


def scaled_seconds(
    device: Device, products: Sequence[Matrices], compute: str, coded: bool = False, *, accumulate: bool
) -> tuple[float, float, float]:
    """Seconds of products, of their input gradients and of their weight gradients; `coded`: weights are codes."""
    forward_s = input_s = weight_s = 0.0
    item = FORMATS[compute].element_bytes
    for m, k, n, number in products:
        tokens, weights, results = number * m * k, k * n, m * n
        quantised_s = partial(_quantised_s, device, number=number, compute=compute)
        forward_s += _product_s(device, m, k, n, compute) + quantised_s(tokens, weights, 0, coded)
        input_s += _product_s(device, m, n, k, compute) + quantised_s(results, weights, 1, coded)
        weight_s += _product_s(device, k, m, n, compute) + quantised_s(results, tokens, 2)
        if not accumulate:
            weight_s += stream_s(device, 2 * item * weights)
    return forward_s, input_s, weight_s


def launches(products: Sequence[Matrices], of_a_layer: int, coded: bool = False) -> float:
    """Kernels that the host launches for a layer, over those of the layer without quantisations."""
    return 1 + (1 if coded else 2) * _KERNELS * sum(each.number for each in products) / of_a_layer


def _product_s(device: Device, m: int, k: int, n: int, compute: str) -> float:
    if device.backend == "cpu":
        return gemm_s(device, m, k, n, 1, "fp32")
    share = gemm_share(device, m, k, n)
    compute_s = 2.0 * m * k * n / (peak_flops_per_s(device, "fp8") * share * device.pace)
    moved = m * k + k * n + FORMATS[compute].element_bytes * m * n
    return max(compute_s, stream_s(device, moved, 0)) + device.kernels.launch_s


def _quantised_s(
    device: Device,
    left: int,
    right: int,
    num_transposed: int,
    coded: bool = False,
    *,
    number: int,
    compute: str,
) -> float:
    """Seconds to quantise both operands, of `left` and `right` elements; the last of them are transposed.

    `coded`: the right one is codes already.
    """
    item = FORMATS[compute].element_bytes
    each, decoding = (2 * item + 1, 0) if device.backend != "cpu" else (4 * item + 14, 5)
    turned = 2 * ((right if num_transposed else 0) + (left if num_transposed == 2 else 0))
    moved = each * left + (decoding if coded else each) * right + turned
    return memory_s(device, moved, number * ((1 if coded else 2) * _KERNELS + num_transposed))
