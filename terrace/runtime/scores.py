"""The largest attention score of each head, measured from queries and keys before a kernel runs.

No kernel of attention returns it, and bounds from lengths of queries and keys are far above it. So the scores are
computed once more, a few queries at a time over the keys that these may see, and only their maximum is kept: the same
product Q K^T as in the kernel, a seventh of the FLOPs of its forward and backward, without a second matrix of scores in
memory. A score is rounded to the dtype of queries. Rounding keeps the order of numbers, so the result is the true
maximum, rounded once. Context ranks measure the keys of each round.

Shape legend: B batch, N query heads, K key-value heads, G = N / K, S sequence, L queries, M keys, D head_dim.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from terrace.accelerator import placed
from terrace.model.attention import (
    NO_SINKS,
    MaskPlan,
    PerMicroBatch,
    Plans,
    document_begins,
    first_keys,
    on_host,
)
from terrace.model.pair_kernels import PairInputs
from terrace.model.sinks import attend
from terrace.plan.score_clip import MOST_SCORES, part_rows


class _Part(NamedTuple):
    """Queries over keys; `hidden` (L, M) are those that a query does not see, None if it sees all."""

    queries: slice
    keys: slice
    hidden: Tensor | None


class Scores:
    """The largest scores so far of the heads with which a rank attends (N), at least 0. Changes only while open."""

    def __init__(self, largest: Tensor) -> None:
        self.largest, self.is_open = largest, False

    def of(self, heads: slice) -> "Scores":
        """Those of some of the heads."""
        found = Scores(self.largest[heads])
        found.is_open = self.is_open
        return found

    @torch.no_grad()
    def add_rows(self, query: Tensor, key: Tensor, first: Tensor) -> None:
        """Take the maximum with causal scores of query (B, N, S, D) and key (B, K, S, D).

        `first` (B or 1, S), on the host, is the first key that a query sees.
        """
        for row in range(len(query)):
            of_row = first[row % len(first)]
            self._add(query[row], key[row], _causal(of_row, self._most(query), query.device))

    @torch.no_grad()
    def add_pair(self, pair: PairInputs) -> None:
        """As `add_rows`, for queries over a part of their keys."""
        if not self.is_open or not pair.query.shape[2] or not pair.key.shape[2]:
            return
        most, (length, num_keys) = self._most(pair.query), (pair.query.shape[2], pair.key.shape[2])
        for query, key in zip(pair.query, pair.key, strict=True):
            if pair.kind == "causal":
                parts = _causal(torch.zeros(length, dtype=torch.int64), most, query.device)
            else:
                parts = _whole(length, num_keys, most, pair.mask)
            self._add(query, key, parts)

    def _most(self, query: Tensor) -> int:
        """Scores of a head that are computed at a time."""
        return max(1, MOST_SCORES[query.device.type] // query.shape[1])

    def _add(self, query: Tensor, key: Tensor, parts: Iterator[_Part]) -> None:
        # query (N, L, D), key (K, M, D). The factor is inside the product, so that fp16 does not overflow before it.
        factor, no_sum, most = 1.0 / math.sqrt(query.shape[2]), query.new_zeros(1, 1, 1), torch.finfo(query.dtype).max
        for part in parts:
            keys = key[:, part.keys].transpose(1, 2)  # (K, D, M)
            rows = query[:, part.queries].reshape(len(key), -1, query.shape[2])  # (K, G L, D)
            scores = torch.baddbmm(no_sum, rows, keys, beta=0, alpha=factor)
            scores = scores.view(len(query), -1, scores.shape[2])  # (N, L, M)
            if part.hidden is not None:
                scores.masked_fill_(part.hidden, -torch.inf)
            found = scores.amax((1, 2)).clamp_(max=most)
            self.largest.copy_(torch.maximum(self.largest, found.to(self.largest.dtype)))
            del scores  # before the next part's are made


def _causal(first: Tensor, most: int, device: torch.device) -> Iterator[_Part]:
    start, (length,) = 0, first.shape
    on_device = placed(first, device)
    while start < length:
        # Documents begin one after the other: the part's first query sees the earliest key.
        low = int(first[start])
        stop = min(length, start + part_rows(start - low, most))
        queries, keys = torch.arange(start, stop, device=device)[:, None], torch.arange(low, stop, device=device)
        yield _Part(slice(start, stop), slice(low, stop), (keys > queries) | (keys < on_device[start:stop, None]))
        start = stop


def _whole(length: int, num_keys: int, most: int, mask: Tensor | None) -> Iterator[_Part]:
    step = max(1, most // num_keys)
    for start in range(0, length, step):
        queries = slice(start, start + step)
        yield _Part(queries, slice(0, num_keys), None if mask is None else mask[queries] == -torch.inf)


NO_SCORES = Scores(torch.empty(0))


class MeasuredPlans:
    """The mask plans of a layer whose scores are measured; `firsts` has the first keys of a micro-batch."""

    def __init__(self, plans: Plans, window: int, scores: Scores, firsts: PerMicroBatch) -> None:
        self.plans, self.window, self._scores, self._firsts = plans, window, scores, firsts

    def plan(self, positions: Tensor | None, query: Tensor) -> MaskPlan:
        """As `Plans.plan`; the plan measures while the scores are open."""
        plan = self.plans.plan(positions, query)
        return _Measured(plan, self.first(positions, query.shape[2]), self._scores) if self._scores.is_open else plan

    def first(self, positions: Tensor | None, sequence: int) -> Tensor:
        """The first key that each query sees, int64 (B or 1, S), on the host."""
        window = self.window
        if positions is not None:
            host = on_host(positions)
            return self._firsts.get(positions, window, lambda: first_keys(document_begins(host), window))
        return (torch.arange(sequence) - (window - 1 if window else sequence)).clamp_(min=0)[None]


class _Measured:
    def __init__(self, plan: MaskPlan, first: Tensor, scores: Scores) -> None:
        self._plan, self._first, self._scores = plan, first, scores

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor = NO_SINKS) -> Tensor:
        """Attention output (B, N, S, D), after the scores of its queries and keys were measured."""
        if self._scores.is_open:
            self._scores.add_rows(query.detach(), key.detach(), self._first)
        return attend(query, key, value, self._plan, sinks)
