"""Causal attention within documents and sliding windows, on one device.

A token attends to itself and the earlier tokens of its document, or to the last W of these with a sliding window of W
(Mistral 7B, 2310.06825, section 2). Token q of a row therefore sees the range first(q) ... q. Documents are given by
`positions`: a token whose position is not one more than its left neighbour's begins a document.

The ranges of a micro-batch are converted once into a *mask plan*, shared by all layers and every recomputation:

- `None`: plain causal attention, for rows of one document without a window;
- pieces: runs of tokens with exactly the keys that they need, so that work and memory are quadratic in documents, not
  in rows. A document is a causal piece. Adjacent documents of at most 64 tokens together share a masked piece, because
  a kernel call costs as much as that many tokens. A document longer than the window is split into pieces of the
  window's length, each of which also sees the previous piece, with a band mask;
- a mask over whole rows;
- a `Declared` plan, which computes attention itself: documents for torch's varlen kernel or blocks for FlexAttention
  (terrace.model.fused_attention), one of the first three with capped scores, or one from a replacement of
  `Attention.plans`.

terrace.model.attention_plans chooses among them.

Masks are additive and have the dtype of the query. Torch would convert a boolean mask to this form in every layer, and
keep the result.

Shape legend: B batch, S sequence, N query heads, K key-value heads, D head_dim, W window, L queries of a piece.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

# On a CPU, bf16, forward and backward, 10 heads of 32 (torch 2.13, one AVX-512 core): the flash kernel takes 2.8
# times as long as plain products at 64 positions, 2.3 times at 128, as long at 256, half as long at 512.
SHORT_SEQUENCE = 128

# Forward and backward of 1024 tokens, 8 heads of 64, fp32, in documents of 16 (same machine): 75 ms under a whole mask;
# in pieces of 32, 64, 128 and 256 tokens 8, 12, 18 and 25 ms. In bf16 44, and 14, 12, 16 and 19 ms.
_SHORT_PIECE = 64

NO_SINKS = torch.empty(0)  # of a layer without sinks (terrace.model.sinks)

_MAX_KEPT = 4  # a run has one or two sequence lengths (training, validation)

_Value = TypeVar("_Value")


class PerMicroBatch:
    """Cache of values derived from a tensor that is shared by all layers; entries live as long as the tensor."""

    def __init__(self) -> None:
        self._made: Any = WeakTensorKeyDictionary()

    def get(self, of: Tensor, key: object, make: Callable[[], _Value]) -> _Value:
        """Cached result of `make` for `key` and this tensor; recomputed if the tensor was modified."""
        # Inference tensors have no version counter.
        version = 0 if of.is_inference() else of._version
        made = self._made.setdefault(of, {})
        return _made(made, (version, key), make)


_ON_HOST: Any = WeakTensorKeyDictionary()  # positions and places on a device -> their copy on the host


def moved_from(moved: Tensor, host: Tensor) -> None:
    """Record that `moved`, on a device, is a copy of `host`, so that `on_host` does not synchronise."""
    _ON_HOST[moved] = host


def on_host(positions: Tensor) -> Tensor:
    """`positions` (or places) on the host; synchronises with the device unless `moved_from` recorded them."""
    if positions.device.type == "cpu":
        return positions
    found: Tensor | None = _ON_HOST.get(positions)
    return positions.cpu() if found is None else found


class PerLength(dict[object, Any]):
    """Cache of values that depend on a sequence length; keeps only a few."""

    def made(self, key: object, make: Callable[[], _Value]) -> _Value:
        # Clearing is simpler than evicting and bounds the memory.
        if key not in self and len(self) >= _MAX_KEPT:
            self.clear()
        return _made(self, key, make)


def _made(values: dict[object, Any], key: object, make: Callable[[], _Value]) -> _Value:
    if key not in values:
        # A tensor created in inference mode could not be saved for a later backward.
        with torch.inference_mode(False), torch.no_grad():
            values[key] = make()
    value: _Value = values[key]
    return value


@dataclass(frozen=True)
class MaskPiece:
    """Consecutive tokens that attend to their piece and, if `sees_before`, to the previous one.

    `mask` (L, keys) is added to the scores. Without a mask, attention is causal.
    """

    size: int
    sees_before: bool
    mask: Tensor | None


@dataclass(frozen=True)
class MaskPieces:
    """A partition of every row into the same pieces or, if `joined`, of all rows concatenated."""

    joined: bool
    pieces: tuple[MaskPiece, ...]


class Declared(Protocol):
    """A mask plan that computes attention itself, for example with keys on other ranks."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor = NO_SINKS) -> Tensor:
        """Attention output (B, N, S, D) of `query` over keys and values (B, K, S, D), with `sinks` (N).

        Differentiable.
        """
        ...


MaskPlan = MaskPieces | Tensor | Declared | None  # the tensor is a mask (B or 1, 1, S, S)


class Plans(Protocol):
    def plan(self, positions: Tensor | None, query: Tensor) -> MaskPlan:
        """Mask plan for query (B, N, S, D) and, if rows have several documents, their `positions` (B, S)."""
        ...


class PlannedAttention(nn.Module):
    """Base of attention modules, which take their mask plans from `plans`; a parallel axis may replace it."""

    plans: Plans


def document_begins(positions: Tensor) -> Tensor:
    """Whether a document begins at each token, bool (B, S), from positions (B, S)."""
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    return begins


def whole_mask(begins: Tensor, window: int, dtype: torch.dtype) -> Tensor:
    """Additive mask (B, 1, S, S) for rows whose documents begin where `begins` (B, S) is true."""
    places = torch.arange(begins.shape[1], device=begins.device)
    return additive_mask(first_keys(begins, 0), places, places, window, dtype).unsqueeze(1)


def first_keys(begins: Tensor, window: int) -> Tensor:
    """First key that each token sees, int64 (B, S): the first of its document or of its `window` (0: none)."""
    places = torch.arange(begins.shape[1], device=begins.device)
    # The last document begin at or before each token.
    first = torch.where(begins, places, 0).cummax(1).values
    return torch.maximum(first, places - (window - 1)) if window else first


def cut(begins: Tensor, window: int, dtype: torch.dtype) -> MaskPieces | None:
    """Split rows whose documents begin where `begins` (B, S) is true into pieces.

    Returns None if every row is one document without a window that limits it.
    """
    # Rows with different documents have no common split, so they are concatenated.
    joined = bool((begins != begins[:1]).any())
    starts = begins.flatten() if joined else begins[0]
    bounds = [*torch.nonzero(starts).flatten().tolist(), len(starts)]
    sizes = [end - begin for begin, end in pairwise(bounds)]
    if len(sizes) == 1 and not 0 < window < sizes[0]:
        return None
    pieces: list[MaskPiece] = []
    group: list[int] = []
    bands: dict[tuple[int, int], Tensor] = {}
    for size in [*sizes, 0]:  # 0 closes the last group
        if group and (size == 0 or sum(group) + size > _SHORT_PIECE):
            pieces.append(_group(group, window, dtype))
            group = []
        if 0 < size <= _SHORT_PIECE:
            group.append(size)
        elif size:
            pieces += _document(size, window, dtype, bands)
    return MaskPieces(joined, tuple(pieces))


def _group(sizes: Sequence[int], window: int, dtype: torch.dtype) -> MaskPiece:
    if len(sizes) == 1 and not 0 < window < sizes[0]:
        return MaskPiece(sizes[0], False, None)
    # First key of each token: where its document begins.
    ends = torch.tensor(sizes).cumsum(0)
    first = torch.repeat_interleave(ends - torch.tensor(sizes), torch.tensor(sizes))
    places = torch.arange(len(first))
    return MaskPiece(len(first), False, additive_mask(first, places, places, window, dtype))


def _document(size: int, window: int, dtype: torch.dtype, bands: dict[tuple[int, int], Tensor]) -> list[MaskPiece]:
    if not 0 < window < size:
        return [MaskPiece(size, False, None)]
    length = max(window, _SHORT_PIECE)  # so that the window reaches no further than the previous piece
    pieces = []
    for begin in range(0, size, length):
        num, before = min(length, size - begin), length if begin else 0
        # The first piece lies within the window: plain causal attention.
        if num + before <= window:
            pieces.append(MaskPiece(num, False, None))
            continue
        # All middle pieces of a document share one band.
        if (num, before) not in bands:
            keys = torch.arange(before + num)
            bands[num, before] = additive_mask(torch.zeros(num).long(), keys[before:], keys, window, dtype)
        pieces.append(MaskPiece(num, before > 0, bands[num, before]))
    return pieces


def additive_mask(first: Tensor, queries: Tensor, keys: Tensor, window: int, dtype: torch.dtype) -> Tensor:
    """Additive mask (..., L, keys): 0 where the query at position `queries` (L) sees the key at `keys`, else -inf.

    A query sees the keys from `first` (..., L), the beginning of its document, up to its own position; with a `window`,
    only the last `window` of them.
    """
    queries = queries.unsqueeze(-1)
    sees = (keys >= first.unsqueeze(-1)) & (keys <= queries)
    if window:
        sees &= keys > queries - window
    return torch.zeros(sees.shape, dtype=dtype, device=keys.device).masked_fill_(~sees, -torch.inf)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output (B, N, S, D) and lse (B, N, S) with `sinks` (N), from those over all keys; `out` is overwritten."""
    if not len(sinks):
        return out, lse
    scores = sinks.to(lse.dtype).view(-1, 1)
    return out.mul_((lse - scores).sigmoid_().unsqueeze(-1)), lse.logaddexp(scores)


def sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradient (N) of sinks, from the gradient of the output and the results of `with_sinks`."""
    share = (sinks.to(lse.dtype).view(-1, 1) - lse).exp_()  # (B, N, S), of a query's softmax
    delta = (grad.to(lse.dtype) * out).sum(-1)
    return -(share * delta).sum((0, 2)).to(sinks.dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, plan: MaskPlan) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V, (B, N, S, D), for a query of that shape and keys and values (B, K, S, D)."""
    if plan is None:
        return _core(query, key, value, None)
    if isinstance(plan, Tensor):
        return _core(query, key, value, plan)
    if isinstance(plan, MaskPieces):
        return attend_in_pieces(query, key, value, plan)
    return plan.attend(query, key, value)


@dataclass(frozen=True)
class Capped:
    """A plan with soft-capped scores: s becomes `cap` tanh(s / cap) before the mask (Gemma 2, 2408.00118, section 2).

    `scaled_dot_product_attention` does not support caps, so attention is computed as two products and a softmax.
    """

    plan: MaskPieces | Tensor | None
    cap: float

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor = NO_SINKS) -> Tensor:
        """As `attend`, with capped scores."""
        assert not len(sinks), "`ModelConfig` refuses caps beside sinks"
        if isinstance(self.plan, MaskPieces):
            return attend_in_pieces(query, key, value, self.plan, self.cap)
        return plain_products(query, key, value, self.plan, self.cap)


def attend_in_pieces(query: Tensor, key: Tensor, value: Tensor, plan: MaskPieces, cap: float = 0.0) -> Tensor:
    """Attend piece by piece; shapes as in `attend`. `cap` 0: none."""
    batch, heads, sequence, size = query.shape
    parts = (part.transpose(1, 2) for part in (query, key, value))  # (B, S, ., D), as they lie in memory
    if plan.joined:
        parts = (part.flatten(0, 1).unsqueeze(0) for part in parts)  # (1, B S, ., D)
    sizes = [piece.size for piece in plan.pieces]
    queries, keys, values = ([run.transpose(1, 2) for run in torch.split(part, sizes, 1)] for part in parts)
    mixed = []
    for index, piece in enumerate(plan.pieces):
        seen = slice(index - 1, index + 1) if piece.sees_before else slice(index, index + 1)
        own = [torch.cat(run[seen], 2) if piece.sees_before else run[index] for run in (keys, values)]
        mixed.append(_core(queries[index], own[0], own[1], piece.mask, cap).transpose(1, 2))
    return torch.cat(mixed, 1).view(batch, sequence, heads, size).transpose(1, 2)


def _core(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cap: float = 0.0) -> Tensor:
    if cap or suits_plain_products(query):
        return plain_products(query, key, value, mask, cap)
    if mask is not None and mask.dim() == 2:
        mask = mask.expand(query.shape[0], 1, *mask.shape)
    groups = query.shape[1] // key.shape[1]
    if mask is not None and groups > 1 and not _takes_groups_under_a_mask(query):
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=key.shape[1] != query.shape[1]
    )


def plain_products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cap: float = 0.0, sinks: Tensor = NO_SINKS
) -> Tensor:
    """As `attend`, by two products and a softmax, in fp32 (fp64 for fp64), with a `mask` or causal; `cap` 0: none.

    `sinks` (N) are further scores, whose weights are dropped.

    Unlike torch's math backend, it does not repeat keys: query heads that share them are rows of one product. In bf16,
    forward and backward of 128 tokens take 0.79 of that backend's time with 8 heads on 2, 0.93 with 8 on 8.
    """
    batch, heads, length, size = query.shape
    kv_heads, num_keys, groups = key.shape[1], key.shape[2], heads // key.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    if mask is None:
        mask = torch.full((length, num_keys), -torch.inf, dtype=dtype, device=query.device).triu_(1)
    if mask.dim() == 2:
        masks = mask.to(dtype).repeat(groups, 1)  # (G L, M), with query heads that share keys one after the other
    else:
        masks = (
            mask.to(dtype).unsqueeze(1).expand(batch, kv_heads, groups, length, num_keys).flatten(2, 3).flatten(0, 1)
        )
    queries = query.to(dtype).reshape(batch * kv_heads, groups * length, size)
    keys, values = (part.to(dtype).reshape(batch * kv_heads, num_keys, size) for part in (key, value))
    # Scaling inside the product saves a tensor that would be kept for the backward.
    alpha = 1.0 / math.sqrt(size)
    if cap:
        # Only the two results that the backward needs are bound to names; others are freed at once.
        capped = torch.baddbmm(masks, queries, keys.transpose(1, 2), beta=0, alpha=alpha / cap).tanh_()
        weights = torch.add(masks, capped, alpha=cap).softmax(-1)
    elif len(sinks):
        scores = torch.baddbmm(masks, queries, keys.transpose(1, 2), alpha=alpha)
        column = sinks.to(dtype).view(kv_heads, groups, 1).expand(batch, kv_heads, groups, length).reshape(-1, 1)
        weights = torch.cat([scores, column.view(*scores.shape[:2], 1)], -1).softmax(-1)[..., :-1]
    else:
        weights = torch.baddbmm(masks, queries, keys.transpose(1, 2), alpha=alpha).softmax(-1)
    mixed = weights @ values
    return mixed.view(batch, heads, length, size).to(query.dtype)


def _takes_groups_under_a_mask(query: Tensor) -> bool:
    """Whether a fused kernel supports a mask together with grouped heads.

    On CUDA none does, and torch would materialise the scores.
    """
    return query.device.type == "cpu"


def suits_plain_products(query: Tensor) -> bool:
    """Whether attention of `query` (B, N, L, D) is fastest as two products and a softmax."""
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.shape[2] <= SHORT_SEQUENCE
