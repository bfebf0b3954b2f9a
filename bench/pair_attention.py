"""Attention as a list of pairs on one device, for measurements of and tests against the pair kernels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from terrace.model.blockwise import Attended, DensePair, Sums, pair_backward, pair_forward, rows


def attend_pairs(query: Tensor, key: Tensor, value: Tensor, pairs: Sequence[DensePair]) -> Tensor:
    """Softmax(Q K^T / sqrt(D)) V, (B, N, S, D), over the keys that the pairs of a query have; 0 without any.

    key and value (B, K, S', D). Keeps its inputs, its output and an lse (B, N, S) for the backward, no scores.
    """
    attended: Tensor = _AttendPairs.apply(query, key, value, pairs)  # type: ignore[no-untyped-call]
    return attended


class _AttendPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, pairs: Sequence[DensePair]) -> Tensor:
        attended = Attended(query, [pair.queries for pair in pairs])
        for pair in pairs:
            own = (rows(query, pair.queries), rows(key, pair.keys), rows(value, pair.keys))
            attended.add(pair.queries, *pair_forward(*own, pair.kind, pair.mask))
        out, lse = attended.result()
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.pairs = pairs
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, lse = ctx.saved_tensors
        of_queries, of_keys = ([getattr(pair, name) for pair in ctx.pairs] for name in ("queries", "keys"))
        sums = (Sums(query, of_queries), Sums(key, of_keys), Sums(value, of_keys))
        for pair in ctx.pairs:
            grads = pair_backward(
                rows(grad_out, pair.queries),
                rows(query, pair.queries),
                rows(key, pair.keys),
                rows(value, pair.keys),
                rows(out, pair.queries),
                rows(lse, pair.queries),
                pair.kind,
                pair.mask,
            )
            for total, run, grad in zip(sums, (pair.queries, pair.keys, pair.keys), grads, strict=True):
                total.add(run, grad)
        grad_query, grad_key, grad_value = (total.result() for total in sums)
        return grad_query, grad_key, grad_value, None
