"""SGD on the slice of one flat buffer that this rank owns, as torch.optim.SGD without dampening and Nesterov.

    w = w - lr weight_decay w
    v = momentum v + g
    w = w - lr v

Weight decay is decoupled, as in every optimizer here; without momentum this equals torch's coupled decay. v starts at
zero. Without momentum v is the gradient, and there is no state.
"""

import torch
from torch import Tensor

from terrace.runtime.elementwise import Elementwise


class ShardedSGD(Elementwise):
    def _step(self, values: list[Tensor], gradient: Tensor, num_decayed: int, lr: float) -> None:
        master, *momentum = values
        if self._config.weight_decay:
            master[:num_decayed].mul_(1 - lr * self._config.weight_decay)
        step = gradient
        for each in momentum:
            step = torch.add(gradient, each, alpha=self._config.momentum_or_default, out=each)
        master.add_(step, alpha=-lr)
