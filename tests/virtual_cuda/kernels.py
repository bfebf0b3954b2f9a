"""Operators of torch that have kernels for CUDA alone, by their definitions, for tensors of the virtual device.

Torch's own Python around them runs as it is: `varlen_attn`, `scaled_dot_product_attention` below a choice of kernels,
and the pairs of runs of `terrace.model.pair_kernels`.

Shape legend: B batch, N query heads, K key-value heads, D head size, L queries, M keys, T tokens of all documents.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

Gradients = tuple[Tensor, Tensor, Tensor]


@contextmanager
def defined() -> Iterator[None]:
    """Until its end, the CPU has these operators."""
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for name, function in _OPERATORS.items():
            library.impl(name, function, "CPU")  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    enable_gqa: bool = False,
    return_aux: Any = None,
) -> Any:
    """FlexAttention, which torch compiles: every score is made, changed and masked."""
    assert enable_gqa or query.shape[1] == key.shape[1], "heads are grouped without enable_gqa"
    places = _places(query, key)
    scores = _scores(query, key, None)
    scores = scores if score_mod is None else score_mod(scores, *places)
    seen = torch.ones((), dtype=torch.bool, device=query.device) if block_mask is None else block_mask.mask_mod(*places)
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    out = (weights @ _repeated(value, query.shape[1]).to(weights.dtype)).to(query.dtype)
    return out if return_aux is None else (out, SimpleNamespace(lse=scores.logsumexp(-1)))


def _places(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row, head, query and key of each score, in shapes that together are (B, N, L, M)."""
    sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    found = (
        torch.arange(size, device=query.device).view([-1 if dim == place else 1 for place in range(4)])
        for dim, size in enumerate(sizes)
    )
    return tuple(found)  # type: ignore[return-value]  # four


def _repeated(part: Tensor, heads: int) -> Tensor:
    return part.repeat_interleave(heads // part.shape[1], dim=1, output_size=heads)


def _scores(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    factor = scale if scale is not None else 1.0 / math.sqrt(query.shape[-1])
    return query.to(wide) @ _repeated(key, query.shape[1]).to(wide).transpose(-1, -2) * factor


def _forward(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Output (B, N, L, D) with a token's heads side by side, and lse (B, N, L)."""
    scores = _scores(query, key, scale).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    return out.copy_(weights @ _repeated(value, query.shape[1]).to(weights.dtype)), lse


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    seen: Tensor,
    scale: float | None,
) -> Gradients:
    wide, heads, kv_heads = torch.promote_types(query.dtype, torch.float32), query.shape[1], key.shape[1]
    factor = scale if scale is not None else 1.0 / math.sqrt(query.shape[-1])
    sums = lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)
    weights = (_scores(query, key, scale).masked_fill(~seen, -torch.inf) - sums).exp()
    grads, delta = grad_out.to(wide), (grad_out.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    of_scores = weights * (grads @ _repeated(value, heads).to(wide).transpose(-1, -2) - delta) * factor
    grouped = (key.shape[0], kv_heads, heads // kv_heads, *key.shape[2:])
    return (
        (of_scores @ _repeated(key, heads).to(wide)).to(query.dtype),
        (of_scores.transpose(-1, -2) @ query.to(wide)).view(grouped).sum(2).to(key.dtype),
        (weights.transpose(-1, -2) @ grads).view(grouped).sum(2).to(value.dtype),
    )


def _causal(query: Tensor, key: Tensor, is_causal: bool) -> Tensor:
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    return seen.tril() if is_causal else seen


def _of_documents(starts: Tensor, longest: int, tokens: int, is_causal: bool, left: int, right: int) -> Tensor:
    """Which token sees which, bool (T, T)."""
    assert int(starts[-1]) == tokens, (starts, tokens)
    assert int(starts.diff().max()) <= longest, (starts, longest)
    places = torch.arange(tokens)
    document = torch.searchsorted(starts.to(places.dtype), places, right=True)
    ahead = places.unsqueeze(0) - places.unsqueeze(1)  # of the key before the query
    seen = document.unsqueeze(0) == document.unsqueeze(1)
    if is_causal or right == 0:
        seen = seen & (ahead <= 0)
    return seen & (ahead >= -left) if left >= 0 else seen


def _one_row(part: Tensor) -> Tensor:
    return part.transpose(0, 1).unsqueeze(0)


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_key: int,
    dropout: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    assert query.dtype in (torch.bfloat16, torch.float16), query.dtype
    assert not dropout
    assert not any(each is not None for each in rest.values()), rest
    window = (-1 if each is None else each for each in (window_size_left, window_size_right))
    seen = _of_documents(starts, longest, len(query), is_causal, *window)
    out, lse = _forward(_one_row(query), _one_row(key), _one_row(value), seen, scale)
    nothing = query.new_empty(0)
    return out[0].transpose(0, 1), lse[0], nothing, nothing, nothing


def _packed_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_key: int,
    dropout: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Gradients:
    window = (-1 if each is None else each for each in (window_size_left, window_size_right))
    seen = _of_documents(starts, longest, len(query), is_causal, *window)
    one, two, three, four, five = map(_one_row, (grad_out, query, key, value, out))
    grads = _backward(one, two, three, four, five, lse.unsqueeze(0), seen, scale)
    of_query, of_key, of_value = (each[0].transpose(0, 1).contiguous() for each in grads)
    return of_query, of_key, of_value


def _whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    assert not dropout
    assert query.dtype in (torch.bfloat16, torch.float16), query.dtype
    assert query.shape[1] == key.shape[1] or query.shape[1] % key.shape[1] == 0, (query.shape, key.shape)
    out, lse = _forward(query, key, value, _causal(query, key, is_causal), scale)
    state = torch.empty(2, dtype=torch.uint64)
    return out, lse, None, None, query.shape[2], key.shape[2], state, state, query.new_empty(0)


def _whole_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor | None,
    key_starts: Tensor | None,
    longest: int,
    longest_key: int,
    dropout: float,
    is_causal: bool,
    seed: Tensor,
    offset: Tensor,
    *,
    scale: float | None = None,
) -> Gradients:
    assert lse.is_contiguous(), "the kernel ignores strides"
    return _backward(grad_out, query, key, value, out, lse, _causal(query, key, is_causal), scale)


def _cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    assert bias is None
    assert compute_log_sumexp
    found = list(_whole(query, key, value, dropout, is_causal, scale=scale))
    found[1] = found[1].unsqueeze(-1)  # torch's has a last dim of 1
    return tuple(found)


def _cudnn_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    bias: Tensor | None,
    starts: Tensor | None,
    key_starts: Tensor | None,
    longest: int,
    longest_key: int,
    dropout: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> Gradients:
    assert bias is None
    assert lse.is_contiguous(), "the kernel ignores strides"
    assert lse.shape[-1] == 1, lse.shape
    return _backward(grad_out, query, key, value, out, lse[..., 0], _causal(query, key, is_causal), scale)


_OPERATORS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": _packed,
    "_flash_attention_backward": _packed_backward,
    "_scaled_dot_product_flash_attention": _whole,
    "_scaled_dot_product_flash_attention_backward": _whole_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
}
