"""Router losses, each a sum over tokens, and the autograd function that adds their gradients.

Tokens are weighted by `weights` (T), by default 1 (terrace.runtime.batch.shares_of).

Shape legend: T tokens, B sequences, E experts, k experts of a token.
"""

from typing import Any

import torch
from torch import Tensor

from terrace.accelerator import occurrences
from terrace.model.experts.gates import TINY


def choices_by_sequence(experts: Tensor, sequences: Tensor, num_sequences: int, num_experts: int) -> Tensor:
    """Count the choices `experts` (T, k) per sequence and expert, int64 (B, E); `sequences` (T) as in `Passage`."""
    cells = (sequences.unsqueeze(-1) * num_experts + experts).flatten()
    return occurrences(cells, num_sequences * num_experts).view(num_sequences, num_experts)


def loads_of(choices: Tensor, dtype: torch.dtype) -> Tensor:
    """Relative loads f: E times each expert's fraction of choices (..., E), in `dtype`; 0 if there are no choices."""
    return choices.to(dtype) * choices.shape[-1] / choices.sum(-1, keepdim=True).clamp(min=1)


def share_loss(scores: Tensor, loads: Tensor, weights: Tensor | None = None) -> Tensor:
    """Balance loss, a scalar: the sum over tokens of sum_i f_i s_i / sum_j s_j for positive scores s (T, E).

    With loads f (T, E) of each token's sequence, this is S sum_i f_i P_i summed over sequences (2412.19437, equations
    17-20, times S); with f (E), the loss over a whole step (2101.03961, equations 4-6). Loads have no gradient.
    """
    shares = scores / (scores.sum(-1, keepdim=True) + TINY)  # sigmoids may all underflow
    return _summed((loads * shares).sum(-1), weights)


def z_loss(logits: Tensor, weights: Tensor | None = None) -> Tensor:
    """z-loss, a scalar: the sum over tokens of logsumexp(z)^2 for logits z (T, E) (2202.08906, equation 5)."""
    return _summed(logits.logsumexp(-1).square(), weights)


def _summed(of_tokens: Tensor, weights: Tensor | None) -> Tensor:
    return of_tokens.sum() if weights is None else (of_tokens * weights.to(of_tokens.dtype)).sum()


def add_losses(weights: Tensor, losses: Tensor, sums: Tensor) -> Tensor:
    """Return `weights` unchanged; their backward also propagates into `losses` (n) and adds these to `sums`.

    The losses thereby contribute gradients without being part of the loss, and are counted once per backward.
    """
    result: Tensor = _Added.apply(weights, losses, sums)  # type: ignore[no-untyped-call]
    return result


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, losses: Tensor, sums: Tensor) -> Tensor:
        ctx.losses, ctx.sums = losses.detach(), sums
        return weights.view_as(weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.sums.add_(ctx.losses)
        return gradient, torch.ones_like(ctx.losses), None
