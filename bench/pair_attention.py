"""Attention as a list of pairs on one device, for measurements of and tests against the pair kernels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from terrace.model.blockwise import Attended, DensePair, Sums, pair_backward, pair_forward, rows
from terrace.model.pair_kernels import PairInputs


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
            attended.add(pair.queries, *pair_forward(PairInputs(*own, pair.kind, pair.mask)))
        out, lse = attended.result()
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.pairs = pairs
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, lse = ctx.saved_tensors
        query_runs, key_runs = ([getattr(pair, name) for pair in ctx.pairs] for name in ("queries", "keys"))
        sums = (Sums(query, query_runs), Sums(key, key_runs), Sums(value, key_runs))
        for pair in ctx.pairs:
            own = (rows(query, pair.queries), rows(key, pair.keys), rows(value, pair.keys))
            of_queries = [rows(x, pair.queries) for x in (grad_out, out, lse)]
            grads = pair_backward(of_queries[0], PairInputs(*own, pair.kind, pair.mask), *of_queries[1:])
            for total, run, grad in zip(sums, (pair.queries, pair.keys, pair.keys), grads, strict=True):
                total.add(run, grad)
        grad_query, grad_key, grad_value = (total.result() for total in sums)
        return grad_query, grad_key, grad_value, None
