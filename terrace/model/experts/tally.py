"""Counters of one mixture in a step: tokens per expert, and rows sent, received and multiplied.

A tally is open only during the first forward of a training micro-batch, so that recomputation and evaluation are not
counted.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_SENT, _RECEIVED, _MULTIPLIED = -3, -2, -1  # indices after the experts' counters


class Tally:
    """Adds counts to `numbers` (E + 3), int64. Without `numbers` it stays closed and counts nothing."""

    def __init__(self, numbers: Tensor | None = None) -> None:
        self._numbers, self.is_open = torch.empty(0) if numbers is None else numbers, False

    def choose(self, experts: Tensor) -> None:
        """Count choices (T, k); -1 is none."""
        if self.is_open:
            flat = experts.flatten()
            self._numbers.scatter_add_(0, flat.clamp(min=0), (flat >= 0).to(torch.int64))

    def move(self, sent: int, received: int) -> None:
        """Count rows that left this rank for their experts, and rows that arrived."""
        if self.is_open:
            self._numbers[_SENT] += sent
            self._numbers[_RECEIVED] += received

    def multiply(self, counts: Sequence[int]) -> None:
        """Count the rows of each expert that this rank multiplied."""
        if self.is_open:
            self._numbers[_MULTIPLIED] += sum(counts)
