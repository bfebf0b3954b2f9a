"""SGD on the slice of one flat buffer that this rank owns, as torch.optim.SGD without dampening and Nesterov.

    w = w - lr weight_decay w
    v = momentum v + g
    w = w - lr v

Weight decay is decoupled, as in every optimizer here; without momentum that is torch's coupled decay. v begins at zero.
Without momentum v is the gradient, and there is no state.
"""

import torch
from torch import Tensor

from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.state_part import StatePart, whole_part


class ShardedSGD:
    """SGD over `master`; its first `num_decayed` elements take weight decay.

    `gradient` is the memory where the finished gradient of the same elements stands at `update`.
    """

    def __init__(self, master: Tensor, gradient: Tensor, num_decayed: int, config: OptimizerConfig) -> None:
        self.master = master
        self.momentum = torch.zeros_like(master) if config.momentum_or_default else None
        self.num_steps = 0
        self._gradient = gradient
        self._num_decayed = min(max(num_decayed, 0), master.numel())
        self._config = config

    @property
    def nbytes(self) -> int:
        return 0 if self.momentum is None else self.momentum.nbytes

    @property
    def parts(self) -> list[StatePart]:
        kept = () if self.momentum is None else (self.momentum,)
        return [whole_part(self._config.update, self.master, *kept)]

    @torch.no_grad()
    def update(self, lr: float, muon_momentum: Tensor | None = None) -> None:
        if self._config.weight_decay:
            self.master[: self._num_decayed].mul_(1 - lr * self._config.weight_decay)
        step = self._gradient
        if self.momentum is not None:
            step = torch.add(step, self.momentum, alpha=self._config.momentum_or_default, out=self.momentum)
        self.master.add_(step, alpha=-lr)
        self.num_steps += 1
