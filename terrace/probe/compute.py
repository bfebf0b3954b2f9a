"""Compute of one rank: matrix products, passes over memory, attention, whole layers, the optimizer.

Shape legend: B batch, S sequence, N heads, D head_dim.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.comm.collectives import DTYPES
from terrace.model.block_operations import layer_operations
from terrace.model.decoder import build_blocks
from terrace.model.init import initialise
from terrace.probe.fit import AttentionSample, GemmSample, LayerSample, OptimizerSample, PassSample
from terrace.probe.grid import (
    LayerShape,
    Shape,
    attention_sequences,
    gemm_shapes,
    layer_shapes,
    orientations,
    smallest_layer,
)
from terrace.probe.timing import Stopwatch
from terrace.runtime.adamw import ShardedAdamW
from terrace.runtime.compiled import compile_blocks, reason_of
from terrace.runtime.norm import squared_norm
from terrace.runtime.settings import OptimizerConfig
from terrace.simulate.work import Work

COMPUTE = ("fp32", "bf16")  # the dtypes that training computes in

# The dtype of layers and attention: flash kernels on CUDA have no fp32.
TRAINS_IN: dict[str, Literal["fp32", "bf16"]] = {"cpu": "fp32", "cuda": "bf16"}
# Backend of torch.compile for whole layers, the default of `train.compile`.
COMPILES_BY: dict[str, str | None] = {"cpu": None, "cuda": "inductor"}

_FIRST_CUBE, _LAST_CUBE = 256, 8192  # grown until one takes long enough to tell how large the shapes may be
_QUICK = 1 / 8  # of the largest shape's time: a quicker cube is mostly launch
_CALLS_A_LOOP = 8  # of the largest shape
_NUM_SHAPES = 8  # of each dtype, in three orientations
_LARGE_BYTES = {"cpu": (8 << 20, 32 << 20), "cuda": (256 << 20, 1 << 30)}  # beyond the caches
_NORM_ROWS = {"cpu": (256, 1024, 4096), "cuda": (4096, 16384, 65536)}
_NORM_WIDTH = {"cpu": 256, "cuda": 4096}
_NUM_LAYERS = 6  # shapes of whole layers
_NUM_COMPILED = 4  # each is compiled anew, in seconds
_NUM_SHARDS = 6  # an optimizer step updates one shard a block
_SHARD_NUMELS = {"cpu": (4096, 65536, 524288), "cuda": (1 << 20, 1 << 24, 1 << 26)}

Say = Callable[[str], None]


def measure_gemms(watch: Stopwatch, budget_s: float, say: Say) -> list[GemmSample]:
    """Time the matrix products of layers in every dtype and orientation, sized by the device's speed."""
    each_s = budget_s / (len(COMPUTE) * 3 * _NUM_SHAPES + len(COMPUTE))
    samples = []
    for dtype in COMPUTE:
        say(f"matrix products in {dtype}")
        limit_s = each_s / _CALLS_A_LOOP
        cube = _FIRST_CUBE
        first = _gemm(watch, dtype, (cube, cube, cube), 0, each_s)
        # Double the cube until it runs long enough for its FLOP/s to be trusted.
        while first.seconds < _QUICK * limit_s and cube < _LAST_CUBE:
            cube *= 2
            first = _gemm(watch, dtype, (cube, cube, cube), 0, each_s)
        samples.append(first)
        limit = first.flops_per_s * limit_s
        for shape in gemm_shapes(limit, _NUM_SHAPES):
            samples += [_gemm(watch, dtype, each, way, each_s) for way, each in enumerate(orientations(shape))]
    return samples


def measure_passes(watch: Stopwatch, budget_s: float, say: Say) -> tuple[list[PassSample], list[PassSample], float]:
    """Time passes over memory.

    Returns copies and additions that exceed the caches, norms, and seconds of the smallest operation.
    """
    say("memory")
    kind, device = watch.device.type, watch.device
    each_s = budget_s / (2 * len(_LARGE_BYTES[kind]) + len(_NORM_ROWS[kind]) + 1)
    copies, norms = [], []
    for size in _LARGE_BYTES[kind]:
        a, b = (torch.zeros(size // 4, device=device) for _ in range(2))
        copies.append(PassSample(num_bytes=2 * size, seconds=watch.seconds(partial(a.copy_, b), each_s)))
        copies.append(PassSample(num_bytes=3 * size, seconds=watch.seconds(partial(a.add_, b), each_s)))
    width = _NORM_WIDTH[kind]
    weight = torch.ones(width, device=device)
    for rows in _NORM_ROWS[kind]:
        x = torch.randn(rows, width, device=device)
        norm = partial(F.rms_norm, x, weight.shape, weight, 1e-5)
        norms.append(PassSample(num_bytes=2 * x.nbytes, seconds=watch.seconds(norm, each_s)))
    one = torch.zeros(1, device=device)
    return copies, norms, watch.seconds(partial(one.add_, one), each_s)


def measure_attention(watch: Stopwatch, flops_per_s: float, budget_s: float, say: Say) -> list[AttentionSample]:
    """Time causal attention, forward and backward, over growing sequences."""
    say("attention")
    name = TRAINS_IN[watch.device.type]
    batch, heads, head_dim = (1, 4, 64) if watch.device.type == "cpu" else (4, 16, 128)
    limit = flops_per_s * budget_s / (6 * 3 * _CALLS_A_LOOP)
    lengths = attention_sequences(limit, batch, heads, head_dim)
    each_s = budget_s / (2 * len(lengths))
    samples = []
    for length in lengths:
        sizes = (batch, heads, length, head_dim)  # (B, N, S, D)
        query, key, value = (
            torch.randn(sizes, device=watch.device, dtype=DTYPES[name], requires_grad=True) for _ in range(3)
        )
        attend = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True)
        forward_s, backward_s = watch.both_ways(attend, each_s)
        shape = {"batch": batch, "heads": heads, "head_dim": head_dim, "sequence": length}
        samples.append(AttentionSample(dtype=name, forward_s=forward_s, backward_s=backward_s, **shape))
    return samples


def measure_layers(
    watch: Stopwatch, flops_per_s: float, budget_s: float, say: Say, backend: str | None = None
) -> tuple[list[LayerSample], float]:
    """Time whole decoder layers, forward and backward, and the host launches of the smallest one.

    With a `backend` of torch.compile they are compiled, which takes seconds beyond the budget; if compilation fails,
    this is reported and they run uncompiled.
    """
    say("layers" if backend is None else "layers, compiled")
    backend = _working(watch, backend, say)
    layer, x = _layer(watch.device, smallest_layer(), backend)
    host_s = watch.host_seconds(lambda: layer(x))
    number = _NUM_LAYERS if backend is None else _NUM_COMPILED
    shapes = layer_shapes(flops_per_s * budget_s / (_NUM_LAYERS * 3 * _CALLS_A_LOOP), number)
    each_s = budget_s / (2 * len(shapes))
    samples = []
    for config, sequence, micro_batch in shapes:
        operations = layer_operations(config)
        if backend is not None:  # a sign of life for the watchdog, since each may take half a minute
            say(f"a layer of {operations.hidden.numel} on {micro_batch} x {sequence} tokens, compiled")
        layer, x = _layer(watch.device, (config, sequence, micro_batch), backend)
        forward_s, backward_s = watch.both_ways(partial(layer, x), each_s)
        work = Work(layer=operations, sequence=sequence, micro_batch=micro_batch, compute=TRAINS_IN[watch.device.type])
        samples.append(LayerSample(work=work, forward_s=forward_s, backward_s=backward_s))
    return samples, host_s


def _working(watch: Stopwatch, backend: str | None, say: Say) -> str | None:
    """The backend if it compiles the smallest layer on every rank; else None, on all ranks."""
    if backend is None:
        return None
    try:
        layer, x = _layer(watch.device, smallest_layer(), backend)
        layer(x).sum().backward()
        problem = ""
    except Exception as error:  # whatever a compiler, a linker or a missing header makes of it
        problem = reason_of(error)
    if not watch.largest(1.0 if problem else 0.0):
        return backend
    say(f"layers that are not compiled: torch.compile does not work here ({problem or 'on another rank'})")
    return None


def measure_optimizer(watch: Stopwatch, budget_s: float, say: Say) -> list[OptimizerSample]:
    """Time the runtime's optimizer step: norm, clipping scale and AdamW over the shards of a few blocks."""
    say("the optimizer")
    numels = _SHARD_NUMELS[watch.device.type]
    samples = []
    for numel in numels:
        gradients = [torch.full((numel,), 1e-3, device=watch.device) for _ in range(_NUM_SHARDS)]
        masters = [torch.zeros(numel, device=watch.device) for _ in range(_NUM_SHARDS)]
        pairs = zip(masters, gradients, strict=True)
        updates = [ShardedAdamW(master, gradient, numel, OptimizerConfig()) for master, gradient in pairs]

        def step(gradients: list[Tensor] = gradients, updates: list[ShardedAdamW] = updates) -> None:
            norm = torch.stack([squared_norm(gradient) for gradient in gradients]).sum().sqrt()
            scale = (1.0 / (norm + 1e-6)).clamp(max=1.0)
            for gradient, update in zip(gradients, updates, strict=True):
                gradient.mul_(scale.to(gradient.dtype))
                update.update(1e-6)

        seconds = watch.seconds(step, budget_s / len(numels))
        samples.append(OptimizerSample(num_shards=_NUM_SHARDS, numel=numel, seconds=seconds))
    return samples


def layer_passes(watch: Stopwatch, shape: LayerShape) -> Callable[[], None]:
    layer, x = _layer(watch.device, shape)

    def both() -> None:
        output = layer(x)
        torch.autograd.backward(output, torch.ones_like(output))

    return both


def _gemm(watch: Stopwatch, name: str, shape: Shape, way: int, budget_s: float) -> GemmSample:
    # `way`: 0 forward, 1 gradient of the input, 2 gradient of the weight. Operands have autograd's layouts: a weight is
    # (out, in), and each gradient reads one of them transposed.
    m, k, n = shape
    sizes: tuple[tuple[int, int], tuple[int, int]] = (((m, k), (n, k)), ((m, k), (k, n)), ((k, m), (k, n)))[way]
    a, b = (torch.randn(size, device=watch.device, dtype=DTYPES[name]) for size in sizes)
    left, right = (a.t() if way == 2 else a), (b.t() if way == 0 else b)
    seconds = watch.seconds(lambda: torch.mm(left, right), budget_s)
    return GemmSample(dtype=name, m=m, k=k, n=n, seconds=seconds)


def _layer(device: torch.device, shape: LayerShape, backend: str | None = None) -> tuple[nn.Module, Tensor]:
    config, sequence, micro_batch = shape
    blocks = build_blocks(config)
    dtype = DTYPES[TRAINS_IN[device.type]]
    initialise(blocks, config, 0, dtype, device)
    x = torch.randn(
        (micro_batch, sequence, layer_operations(config).hidden.numel), device=device, dtype=dtype, requires_grad=True
    )
    if backend is not None:
        blocks[1](x)  # makes the tables of RoPE, which would be a graph of their own
        torch.compiler.reset()  # or the next shape is compiled for any sizes
        compile_blocks([blocks[1]], backend)
    return blocks[1], x
