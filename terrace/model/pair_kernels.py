"""Kernels for attention of queries over a part of their keys, which also return the log-sum-exp of the scores (lse).

The forward of a kernel returns output and lse over the part; the backward is given both over *all* keys (derivation in
terrace.model.blockwise). There are three kernels:

    plain    torch products over a few queries at a time, in fp32 (fp64 for fp64): the reference
    flash    torch's flash attention on a CPU or on CUDA, through private operators. On a CPU without bf16 products in
             oneDNN it is given fp32, since its fallback loops are slow
    cudnn    cuDNN attention, which torch uses from Hopper on, also through private operators

Each pair uses the first kernel that accepts it, plain products last. A kernel that raises leaves the pair to the next
one, with a warning: private operators may change between versions of torch, and cuDNN does not support all shapes. It
builds a graph for every new shape, which takes milliseconds, so it only gets lengths that are likely to repeat;
documents go to flash attention. Tests hold every kernel to the reference. `describe` names the kernels in use.

Shape legend: B batch, N query heads, K key-value heads, G = N / K, D head_dim, L queries, M keys, R queries at a time.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from terrace.accelerator import compute_capability, has_streams
from terrace.base.errors import first_line
from terrace.model.attention import suits_plain_products

KINDS = ("full", "causal", "mask")

# Scores that plain products compute at a time: 4 MB in fp32, about the cache of one core.
_MAX_SCORES = 1 << 20

# cuDNN's backward supports head sizes up to 128 on all devices from Hopper on; larger ones use flash attention 2.
CUDNN_HEAD, _HOPPER = 128, (9, 0)
# Multiples of this are assumed to be lengths that repeat: shards of whole rows are, documents rarely.
CUDNN_LENGTHS = 128

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_Result = TypeVar("_Result")


class PairInputs(NamedTuple):
    """Queries (B, N, L, D), keys and values (B, K, M, D), a kind, and for "mask" an additive `mask` (L, M)."""

    query: Tensor
    key: Tensor
    value: Tensor
    kind: str
    mask: Tensor | None = None


Gradients = tuple[Tensor, Tensor, Tensor]  # of query, key and value
Forward = Callable[[PairInputs], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, PairInputs, Tensor, Tensor], Gradients]


@dataclass(frozen=True)
class Kernel:
    """Implementation of `terrace.model.blockwise.pair_forward` and `pair_backward`; shapes are given there."""

    name: str
    forward: Forward
    backward: Backward
    takes: Callable[[PairInputs], bool]  # whether it accepts a pair


def precise(dtype: torch.dtype) -> torch.dtype:
    """Accumulation dtype: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def without_infinity(lse: Tensor) -> Tensor:
    """Replace -inf in `lse` (queries that see no key) by 0, so that their weights are exp(-inf - 0) = 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def side_by_side(like: Tensor, dtype: torch.dtype | None = None, shape: Sequence[int] | None = None) -> Tensor:
    """Uninitialised (B, N, L, D) with the heads of a token contiguous in memory; defaults from `like`."""
    batch, heads, length, size = like.shape if shape is None else shape
    return like.new_empty((batch, length, heads, size), dtype=dtype).transpose(1, 2)


def _spans(query: Tensor, num_keys: int) -> Iterator[slice]:
    length = query.shape[2]
    # Bounds the memory of the scores.
    step = max(1, _MAX_SCORES // max(1, query.shape[0] * query.shape[1] * num_keys))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _grouped(part: Tensor, span: slice, num_kv_heads: int) -> Tensor:
    # Query heads that share a key-value head become rows of one product.
    rows = part[:, :, span].to(precise(part.dtype))
    return rows.reshape(rows.shape[0], num_kv_heads, -1, rows.shape[3])


def _scores(query: Tensor, key: Tensor, kind: str, mask: Tensor | None, span: slice) -> Tensor:
    num = span.stop - span.start
    scores = query @ key.transpose(2, 3)
    scores = scores.view(*scores.shape[:2], -1, num, scores.shape[3])
    if kind == "causal":
        # Only keys up to the span's end were passed, so the mask starts after the span's first query.
        beyond = torch.full((num, key.shape[2]), -torch.inf, dtype=scores.dtype, device=scores.device)
        scores += beyond.triu_(span.start + 1)
    elif mask is not None:
        scores += mask[span]
    return scores


def plain_forward(pair: PairInputs) -> tuple[Tensor, Tensor]:
    query, key, value, kind, mask = pair
    dtype = precise(query.dtype)
    keys, values = key.to(dtype), value.to(dtype)
    out = side_by_side(query, query.dtype)
    lse = query.new_empty(query.shape[:3], dtype=dtype)
    scale = 1.0 / math.sqrt(query.shape[3])
    for span in _spans(query, key.shape[2]):
        seen = span.stop if kind == "causal" else key.shape[2]
        # Scaling queries is cheaper than scaling scores.
        queries = _grouped(query, span, key.shape[1]) * scale
        scores = _scores(queries, keys[:, :, :seen], kind, mask, span)
        sums = scores.logsumexp(-1, keepdim=True)  # (B, K, G, R, 1)
        # A query that sees no key has weights exp(-inf - 0) = 0, not NaN.
        weights = scores.sub_(without_infinity(sums)).exp_().flatten(2, 3)  # (B, K, G R, seen)
        out[:, :, span] = (weights @ values[:, :, :seen]).view(out[:, :, span].shape)
        lse[:, :, span] = sums.flatten(1, 2).squeeze(-1)
    return out, lse


def plain_backward(grad_out: Tensor, pair: PairInputs, out: Tensor, lse: Tensor) -> Gradients:
    query, key, value, kind, mask = pair
    dtype, heads = precise(query.dtype), key.shape[1]
    keys, values = key.to(dtype), value.to(dtype)
    # With delta and lse over all keys, the gradients of pairs are independent: see terrace.model.blockwise.
    delta = (grad_out.to(dtype) * out).sum(-1, keepdim=True)  # (B, N, L, 1)
    sums = without_infinity(lse).unsqueeze(-1)
    grad_query = side_by_side(query, query.dtype)
    # Accumulated over spans, hence in wide precision.
    grad_key, grad_value = (side_by_side(key, dtype).zero_() for _ in range(2))
    scale = 1.0 / math.sqrt(query.shape[3])
    for span in _spans(query, key.shape[2]):
        seen = span.stop if kind == "causal" else key.shape[2]
        queries = _grouped(query, span, heads) * scale
        grads = _grouped(grad_out, span, heads)
        scores = _scores(queries, keys[:, :, :seen], kind, mask, span).flatten(2, 3)  # (B, K, G R, seen)
        weights = scores.sub_(_grouped(sums, span, heads)).exp_()
        # The algebra of terrace.model.blockwise: dv = p g, ds = p (g . v - delta).
        grad_value[:, :, :seen] += weights.transpose(2, 3) @ grads
        of_scores = grads @ values[:, :, :seen].transpose(2, 3)
        of_scores.sub_(_grouped(delta, span, heads)).mul_(weights)
        grad_key[:, :, :seen] += of_scores.transpose(2, 3) @ queries
        grad_query[:, :, span] = (of_scores @ keys[:, :, :seen]).mul_(scale).view(grad_query[:, :, span].shape)
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


def _cpu_forward(pair: PairInputs) -> tuple[Tensor, Tensor]:
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(*pair[:3], 0.0, pair.kind == "causal", attn_mask=pair.mask)
    if pair.mask is not None:  # the kernel returns 0 for queries that see no key
        lse.masked_fill_(pair.mask.amax(-1) == -torch.inf, -torch.inf)
    return out, lse


def _cpu_backward(grad_out: Tensor, pair: PairInputs, out: Tensor, lse: Tensor) -> Gradients:
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    if pair.mask is not None:
        # The kernel would compute -inf - -inf for queries that see no key.
        lse = without_infinity(lse)
    grads: Gradients = flash(grad_out, *pair[:3], out, lse, 0.0, pair.kind == "causal", attn_mask=pair.mask)
    return grads


def _wide(pair: PairInputs) -> PairInputs:
    query, key, value, kind, mask = pair
    return PairInputs(query.float(), key.float(), value.float(), kind, None if mask is None else mask.float())


def _wide_forward(pair: PairInputs) -> tuple[Tensor, Tensor]:
    out, lse = _cpu_forward(_wide(pair))
    return out.to(pair.query.dtype), lse


def _wide_backward(grad_out: Tensor, pair: PairInputs, out: Tensor, lse: Tensor) -> Gradients:
    query, key, value = _cpu_backward(grad_out.float(), _wide(pair), out.float(), lse)
    return query.to(pair.query.dtype), key.to(pair.key.dtype), value.to(pair.value.dtype)


def _cuda_forward(pair: PairInputs) -> tuple[Tensor, Tensor]:
    assert pair.mask is None, "flash attention on CUDA has no masks"
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse = flash(*pair[:3], 0.0, pair.kind == "causal", False)[:2]
    return out, lse


def _cuda_backward(grad_out: Tensor, pair: PairInputs, out: Tensor, lse: Tensor) -> Gradients:
    assert pair.mask is None, "flash attention on CUDA has no masks"
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward
    unused = torch.empty(0, dtype=torch.uint64, device=pair.query.device)  # the state of dropout
    sums = lse.contiguous()  # the kernel ignores strides
    sizes = (None, None, pair.query.shape[2], pair.key.shape[2])
    causal = pair.kind == "causal"
    grads: Gradients = flash(grad_out, *pair[:3], out, sums, *sizes, 0.0, causal, unused, unused)
    return grads


def _cudnn_forward(pair: PairInputs) -> tuple[Tensor, Tensor]:
    attend: Any = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse = attend(*pair[:3], None, True, 0.0, pair.kind == "causal", False)[:2]
    return out, lse.view(lse.shape[:3])  # torch's has a last dim of 1


def _cudnn_backward(grad_out: Tensor, pair: PairInputs, out: Tensor, lse: Tensor) -> Gradients:
    attend: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    unused = torch.empty((), dtype=torch.int64, device=pair.query.device)  # the state of dropout
    sizes = (None, None, pair.query.shape[2], pair.key.shape[2])
    sums, causal = lse.contiguous().unsqueeze(-1), pair.kind == "causal"
    grads: Gradients = attend(grad_out, *pair[:3], out, sums, unused, unused, None, *sizes, 0.0, causal)
    return grads


def _repeats(pair: PairInputs) -> bool:
    lengths = pair.query.shape[2], pair.key.shape[2]
    regular = all(length % CUDNN_LENGTHS == 0 for length in lengths)
    return regular and pair.kind != "mask" and pair.query.shape[3] % 8 == 0 and pair.query.shape[3] <= CUDNN_HEAD


PLAIN = Kernel("plain products of torch", plain_forward, plain_backward, lambda pair: True)
CPU_FLASH = Kernel(
    "flash kernel of torch", _cpu_forward, _cpu_backward, lambda pair: not suits_plain_products(pair.query)
)
# 512 tokens, 8 heads of 64, bf16 (torch 2.13, one AVX2 core): the backward takes 23 ms this way, 256 ms if the kernel
# is given bf16, 22 ms with fp32 inputs; the forward 9, 10 and 9 ms. At 64 tokens both take 0.7 ms, plain products 1.5.
CPU_FLASH_WIDE = Kernel("flash kernel of torch in float32", _wide_forward, _wide_backward, lambda pair: True)
CUDA_FLASH = Kernel(
    "flash kernel of torch, plain products under a mask",
    _cuda_forward,
    _cuda_backward,
    lambda pair: pair.kind != "mask" and pair.query.shape[3] % 8 == 0 and pair.query.shape[3] <= 256,
)
CUDNN = Kernel("cuDNN attention of torch", _cudnn_forward, _cudnn_backward, _repeats)


def _candidates(device: torch.device, dtype: torch.dtype) -> tuple[Kernel, ...]:
    """Kernels other than the reference, fastest first."""
    if device.type == "cpu" and dtype in _FLOATS:
        # Without oneDNN products in half precision, converting to fp32 is faster.
        return (CPU_FLASH if dtype.itemsize > 2 or _has_products(dtype) else CPU_FLASH_WIDE,)
    if has_streams(device) and dtype in (torch.bfloat16, torch.float16):
        return (CUDNN, CUDA_FLASH) if compute_capability(device) >= _HOPPER else (CUDA_FLASH,)
    return ()


def _has_products(dtype: torch.dtype) -> bool:
    """Whether oneDNN supports bf16 or fp16 products on this CPU; the flash kernel's fallback is far slower."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    ask = getattr(torch.ops.mkldnn, name, None)  # absent from a torch that is built without oneDNN
    return ask is not None and bool(ask())


@cache
def kernels_for(device: torch.device, dtype: torch.dtype) -> tuple[Kernel, ...]:
    """Kernels for a device and dtype, fastest first and the reference last."""
    return (*_candidates(device, dtype), PLAIN)


def serve(pair: PairInputs, run: Callable[[Kernel], _Result]) -> _Result:
    """`run` the fastest kernel that takes a pair; if it raises, warn and run the next one."""
    for kernel in kernels_for(pair.query.device, pair.query.dtype):
        if not kernel.takes(pair):
            continue
        try:
            return run(kernel)
        except (AttributeError, TypeError, RuntimeError) as error:
            if kernel is PLAIN or isinstance(error, torch.OutOfMemoryError):
                raise
            # Without the pair's shapes, so that Python shows it once.
            where = f"{pair.query.device}, {pair.query.dtype}"
            warnings.warn(f"attention goes without {kernel.name} ({where}): {first_line(error)}", stacklevel=2)
    raise AssertionError("plain products take every pair")


def describe(device: torch.device, dtype: torch.dtype) -> str:
    """Names of the kernels that are used for pairs on a device."""
    name, kernels = str(dtype).removeprefix("torch."), kernels_for(device, dtype)
    return f"{' or '.join(each.name for each in kernels[:-1] or kernels)} ({device}, {name})"
