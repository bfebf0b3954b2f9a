"""Cross entropy with the vocabulary split over tensor ranks (Megatron-LM 1909.08053, section 3).

A rank computes the logits of its part. Three numbers per token are exchanged: the largest logit m_r, the sum s_r of
exponentials relative to it, and the label's logit if the rank has it. With M the largest of all and Z = sum_r s_r
exp(m_r - M), the loss of a token is M + log Z minus the label's logit, and the gradient of a logit x is exp(x - M) /
Z, less one at the label. Logits are never sent.

The numbers of all tokens are sent in one message, so the forward needs logits for the numbers and the backward for
the gradients. They are computed in chunks of tokens, and recomputed in the backward unless a single chunk covers all
and is kept.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from terrace.model.decoder import IGNORE_INDEX
from terrace.model.loss_chunks import chunk_rows, part_rows, slices
from terrace.runtime.head import cap_, gradients_through_logits
from terrace.runtime.tensor.axis_comm import AxisComm, apply

# As large as the logits of a part, in fp32 at least, while its numbers or gradients are computed.
OPERANDS = 2


def vocabulary_losses(
    hidden: Tensor, weight: nn.Parameter, labels: Tensor, part: slice, comm: AxisComm, cap: float = 0.0, unused: int = 0
) -> Tensor:
    """Cross entropies (B, S) of hidden states (B, S, H) and labels (B, S), equal on every rank.

    `weight` (V', H) holds the rows `part` of the output matrix, then padding. Labels are as for
    `terrace.model.decoder.token_loss`. Losses are in fp32 at least, and 0 for ignored labels. `cap` bounds the
    logits; 0 is no cap. `unused` numbers of each token are sent beside the three, where the program declares more.
    """
    flat = hidden.flatten(0, 1), weight, labels.flatten()
    return apply(_Losses, *flat, part, comm, cap, unused).view(labels.shape)


class _Losses(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: nn.Parameter,
        labels: Tensor,
        part: slice,
        comm: AxisComm,
        cap: float,
        unused: int,
    ) -> Tensor:
        here = (labels >= part.start) & (labels < part.stop)
        # Labels of other ranks point at row 0 and are masked out later.
        local = (labels - part.start).masked_fill(~here, 0)
        valid = max(part.stop - part.start, 0)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        numbers = torch.zeros(3 + unused, len(labels), dtype=wide, device=hidden.device)
        chunks = slices(len(hidden), chunk_rows(len(weight), hidden.device.type))
        for chunk in chunks:
            logits = cap_(hidden[chunk] @ weight.detach().t(), cap)
            _take_numbers(logits[:, :valid], local[chunk], here[chunk], numbers[:3, chunk])
        # One message for all numbers of all tokens.
        peaks, sums, found, *_ = comm.every(numbers.view(-1)).view(-1, *numbers.shape).unbind(1)
        peak = peaks.amax(0)
        # log Z: sums of all ranks, rescaled to the common maximum.
        scale = peak + (sums * (peaks - peak).exp()).sum(0).log()
        counted = labels != IGNORE_INDEX
        # A single chunk is small enough to keep; more are computed again.
        ctx.kept = hidden, logits if len(chunks) == 1 else None, local, here, scale, counted, valid
        ctx.weight, ctx.cap = weight, cap
        losses: Tensor = (scale - found.sum(0)).masked_fill(~counted, 0.0)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, logits, local, here, scale, counted, valid = ctx.kept
        # Frees the kept logits as soon as they are turned into gradients.
        del ctx.kept
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        factor = gradients[0].to(scale.dtype) * counted

        def to_gradient(x: Tensor, chunk: slice) -> None:
            _to_gradient(x, local[chunk], here[chunk], scale[chunk], factor[chunk], valid)

        found = gradients_through_logits(
            hidden, ctx.weight, logits, to_gradient, of_hidden=needs_hidden, of_weight=needs_weight, cap=ctx.cap
        )
        return *found, None, None, None, None, None


def _take_numbers(logits: Tensor, local: Tensor, here: Tensor, numbers: Tensor) -> None:
    """Fill `numbers` (3, n) from logits (n, v): largest logit, sum of exponentials, the label's logit or 0."""
    for rows in slices(len(logits), _part_rows(logits)):
        x = logits[rows].to(numbers.dtype)
        if logits.shape[1]:
            numbers[0, rows] = x.amax(-1)
            numbers[1, rows] = (x - numbers[0, rows].unsqueeze(-1)).exp_().sum(-1)
            numbers[2, rows] = x.gather(-1, local[rows].unsqueeze(-1)).squeeze(-1).masked_fill(~here[rows], 0.0)
        else:  # a part of nothing but padding
            numbers[:, rows] = 0.0
            numbers[0, rows] = -torch.inf


def _to_gradient(logits: Tensor, local: Tensor, here: Tensor, scale: Tensor, factor: Tensor, valid: int) -> None:
    """Replace logits (n, V') by their gradient in place; padding gets 0."""
    for rows in slices(len(logits), _part_rows(logits)):
        x = (logits[rows, :valid].to(scale.dtype) - scale[rows].unsqueeze(-1)).exp_()
        if valid:
            x.scatter_add_(-1, local[rows].unsqueeze(-1), -here[rows].to(scale.dtype).unsqueeze(-1))
        logits[rows, :valid] = x.mul_(factor[rows].unsqueeze(-1))
    # Padding rows of the matrix must get no gradient.
    logits[:, valid:] = 0.0


def _part_rows(logits: Tensor) -> int:
    return part_rows(len(logits), logits.shape[1], logits.device.type, OPERANDS)
