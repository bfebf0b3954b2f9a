"""The rate of updates on the host's cores: AdamW over states that no cache holds."""

import statistics
import time

import torch
from torch import Tensor

from terrace.accelerator import HOST
from terrace.plan.keep import Keep
from terrace.runtime.adamw import ShardedAdamW
from terrace.runtime.settings import OptimizerConfig

_NUMEL = 1 << 23  # 134 MB of states, gradients and parameters
_ROUNDS = 5
_BYTES = 28  # a parameter: a master copy and moments in fp32 both ways, a gradient and a parameter in bf16


def update_rate(numel: int = _NUMEL) -> float:
    """Bytes per second that AdamW on the host's cores reads and writes (terrace.plan.kept.updated_bytes).

    Its gradients and working copy are in bf16. Takes a fraction of a second.
    """
    gradient, working = (torch.zeros(numel, dtype=torch.bfloat16) for _ in range(2))
    pieces, size = list[tuple[ShardedAdamW, slice]](), Keep().piece
    for first in range(0, numel, size):
        part = slice(first, min(first + size, numel))
        master = torch.zeros(part.stop - part.start)
        pieces.append((ShardedAdamW(master, _Read(gradient[part]), 0, OptimizerConfig()), part))
    rounds_s = list[float]()
    for _ in range(_ROUNDS):
        begin_s = time.perf_counter()
        for optimizer, part in pieces:
            optimizer.update(1e-4)
            working[part].copy_(optimizer.master)
        rounds_s.append(time.perf_counter() - begin_s)
    return _BYTES * numel / statistics.median(rounds_s)


class _Read:
    """A gradient in bf16 that is read in fp32."""

    device, dtype = HOST, torch.float32

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def numel(self) -> int:
        return self._values.numel()

    def __getitem__(self, part: slice) -> Tensor:
        return self._values[part].float().mul_(0.5)
