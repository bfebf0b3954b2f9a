"""Seconds of a block's kernels that another software than this runtime has (terrace.cluster.named_software).

Every function returns what the device's software adds to a price of this runtime, or takes from it; nothing where it is
this runtime. Bytes are those of the operations that a rank computes, so a layer without attention, or a head without
logits, pays for neither.
"""

import math
from collections.abc import Sequence

from terrace.cluster.device import Device
from terrace.model.operations import Enter, Norm, Operations, Product
from terrace.plan.wire import FORMATS
from terrace.simulate.kernels import gemm_s, memory_s
from terrace.simulate.masks import core_keys
from terrace.simulate.scaled import product_s
from terrace.simulate.work import Work

Seconds = tuple[float, float, float]  # of a forward, of input gradients, of weight gradients
Shape = tuple[int, int, int]  # of a product: (tokens, inputs, outputs)
NOTHING: Seconds = (0.0, 0.0, 0.0)


def layer_more_s(device: Device, work: Work) -> Seconds:
    """Seconds that the passes of a layer with attention take beyond this runtime's."""
    form = device.software.kernels
    if not work.layer.core.heads:
        return NOTHING
    forward_s, input_s = core_more_s(device, work)
    if form.dropout:
        both = work.tokens * 2 * work.layer.hidden.numel / work.stream_cut  # a byte of mask for each residual sum
        forward_s += memory_s(device, both, 0)
        input_s += memory_s(device, both, 0)
    if form.joins:
        stream = FORMATS[work.compute].element_bytes * work.tokens * work.layer.hidden.numel
        input_s += memory_s(device, 2 * 3 * stream)
    return forward_s, input_s, 0.0


def core_more_s(device: Device, work: Work) -> tuple[float, float]:
    """Seconds that attention takes beyond this runtime's, forward and backward.

    Dropout reads and writes the scores once more, with a byte of mask. A bias of queries, keys and values in a kernel
    of its own moves as many bytes as this runtime, which adds it inside the product, moves to lay them out; what is
    left is the layout of the output.
    """
    form, item, forward_s, backward_s = device.software.kernels, FORMATS[work.compute].element_bytes, 0.0, 0.0
    head, core = work.tokens * item * work.layer.core.head_dim, work.layer.core
    if form.dropout and not work.flash:
        keys, _ = core_keys(work, device.type)
        scores = work.micro_batch * work.attended_heads * math.ceil(work.attended / work.micro_batch) * keys
        forward_s = backward_s = memory_s(device, (2 * item + 1) * scores)
    if form.bias_apart and core.heads:
        forward_s += memory_s(device, 2 * head * work.attended_heads)
    if form.transposes and work.micro_batch > 1:  # one row lies as it is asked for
        moved = memory_s(device, 2 * head * (2 * work.attended_heads + 2 * work.attended_kv_heads), 4)
        forward_s, backward_s = forward_s + moved, backward_s + moved
    return forward_s, backward_s


def saved_s(device: Device, work: Work) -> float:
    """Seconds that a whole layer's recomputation leaves out: its last product, and the sum after it."""
    layer, form = work.layer, device.software.kernels
    if not form.stops_early or not layer.core.heads or not (products := layer.of(Product)):
        return 0.0
    down = products[-1]
    stream = 3 * FORMATS[work.compute].element_bytes * work.numel(down.target)
    shape = work.tokens, work.width(down.inputs), work.width(down.outputs)
    return gemm_s(device, *shape, 1, work.compute) + memory_s(device, stream)


def loss_passes_s(device: Device, work: Work, num_logits: float, own_s: float) -> tuple[float, float]:
    """Seconds of passes over logits, forward and backward; `own_s` are this runtime's, each way."""
    if not (form := device.software.kernels.loss):
        return own_s, own_s
    wider = FORMATS[work.compute].element_bytes / FORMATS["bf16"].element_bytes
    forward_s, backward_s = (memory_s(device, size * wider * num_logits, kernels) for size, kernels in form)
    return forward_s, backward_s


def scaled_s(device: Device, work: Work, groups: Sequence[Sequence[Product]], products: Sequence[Shape]) -> Seconds:
    """Seconds of a layer's products in 8 bits with Transformer Engine's passes; `products` are those of `groups`.

    Bytes of an element: a cast reads 2 and writes 1, and 1 more for a transposed copy, which Hopper needs of all
    operands of weight gradients. Inputs that no norm makes and all gradients of results are cast. With scales of
    earlier steps a norm writes codes, 1 byte less, and the backward transposes them, 2. With scales of the tensors as
    they are a norm's output is cast, too, and a largest magnitude costs 2, except that of a norm, whose kernel has it.
    Weights are cast once a step.
    """
    turned, current = turns(device), device.software.kernels.scales == "current"
    cast, largest, normed = 3 + turned, 2 * current, _normed(work.layer)
    forward = weight = 0.0
    kernels = [0, len(products), 0]
    for group, (_, inputs, _) in zip(groups, products, strict=True):
        if group[0].source.name in normed:
            forward += (cast if current else -1) * inputs / work.stream_cut
            weight += 0 if current else 2 * turned * inputs
            kernels[2] += 1
        else:
            forward += (cast + largest) * inputs
            kernels[0] += 1
    backward = (cast + largest) * sum(outputs for _, _, outputs in products)
    moved = zip((forward, backward, weight), kernels, strict=True)
    shapes = (
        products,
        [(tokens, outputs, inputs) for tokens, inputs, outputs in products],
        [(inputs, tokens, outputs) for tokens, inputs, outputs in products],
    )
    found = [memory_s(device, work.tokens * size, number) for size, number in moved]
    forward_s, input_s, weight_s = (
        pass_s + sum(product_s(device, *each, work.compute) for each in multiplied)
        for pass_s, multiplied in zip(found, shapes, strict=True)
    )
    return forward_s, input_s, weight_s


def casts(device: Device, groups: Sequence[Sequence[Product]], layer: Operations) -> int:
    """Kernels of a forward that quantise for the products of `scaled_s`."""
    current, normed = device.software.kernels.scales == "current", _normed(layer)
    by_norms = sum(group[0].source.name in normed for group in groups)
    return (len(groups) - by_norms) * (1 + current) + by_norms * current


def turns(device: Device) -> int:
    """1 where products in fp8 need operands with the inner dim last, as on Hopper; else 0."""
    return int(any(name in device.name for name in ("H100", "H200", "H800", "GH200")))


def _normed(layer: Operations) -> set[str]:
    """Names of the tensors that norms make, also after tensor ranks have gathered them."""
    found = {norm.target.name for norm in layer.of(Norm)}
    return found | {enter.target.name for enter in layer.of(Enter) if enter.source.name in found}
