"""Soft-capped logits: y = c tanh(x / c), dy/dx = 1 - (y / c)^2 (Gemma 2, 2408.00118, section 2)."""

from torch import Tensor


def cap_(logits: Tensor, cap: float) -> Tensor:
    """Cap logits in place; `cap` 0: none."""
    return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def slopes(capped: Tensor, cap: float) -> Tensor | None:
    """Elementwise dy/dx of capped logits y; None without a cap."""
    return (capped * capped).mul_(-1.0 / cap**2).add_(1.0) if cap else None
