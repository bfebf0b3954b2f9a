"""Numbers of one mixture in a step: tokens of every expert, and rows that were sent, received and multiplied.

A mixture adds to its tally while the tally is open: in the first forward of a micro-batch of a training step, so that
neither recomputation nor an evaluation counts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_SENT, _RECEIVED, _MULTIPLIED = -3, -2, -1  # places behind the experts


class Tally:
    """Adds to `numbers` (E + 3) int64; a tally without any is never opened."""

    def __init__(self, numbers: Tensor | None = None) -> None:
        self._numbers, self.is_open = torch.empty(0) if numbers is None else numbers, False

    def choose(self, experts: Tensor) -> None:
        """Choices (T, k) of tokens; -1 is none."""
        if self.is_open:
            flat = experts.flatten()
            self._numbers.scatter_add_(0, flat.clamp(min=0), (flat >= 0).to(torch.int64))

    def move(self, sent: int, received: int) -> None:
        """Rows that left this rank for their experts, and that came."""
        if self.is_open:
            self._numbers[_SENT] += sent
            self._numbers[_RECEIVED] += received

    def multiply(self, counts: Sequence[int]) -> None:
        """Rows of each expert that this rank multiplied."""
        if self.is_open:
            self._numbers[_MULTIPLIED] += sum(counts)
