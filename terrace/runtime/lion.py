"""Lion on the slice of one flat buffer that this rank owns (Chen et al., arXiv 2302.06675, Algorithm 2).

    c = beta1 m + (1 - beta1) g
    w = w - lr (sign(c) + weight_decay w)
    m = beta2 m + (1 - beta2) g

It has one moment and is elementwise, so any slice can be updated separately.
"""

import torch
from torch import Tensor

from terrace.model.loss_chunks import slices
from terrace.runtime.elementwise import Elementwise

# Elements worked on at a time: on a CPU they stay in a cache, on CUDA the temporary tensors stay small.
_CHUNK_NUMEL = {"cpu": 1 << 16}
_LARGE_CHUNK_NUMEL = 1 << 26


class ShardedLion(Elementwise):
    def _step(self, values: list[Tensor], gradient: Tensor, num_decayed: int, lr: float) -> None:
        master, momentum = values
        config, step = self._config, _CHUNK_NUMEL.get(master.device.type, _LARGE_CHUNK_NUMEL)
        if config.weight_decay:
            master[:num_decayed].mul_(1 - lr * config.weight_decay)
        for part in slices(master.numel(), step):
            sign = torch.lerp(gradient[part], momentum[part], config.beta1).sign_()
            master[part].add_(sign, alpha=-lr)
            momentum[part].lerp_(gradient[part], 1 - config.beta2)
