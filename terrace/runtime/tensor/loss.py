"""Cross entropy over a vocabulary of which every tensor rank has a part (Megatron-LM 1909.08053, section 3).

A rank computes the logits of its part. Three numbers a token are exchanged: the largest logit, the sum of
exponentials relative to it, and the label's logit where the rank has it. With M the largest of all and Z = sum_r s_r
exp(m_r - M), the loss of a token is M + log Z minus the label's logit, and the gradient of a logit x is exp(x - M) /
Z, less one at the label. No other rank ever sees a logit.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from terrace.model.decoder import IGNORE_INDEX
from terrace.runtime.tensor.line import Line

_CHUNK_NUMEL = 1 << 18  # logits that are worked on at a time in fp32 or more: they stay in a cache


def vocabulary_loss(hidden: Tensor, weight: nn.Parameter, labels: Tensor, part: slice, line: Line) -> Tensor:
    """Return the SUM of the cross entropies of hidden states (B, S, H) against labels (B, S), the same on every rank.

    `weight` (V', H) holds the rows `part` of the output matrix, then padding. Labels are as for
    `terrace.model.decoder.token_loss`. The sum is computed in fp32 at least.
    """
    logits = F.linear(hidden.flatten(0, 1), weight)
    loss: Tensor = _Loss.apply(logits, labels.flatten(), part, line)  # type: ignore[no-untyped-call]
    return loss


class _Loss(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, part: slice, line: Line) -> Tensor:
        here = (labels >= part.start) & (labels < part.stop)
        local = (labels - part.start).masked_fill(~here, 0)
        valid = max(part.stop - part.start, 0)
        wide = torch.promote_types(logits.dtype, torch.float32)
        numbers = torch.empty(3, len(labels), dtype=wide, device=logits.device)
        for rows in _chunks(logits):
            x = logits[rows, :valid].to(wide)
            if valid:
                numbers[0, rows] = x.amax(-1)
                numbers[1, rows] = (x - numbers[0, rows].unsqueeze(-1)).exp_().sum(-1)
                numbers[2, rows] = x.gather(-1, local[rows].unsqueeze(-1)).squeeze(-1).masked_fill(~here[rows], 0.0)
            else:  # a part of nothing but padding
                numbers[:, rows] = torch.tensor([-torch.inf, 0.0, 0.0], device=logits.device).unsqueeze(-1)
        peaks, sums, found = line.every(numbers.view(-1)).view(-1, *numbers.shape).unbind(1)
        peak = peaks.amax(0)
        scale = peak + (sums * (peaks - peak).exp()).sum(0).log()
        counted = labels != IGNORE_INDEX
        ctx.kept = logits, local, here, scale, counted, valid
        return (scale - found.sum(0)).masked_fill(~counted, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits, local, here, scale, counted, valid = ctx.kept
        del ctx.kept
        wide = scale.dtype
        for rows in _chunks(logits):
            x = (logits[rows, :valid].to(wide) - scale[rows].unsqueeze(-1)).exp_()
            if valid:
                x.scatter_add_(-1, local[rows].unsqueeze(-1), -here[rows].to(wide).unsqueeze(-1))
            factor = gradients[0].to(wide) * counted[rows]
            logits[rows, :valid] = x.mul_(factor.unsqueeze(-1))  # the logits' memory becomes their gradient's
        logits[:, valid:] = 0.0
        return logits, None, None, None


def _chunks(logits: Tensor) -> list[slice]:
    step = max(1, _CHUNK_NUMEL // max(1, logits.shape[1])) if logits.device.type == "cpu" else max(1, len(logits))
    return [slice(start, start + step) for start in range(0, len(logits), step)]
