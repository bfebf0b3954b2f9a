"""Losses of a router, each a sum over tokens, and the function that adds their gradients to the loss's.

Shape legend: T tokens, B sequences, E experts, k experts of a token.
"""

from typing import Any

import torch
from torch import Tensor

from terrace.model.experts.gates import TINY


def sequence_loss(scores: Tensor, experts: Tensor, sequences: Tensor, num_sequences: int) -> Tensor:
    """The sum over sequences of S sum_i f_i P_i (2412.19437, equations 17-20, times S), a scalar.

    `scores` (T, E) are positive, `experts` (T, k) the choices, `sequences` (T) the sequence of each token. f_i is
    E / (k S) times the choices of expert i in a sequence of S tokens, P_i the mean there of its share in a token's
    scores. Choices carry no gradient.
    """
    num_experts, per_token = scores.shape[1], experts.shape[1]
    cells = (sequences.unsqueeze(-1) * num_experts + experts).flatten()
    choices = torch.bincount(cells, minlength=num_sequences * num_experts).view(num_sequences, num_experts)
    lengths = torch.bincount(sequences, minlength=num_sequences).clamp(min=1)
    loads = choices.to(scores.dtype) * num_experts / (per_token * lengths.unsqueeze(-1))  # f, (B, E)
    shares = scores / (scores.sum(-1, keepdim=True) + TINY)  # sigmoids may all underflow
    return (loads.index_select(0, sequences) * shares).sum()


def z_loss(logits: Tensor) -> Tensor:
    """The sum over tokens of logsumexp(z)^2 for logits z (T, E) (2202.08906, equation 5), a scalar."""
    return logits.logsumexp(-1).square().sum()


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
