"""Gates, one per file: pure functions from scores to the experts of each token and their weights.

Of equal scores the expert with the lower index wins, so that choices are deterministic. Gradients flow through weights,
not through choices.

Shape legend: T tokens, E experts, k experts of a token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

NO_SCORES = torch.empty(0)  # of a choice without scores: its weights are final
TINY = 1e-20  # added to denominators, since all scores may underflow to zero


class Choice(NamedTuple):
    experts: Tensor  # (T, k) int64, the highest score first; -1: none
    weights: Tensor  # (T, k)
    scores: Tensor = NO_SCORES  # (T, E), positive, without bias
    is_whole: bool = True  # whether no choice is -1


def best(scores: Tensor, count: int) -> Tensor:
    """Indices (T, count) of the largest of scores (T, N), in descending order; of equal scores the lower index."""
    # Not `topk`, which does not order equal values. Copied, since a view would keep the indices of all experts.
    return scores.detach().sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


def coarse(scores: Tensor) -> Tensor:
    """Truncate the mantissa of non-negative scores, so that nearly all scores that differ only by rounding are equal.

    Repeated tokens at the beginning of a document have equal scores except for rounding, which depends on the plan.
    With truncated scores, a stable comparison prefers the earlier token under every plan, unless the remaining bits
    differ: for a difference of one unit in the last place, in one of 2^8 cases in fp32, one of 2^17 in fp64.
    """
    bits, dropped = (torch.int64, 17) if scores.dtype == torch.float64 else (torch.int32, 8)
    return (scores.detach().contiguous().view(bits) >> dropped << dropped).view(scores.dtype)
