"""Per-token log-probabilities of labels and entropies from a decoder's head, for losses other than cross entropy.

With logits x = h W^T, Z = sum of exp(x), p = exp(x) / Z, a token with label y has

    log-probability  l = x[y] - log Z         dl/dx = onehot(y) - p
    entropy          e = -sum p log p         de/dx = -p (log p + e)

Logits exist for one chunk of tokens at a time. A loss may need the numbers of all tokens before any gradient is
known, so the backward recomputes the logits, unless a single chunk covers all and is kept. Cross entropy, whose
gradient is known at once, has its own form (terrace.runtime.head).

Shape legend: N tokens, B rows, S tokens of a row, H hidden, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from terrace.model.decoder import IGNORE_INDEX
from terrace.model.loss_chunks import chunk_rows, part_rows, slices
from terrace.runtime.head import cap_, gradients_through_logits

# As large as the logits of a part, in fp32 at least, while its numbers or gradients are computed.
OPERANDS = 5


@dataclass(frozen=True, eq=False)
class TokenNumbers:
    """Per-token numbers of a micro-batch, (B, S) in fp32 at least; 0 where the label is ignored.

    `entropies` are None if a tensor axis splits the vocabulary.
    """

    log_probs: Tensor
    entropies: Tensor | None


def token_numbers(hidden: Tensor, weight: nn.Parameter, labels: Tensor, cap: float = 0.0) -> TokenNumbers:
    """Token numbers from normalised hidden states (B, S, H), an output matrix (V, H) and labels (B, S).

    Labels are as for `terrace.model.decoder.token_loss`; `cap` bounds the logits, 0 is no cap.
    """
    results: tuple[Tensor, Tensor] = _Numbers.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, 1), weight, labels.flatten(), cap
    )
    log_probs, entropies = (each.view(labels.shape) for each in results)
    return TokenNumbers(log_probs, entropies)


class _Numbers(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: nn.Parameter, labels: Tensor, cap: float) -> tuple[Tensor, Tensor]:
        matrix, counted = weight.detach(), labels != IGNORE_INDEX
        at = labels.masked_fill(~counted, 0)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        scale, log_probs, entropies = torch.empty(3, len(labels), dtype=wide, device=hidden.device).unbind()
        chunks = slices(len(hidden), chunk_rows(len(matrix), hidden.device.type))
        for chunk in chunks:
            logits = cap_(hidden[chunk] @ matrix.t(), cap)
            for rows in slices(len(logits), _part_rows(logits)):
                x = logits[rows].to(wide)
                of_rows = slice(chunk.start + rows.start, chunk.start + rows.start + len(x))
                scale[of_rows] = x.logsumexp(-1)
                log_chances = x - scale[of_rows].unsqueeze(-1)
                log_probs[of_rows] = log_chances.gather(-1, at[of_rows].unsqueeze(-1)).squeeze(-1)
                # Not log Z - sum p x, which cancels where logits are large. -inf has no chance and must not make nan.
                chances = log_chances.exp()
                entropies[of_rows] = -chances.mul_(log_chances.clamp_(min=torch.finfo(wide).min)).sum(-1)
        # A single chunk is small enough to keep; more are computed again.
        ctx.kept = hidden, logits if len(chunks) == 1 else None, at, counted, scale, entropies
        ctx.weight, ctx.cap = weight, cap
        ctx.set_materialize_grads(False)
        return log_probs.masked_fill(~counted, 0.0), entropies.masked_fill(~counted, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, logits, at, counted, scale, entropies = ctx.kept
        # Frees the kept logits as soon as they are turned into gradients.
        del ctx.kept
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        of_log_probs, of_entropies = (None if each is None else each.to(scale.dtype) * counted for each in gradients)

        def to_gradient(x: Tensor, chunk: slice) -> None:
            for rows in slices(len(x), _part_rows(x)):
                part = x[rows]
                own = slice(chunk.start + rows.start, chunk.start + rows.start + len(part))
                x[rows] = _gradient(
                    part.to(scale.dtype) - scale[own].unsqueeze(-1),
                    at[own],
                    entropies[own],
                    None if of_log_probs is None else of_log_probs[own],
                    None if of_entropies is None else of_entropies[own],
                )

        found = gradients_through_logits(
            hidden, ctx.weight, logits, to_gradient, of_hidden=needs_hidden, of_weight=needs_weight, cap=ctx.cap
        )
        return *found, None, None


def _gradient(
    log_chances: Tensor, at: Tensor, entropies: Tensor, of_log_probs: Tensor | None, of_entropies: Tensor | None
) -> Tensor:
    """Gradient of logits from their log-probabilities (n, V), labels, entropies and both numbers' gradients (n)."""
    chances = log_chances.exp()
    gradient = torch.zeros_like(chances)
    if of_entropies is not None:
        finite = log_chances.clamp_(min=torch.finfo(chances.dtype).min)
        gradient.sub_(chances * (finite + entropies.unsqueeze(-1)) * of_entropies.unsqueeze(-1))
    if of_log_probs is not None:
        gradient.sub_(chances.mul_(of_log_probs.unsqueeze(-1)))
        gradient.scatter_add_(-1, at.unsqueeze(-1), of_log_probs.unsqueeze(-1))
    return gradient


def _part_rows(logits: Tensor) -> int:
    return part_rows(len(logits), logits.shape[1], logits.device.type, OPERANDS)
