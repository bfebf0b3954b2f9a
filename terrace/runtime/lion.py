"""Lion on the slice of one flat buffer that this rank owns (Chen et al., arXiv 2302.06675, Algorithm 2).

    c = beta1 m + (1 - beta1) g
    w = w - lr (sign(c) + weight_decay w)
    m = beta2 m + (1 - beta2) g

One moment, and nothing that couples elements, so any slice is updated by itself.
"""

import torch
from torch import Tensor

from terrace.model.loss_chunks import slices
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.state_part import StatePart, whole_part
from terrace.runtime.states import LION

# Elements worked on at a time: on a CPU they stay in a cache, on CUDA the temporary tensors stay small.
_CHUNK_NUMEL = {"cpu": 1 << 16}
_LARGE_CHUNK_NUMEL = 1 << 26


class ShardedLion:
    """Lion over `master`; its first `num_decayed` elements take weight decay.

    `gradient` is the memory where the finished gradient of the same elements stands at `update`.
    """

    def __init__(self, master: Tensor, gradient: Tensor, num_decayed: int, config: OptimizerConfig) -> None:
        self.master = master
        self.momentum = torch.zeros_like(master)
        self.num_steps = 0
        self._gradient = gradient
        self._num_decayed = min(max(num_decayed, 0), master.numel())
        self._config = config

    @property
    def nbytes(self) -> int:
        return self.momentum.nbytes

    @property
    def parts(self) -> list[StatePart]:
        return [whole_part(LION, self.master, self.momentum)]

    @torch.no_grad()
    def update(self, lr: float, muon_momentum: Tensor | None = None) -> None:
        config, step = self._config, _CHUNK_NUMEL.get(self.master.device.type, _LARGE_CHUNK_NUMEL)
        if config.weight_decay:
            self.master[: self._num_decayed].mul_(1 - lr * config.weight_decay)
        for part in slices(self.master.numel(), step):
            gradient, momentum = self._gradient[part], self.momentum[part]
            sign = torch.lerp(gradient, momentum, config.beta1).sign_()
            self.master[part].add_(sign, alpha=-lr)
            momentum.lerp_(gradient, 1 - config.beta2)
        self.num_steps += 1
