"""Memory of the host in which states of a device rest, piece by piece, as in a file (terrace.runtime.kept.file)."""

from collections.abc import Sequence
from itertools import accumulate
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch

from terrace.base.errors import ConfigError
from terrace.base.words import quantity


class HostMemory:
    """Pieces of `sizes` bytes in memory that the system may page, initially zero. Raises `ConfigError` without room.

    The ring's slots are page-locked; copies between both run on the lanes' threads.
    """

    words = ""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._starts = (0, *accumulate(self.sizes))
        try:
            memory = mmap(-1, max(1, self._starts[-1]), flags=MAP_PRIVATE | MAP_ANONYMOUS)
        except OSError as error:
            raise ConfigError(
                f"the host has no {quantity(self._starts[-1], 'B')} for the states of one rank: shard them over more "
                "ranks, or write 'disk' for 'host' in plan.keep"
            ) from error
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)

    def read(self, number: int, memory: memoryview) -> None:
        size = self.sizes[number]
        # By torch, which lets other threads run meanwhile.
        torch.frombuffer(memory, dtype=torch.uint8, count=size).copy_(self.piece(number))

    def write(self, number: int, memory: memoryview) -> None:
        self.piece(number).copy_(torch.frombuffer(memory, dtype=torch.uint8, count=self.sizes[number]))

    def close(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def piece(self, number: int) -> torch.Tensor:
        return self._memory[self._starts[number] : self._starts[number + 1]]
