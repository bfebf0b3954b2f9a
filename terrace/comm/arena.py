"""The memory in which a lane's collectives convert and receive: one buffer that grows to the largest of them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from terrace.comm.ledger import Meter
from terrace.plan.hops import ARENA_ALIGNMENT, arena_bytes


class Arena:
    """Buffers of one collective, in memory shared by all collectives of a lane."""

    def __init__(self, device: torch.device, meter: Meter) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._meter = meter
        self._used = 0

    def begin(self, sizes: Sequence[int]) -> None:
        """Reserve buffers of `sizes` bytes. Invalidates all buffers taken before."""
        needed, self._used = arena_bytes(sizes), 0
        if needed > self._memory.numel():
            self._meter.add("buffers", needed - self._memory.numel())
            self._memory = self._memory.new_empty(0)  # freed before its successor is allocated
            self._memory = self._memory.new_empty(needed)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        start, self._used = self._used, self._used + arena_bytes([size])
        assert self._used <= self._memory.numel(), f"a collective took {self._used} bytes but announced fewer"
        assert start % ARENA_ALIGNMENT == 0, "buffers lie aligned"
        return self._memory[start : start + size].view(dtype).view(*shape)
