"""Blockwise attention over pairs (a run of queries, a run of keys), merged exactly.

The softmax over the keys of several pairs follows from the softmax over each. With scores s_k = q k^T / sqrt(D), a pair
p yields for each of its queries

    lse_p = log sum_{k in p} exp(s_k)        out_p = sum_{k in p} exp(s_k - lse_p) v_k

and two pairs a and b are merged by (Milakov and Gimelshein 1805.02867; Liu et al. 2310.01889)

    lse = log(exp(lse_a) + exp(lse_b))       out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

The backward needs no partial results. With lse and out over *all* keys, a key has the weight p_k = exp(s_k - lse) in
any pair. With the gradient g of out, and delta = g . out = sum_k p_k (g . v_k) over all keys,

    dv_k = p_k g        ds_k = p_k (g . v_k - delta)        dq = sum_k ds_k k / sqrt(D)        dk_k = ds_k q / sqrt(D)

where dk_k and dv_k are summed over queries. The contribution of a pair depends only on its keys and on the final out
and lse, so it is computed by a flash backward (Dao 2307.08691, algorithm 2) that is given these.

This is single-device code, independent of where queries and keys come from.

Shape legend: B batch, N query heads, K key-value heads (dividing N: query head n has the keys of head n K // N), D
head_dim, S rows, L queries of a pair, M its keys. Results of shape (B, N, S, D) lie as (B, S, N, D) in memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from terrace.accelerator import placed
from terrace.model.attention import additive_mask
from terrace.model.pair_kernels import KINDS, Gradients, PairInputs, precise, serve, side_by_side

Run = tuple[int, int]  # (start, stop) of rows


@dataclass(frozen=True)
class DensePair:
    """A run of queries that attends to a run of keys of kind "full", "causal" (equal lengths) or "mask" (L, M)."""

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
    """Additive mask (L, M): 0 where a query sees a key, else -inf.

    Query i has the position i + `shift` relative to the keys, possibly outside their range. It sees the keys of its
    document up to that position, only the last `window` of them unless `window` is 0. `begins` are the ascending key
    indices at which documents begin.
    """
    queries = torch.arange(shift, shift + num_queries, device=device)
    starts = placed(torch.tensor([0, *begins]), torch.device(device))
    # The last document that begins at or before each query.
    first = starts[torch.bucketize(queries, starts[1:], right=True)]
    return additive_mask(first, queries, torch.arange(num_keys, device=device), window, dtype)


def pair_forward(pair: PairInputs) -> tuple[Tensor, Tensor]:
    """Output (B, N, L, D) and lse (B, N, L), the latter in fp32 or fp64, of queries over the keys of a pair.

    A query that sees none of the keys has output 0 and lse -inf.
    """
    _check(pair)
    return serve(pair, lambda kernel: kernel.forward(pair))


def pair_backward(grad_out: Tensor, pair: PairInputs, out: Tensor, lse: Tensor) -> Gradients:
    """Contribution of one pair to the gradients of its queries, keys and values.

    `out` (B, N, L, D) and `lse` (B, N, L) are the results over all keys of the queries, not only over this pair's (see
    the top of this file); `grad_out` is the gradient of that `out`.
    """
    _check(pair)
    return serve(pair, lambda kernel: kernel.backward(grad_out, pair, out, lse))


def merge_(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merge results over further keys into `out` (B, N, L, D) and `lse` (B, N, L), in place.

    Rows with lse -inf have seen no key; their `out` must be finite, for example zero. Weights are computed in the dtype
    of `lse`. `out` is rounded to its dtype at every merge, so it should be fp32 if there are many.
    """
    # The sigmoid is the weight of the new keys and cannot overflow; where both lse are -inf it would be NaN.
    part = torch.sigmoid(new_lse - lse).masked_fill_(new_lse == -torch.inf, 0.0)
    out.lerp_(new_out.to(out.dtype), part.to(out.dtype).unsqueeze(-1))
    torch.logaddexp(lse, new_lse, out=lse)


class Attended:
    """Accumulates the attention output of queries over pairs.

    `runs` are the query runs of all pairs that will be added. If runs overlap, results are merged, in fp32 at least;
    otherwise they are copied, or used directly if a single run has all rows.
    """

    def __init__(self, query: Tensor, runs: Sequence[Run]) -> None:
        self._query = query
        self._merges = _overlap(runs)
        self._out = _collected(query, runs, self._merges)
        if self._out is not None:
            batch, heads, length, _ = query.shape
            # The heads of a token are contiguous, as in the output.
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
        """Output (B, N, S, D), in the dtype of the query, and lse (B, N, S); 0 and -inf for rows in no pair."""
        assert self._out is not None, "a single pair over all rows was not added"
        return self._out.to(self._query.dtype), self._lse


class Sums:
    """Sums gradients of the shape of `like` (B, N, S, D) over pairs; `runs` as in `Attended`."""

    def __init__(self, like: Tensor, runs: Sequence[Run]) -> None:
        self._like = like
        self._adds = _overlap(runs)
        self._sum = _collected(like, runs, self._adds)

    def add(self, run: Run, grad: Tensor) -> None:
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
    """Buffer for the results of `runs`, wide if they overlap (`several`); None if one run has all rows."""
    length = like.shape[2]
    if list(runs) == [(0, length)]:
        return None
    out = side_by_side(like, precise(like.dtype) if several else like.dtype)
    # Accumulation needs zeros, and so do rows that are in no run.
    if several or sum(stop - start for start, stop in runs) < length:
        out.zero_()
    return out


def rows(part: Tensor, run: Run) -> Tensor:
    """View of the rows `run` of `part` (B, N, S, ...)."""
    start, stop = run
    return part.narrow(2, start, stop - start)


def _check(pair: PairInputs) -> None:
    query, kind, mask = pair.query, pair.kind, pair.mask
    assert kind in KINDS, f"a pair is of kind {kind!r}, not one of {KINDS}"
    assert (kind == "mask") == (mask is not None), (
        f"mask {mask if mask is None else tuple(mask.shape)} of a {kind} pair"
    )
    lengths = query.shape[2], pair.key.shape[2]
    assert kind != "causal" or lengths[0] == lengths[1], f"causal: {lengths[0]} queries, {lengths[1]} keys"


def _overlap(runs: Sequence[Run]) -> bool:
    return any(before[1] > after[0] for before, after in pairwise(sorted(runs)))
