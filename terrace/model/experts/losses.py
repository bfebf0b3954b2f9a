"""Losses of a router, each a sum over tokens, and the function that adds their gradients to the loss's.

A token counts `weights` (T) times, or once without them (terrace.runtime.batch.shares_of).

Shape legend: T tokens, B sequences, E experts, k experts of a token.
"""

from typing import Any

import torch
from torch import Tensor

from terrace.model.experts.gates import TINY


def choices_by_sequence(experts: Tensor, sequences: Tensor, num_sequences: int, num_experts: int) -> Tensor:
    """The choices (T, k) of each expert in each sequence, int64 (B, E); `sequences` (T) has the sequence of a token."""
    cells = (sequences.unsqueeze(-1) * num_experts + experts).flatten()
    # bincount would wait for the device, to learn its length.
    counts = cells.new_zeros(num_sequences * num_experts).scatter_add_(0, cells, torch.ones_like(cells))
    return counts.view(num_sequences, num_experts)


def loads_of(choices: Tensor, dtype: torch.dtype) -> Tensor:
    """f, E times the part of each expert in choices (..., E), in `dtype`; 0 where there are none."""
    return choices.to(dtype) * choices.shape[-1] / choices.sum(-1, keepdim=True).clamp(min=1)


def share_loss(scores: Tensor, loads: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sum over tokens of sum_i f_i s_i / sum_j s_j, a scalar, for scores s (T, E), positive, and loads f.

    With f (T, E) of the sequence of each token it is the sum of S sum_i f_i P_i over sequences (2412.19437, equations
    17-20, times S); with f (E) of a whole step, of all its tokens (2101.03961, equations 4-6). Loads carry no gradient.
    """
    shares = scores / (scores.sum(-1, keepdim=True) + TINY)  # sigmoids may all underflow
    return _summed((loads * shares).sum(-1), weights)


def z_loss(logits: Tensor, weights: Tensor | None = None) -> Tensor:
    """The sum over tokens of logsumexp(z)^2 for logits z (T, E) (2202.08906, equation 5), a scalar."""
    return _summed(logits.logsumexp(-1).square(), weights)


def _summed(of_tokens: Tensor, weights: Tensor | None) -> Tensor:
    return of_tokens.sum() if weights is None else (of_tokens * weights.to(of_tokens.dtype)).sum()


def add_losses(weights: Tensor, losses: Tensor, sums: Tensor) -> Tensor:
    """`weights` unchanged; a backward through them adds the gradient of `losses` (n), and `losses` to `sums`.

    So the losses act without being in the loss, and are counted when their gradient is.
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
