"""Gates: pure functions from scores to the experts of each token and their weights, a file each. They know no ranks.

Equal scores go to the expert with the lower index, so that a choice is the same wherever it is made. Weights carry the
gradient of the scores, choices none.

Shape legend: T tokens, E experts, k experts of a token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

TINY = 1e-20  # in sums that scores are divided by, where all scores may underflow to zero


class Choice(NamedTuple):
    """Which experts each token passes, and how much each result counts."""

    experts: Tensor  # (T, k) int64, the highest score first; -1: none
    weights: Tensor  # (T, k)
    scores: Tensor | None = None  # (T, E), positive, of which no bias is a part
    is_whole: bool = True  # whether no choice is -1


def best(scores: Tensor, count: int) -> Tensor:
    """Indexes (T, count) of the largest of scores (T, N), the largest first; of equal ones the lower index."""
    # `topk` promises nothing about equal values. A copy: a view would keep the indexes of all experts.
    return scores.detach().sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


def coarse(scores: Tensor) -> Tensor:
    """Scores, not below zero, without the last third of their bits: nearly all that differ by rounding become equal.

    A token that repeats at the beginning of a text has the same score each time but for rounding, which differs from
    plan to plan. A comparison of these scores takes the earlier token under every plan, unless the last bits kept
    differ: for a difference in the last place one pair in 2^8 in fp32, in 2^17 in fp64.
    """
    bits, dropped = (torch.int64, 17) if scores.dtype == torch.float64 else (torch.int32, 8)
    return (scores.detach().contiguous().view(bits) >> dropped << dropped).view(scores.dtype)
