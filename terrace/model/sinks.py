"""Attention sinks: a learned logit per query head, which takes a share of every softmax (gpt-oss, 2508.10925).

A sink is a key of value 0 that every query sees, with the score b of its head. So with the output o and the log-sum-exp
l of attention over the keys alone,

    o' = o sigmoid(l - b)        l' = log(exp(l) + exp(b))

The backward over keys needs no change: with l' and o' in place of l and o, a key has the weight exp(s - l') and delta
is g . o', as derived in terrace.model.blockwise. The sink has the weight exp(b - l') and the value 0, so

    b' = -sum over queries of exp(b - l') (g . o')

Partial results merge before the sink is added, so rings of context ranks merge as without sinks, and each query gets
the sink once.

A layer without sinks has the empty tensor `NO_SINKS`, with which all functions here are those of plain attention.

Shape legend: B batch, S sequence, N query heads, K key-value heads, D head_dim, T tokens of all documents.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from terrace.model import attention
from terrace.model.attention import NO_SINKS, MaskPieces, MaskPlan, plain_products, sinks_gradient, with_sinks
from terrace.model.blockwise import Attended, DensePair, Sums, pair_backward, pair_forward, rows
from terrace.model.pair_kernels import PairInputs


def attend(query: Tensor, key: Tensor, value: Tensor, plan: MaskPlan, sinks: Tensor = NO_SINKS) -> Tensor:
    """As `terrace.model.attention.attend`, with `sinks` (N)."""
    if not len(sinks):
        return attention.attend(query, key, value, plan)
    if plan is None:
        return _attend_pairs(query, key, value, sinks, [DensePair((0, query.shape[2]), (0, query.shape[2]), "causal")])
    if isinstance(plan, MaskPieces):
        return _attend_in_pieces(query, key, value, sinks, plan)
    if isinstance(plan, Tensor):
        return plain_products(query, key, value, plan, sinks=sinks)
    return plan.attend(query, key, value, sinks)


class _AttendPairs(Function):
    # One softmax over the keys of several pairs and the sink of each head.

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, pairs: Sequence[DensePair]
    ) -> Tensor:
        attended = Attended(query, [pair.queries for pair in pairs])
        for pair in pairs:
            attended.add(pair.queries, *pair_forward(_inputs(query, key, value, pair)))
        out, lse = with_sinks(*attended.result(), sinks)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.pairs = pairs
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        of_query = Sums(query, [pair.queries for pair in ctx.pairs])
        of_keys = [Sums(each, [pair.keys for pair in ctx.pairs]) for each in (key, value)]
        for pair in ctx.pairs:
            run = pair.queries
            given = _inputs(query, key, value, pair)
            grads = pair_backward(rows(grad, run), given, rows(out, run), rows(lse, run))
            of_query.add(run, grads[0])
            for total, part in zip(of_keys, grads[1:], strict=True):
                total.add(pair.keys, part)
        of_sinks = sinks_gradient(grad, out, lse, sinks) if ctx.needs_input_grad[3] else None
        return of_query.result(), *(total.result() for total in of_keys), of_sinks, None


def _inputs(query: Tensor, key: Tensor, value: Tensor, pair: DensePair) -> PairInputs:
    return PairInputs(rows(query, pair.queries), rows(key, pair.keys), rows(value, pair.keys), pair.kind, pair.mask)


def _attend_pairs(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, pairs: Sequence[DensePair]) -> Tensor:
    result: Tensor = _AttendPairs.apply(query, key, value, sinks, pairs)  # type: ignore[no-untyped-call]
    return result


def _attend_in_pieces(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, plan: MaskPieces) -> Tensor:
    ends = list(accumulate(piece.size for piece in plan.pieces))
    pairs = []
    for index, (piece, end) in enumerate(zip(plan.pieces, ends, strict=True)):
        first = end - piece.size - (plan.pieces[index - 1].size if piece.sees_before else 0)
        kind = "causal" if piece.mask is None else "mask"
        pairs.append(DensePair((end - piece.size, end), (first, end), kind, piece.mask))
    if not plan.joined:
        return _attend_pairs(query, key, value, sinks, pairs)
    batch, heads, sequence, size = query.shape
    joined = [each.transpose(1, 2).flatten(0, 1).unsqueeze(0).transpose(1, 2) for each in (query, key, value)]
    mixed = _attend_pairs(joined[0], joined[1], joined[2], sinks, pairs)  # (1, N, B S, D)
    return mixed.transpose(1, 2).view(batch, sequence, heads, size).transpose(1, 2)
