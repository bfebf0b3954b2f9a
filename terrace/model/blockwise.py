"""Attention over a declared list of pairs: runs of queries and runs of keys, processed in sequence, merged exactly.

Softmax over the keys of several pairs follows from the softmax over each. With scores s_k = q k^T / sqrt(D), a pair p
gives its queries

    lse_p = log sum_{k in p} exp(s_k)        out_p = sum_{k in p} exp(s_k - lse_p) v_k

and two pairs together (Milakov and Gimelshein 1805.02867; Liu et al. 2310.01889)

    lse = log(exp(lse_a) + exp(lse_b))       out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

The backward needs no partial results. With the lse and out over *all* keys a key has the weight p_k = exp(s_k - lse),
whichever pair it is in, and with the gradient g of out and delta = g . out = sum_k p_k (g . v_k), a sum over all keys,

    dv_k = p_k g        ds_k = p_k (g . v_k - delta)        dq = sum_k ds_k k / sqrt(D)        dk_k = ds_k q / sqrt(D)

where dk_k and dv_k are summed over queries. So a pair's share of the gradients depends on its own keys and on out and
lse over all keys: a flash backward (Dao 2307.08691, algorithm 2) given these computes exactly that.

Single-device code: it does not know where queries and keys come from.

Shape legend: B batch, N query heads, K key-value heads (dividing N: query head n has the keys of head n K // N), D
head_dim, S rows, L queries of a pair, M its keys. Results of shape (B, N, S, D) lie as (B, S, N, D) in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from terrace.model.attention import additive_mask
from terrace.model.pair_kernels import KINDS, Gradients, Kernel, PairInputs, kernels_for, precise, side_by_side

Run = tuple[int, int]  # rows start ... stop - 1


@dataclass(frozen=True)
class DensePair:
    """Rows of queries that see rows of keys: all, causally (as many of each), or as `mask` (L, M) says."""

    queries: Run
    keys: Run
    kind: str = "full"
    mask: Tensor | None = None


def dense_mask(
    num_queries: int,
    num_keys: int,
    shift: int,
    begins: Sequence[int],
    window: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Tensor:
    """An additive mask (L, M): zero where a query sees a key, else -inf.

    Query i stands at i + `shift` of the keys, which may lie before or after all of them, and sees the keys up to there
    within its document and among the last `window` (0: any number). Documents begin at the keys `begins`, ascending.
    """
    queries = torch.arange(shift, shift + num_queries, device=device)
    starts = torch.tensor([0, *begins], device=device)
    # The last document that begins at or before each query.
    first = starts[torch.bucketize(queries, starts[1:], right=True)]
    return additive_mask(first, queries, torch.arange(num_keys, device=device), window, dtype)


def pair_forward(pair: PairInputs) -> tuple[Tensor, Tensor]:
    """The output (B, N, L, D) and the lse (B, N, L), in fp32 or fp64, of queries over the keys of a pair.

    A query that sees none of the keys has output 0 and lse -inf.
    """
    return _kernel(pair).forward(pair)


def pair_backward(grad_out: Tensor, pair: PairInputs, out: Tensor, lse: Tensor) -> Gradients:
    """One pair's contribution to the gradients of its queries, keys and values.

    `out` (B, N, L, D) and `lse` (B, N, L) are over all keys of the queries, not over the pair's (the algebra is at the
    top of this file); `grad_out` is the gradient of that `out`.
    """
    return _kernel(pair).backward(grad_out, pair, out, lse)


def merge_(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge new keys' results into `out` (B, N, L, D) and `lse` (B, N, L), in place.

    Rows with lse -inf have seen no key; their `out` must be finite, for example zero. Weights are computed in the dtype
    of `lse`; `out` is rounded to its own dtype each time, so an `out` that is merged often should be fp32.
    """
    # The sigmoid is the part of the new keys, and never overflows; -inf of both sides would be no number.
    part = torch.sigmoid(new_lse - lse).masked_fill_(new_lse == -torch.inf, 0.0)
    out.lerp_(new_out.to(out.dtype), part.to(out.dtype).unsqueeze(-1))
    torch.logaddexp(lse, new_lse, out=lse)


class Attended:
    """Attention output of queries over the pairs added so far.

    `runs` are the runs of all pairs that will be added. A single pair over all rows is taken as it is; rows with one
    pair each are written in place; other rows are merged, in fp32 at least.
    """

    def __init__(self, query: Tensor, runs: Sequence[Run]) -> None:
        self._query = query
        self._merges = _overlap(runs)
        self._out = _collected(query, runs, self._merges)
        if self._out is not None:
            batch, heads, length, _ = query.shape
            # Heads of a token side by side, as in the output.
            lse = query.new_full((batch, length, heads), -torch.inf, dtype=precise(query.dtype))
            self._lse = lse.transpose(1, 2)

    def add(self, run: Run, out: Tensor, lse: Tensor) -> None:
        if self._out is None:
            self._out, self._lse = out, lse
            return
        own_out, own_lse = rows(self._out, run), rows(self._lse, run)
        if self._merges:
            merge_(own_out, own_lse, out, lse)
        else:
            own_out.copy_(out)
            own_lse.copy_(lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """The output (B, N, S, D) in the dtype of the query and the lse (B, N, S); 0 and -inf without a pair."""
        assert self._out is not None, "a single pair over all rows was not added"
        return self._out.to(self._query.dtype), self._lse


class Sums:
    """Gradients of rows, summed over the pairs that are added; `like` (B, N, S, D), `runs` as in `Attended`."""

    def __init__(self, like: Tensor, runs: Sequence[Run]) -> None:
        self._like = like
        self._adds = _overlap(runs)
        self._sum = _collected(like, runs, self._adds)

    def add(self, run: Run, grad: Tensor) -> None:
        """Add the gradient of a run."""
        if self._sum is None:
            self._sum = grad
        elif self._adds:
            rows(self._sum, run).add_(grad)
        else:
            rows(self._sum, run).copy_(grad)

    def result(self) -> Tensor:
        """The sum, in the dtype of `like`."""
        assert self._sum is not None, "the gradient of all rows was not added"
        return self._sum.to(self._like.dtype)


def _collected(like: Tensor, runs: Sequence[Run], several: bool) -> Tensor | None:
    """Memory for results of `runs`, of which rows may be in `several`; None where one run has all rows."""
    length = like.shape[2]
    if list(runs) == [(0, length)]:
        return None
    out = side_by_side(like, precise(like.dtype) if several else like.dtype)
    # Adding reads the old values, and rows without a run have the result zero.
    if several or sum(stop - start for start, stop in runs) < length:
        out.zero_()
    return out


def rows(part: Tensor, run: Run) -> Tensor:
    """A view of the rows of part (B, N, S, ...)."""
    start, stop = run
    return part.narrow(2, start, stop - start)


def _kernel(pair: PairInputs) -> Kernel:
    query, kind, mask = pair.query, pair.kind, pair.mask
    assert kind in KINDS, f"a pair is of kind {kind!r}, not one of {KINDS}"
    assert (kind == "mask") == (mask is not None), (
        f"mask {mask if mask is None else tuple(mask.shape)} of a {kind} pair"
    )
    lengths = query.shape[2], pair.key.shape[2]
    assert kind != "causal" or lengths[0] == lengths[1], f"causal: {lengths[0]} queries, {lengths[1]} keys"
    return next(kernel for kernel in kernels_for(query.device, query.dtype) if kernel.takes(pair))


def _overlap(runs: Sequence[Run]) -> bool:
    return any(before[1] > after[0] for before, after in pairwise(sorted(runs)))
