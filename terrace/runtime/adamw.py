"""AdamW on the slice of one flat buffer that this rank owns.

torch's fused AdamW does the arithmetic, as the function: making the class's object imports torch._dynamo, which takes a
process seconds. This file only cuts the slice where the matrices end, because weight decay applies to matrices only,
and keeps the state as whole slices, as checkpoints store it.
"""

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.state_part import StatePart, whole_part
from terrace.runtime.states import ADAMW


class ShardedAdamW:
    """AdamW over `master`; its first `num_decayed` elements take weight decay.

    `gradient` is the memory where the finished gradient of the same elements stands at `update`. All
    are 1-D, of one length and dtype.
    """

    def __init__(self, master: Tensor, gradient: Tensor, num_decayed: int, config: OptimizerConfig) -> None:
        self.master = master
        self._share = config.adamw_share
        self.exp_avg = torch.zeros_like(master)
        self.exp_avg_sq = torch.zeros_like(master)
        self._gradient, self._config = gradient, config
        # A slice may lie before, across or after the end of the decayed elements.
        cut = min(max(num_decayed, 0), master.numel())
        parts = ((slice(0, cut), config.weight_decay), (slice(cut, master.numel()), 0.0))
        self._parts = [(part, decay) for part, decay in parts if part.start < part.stop]
        self._steps = [torch.zeros((), dtype=torch.float32, device=master.device) for _ in self._parts]

    @property
    def nbytes(self) -> int:
        return self.exp_avg.nbytes + self.exp_avg_sq.nbytes

    @property
    def num_steps(self) -> int:
        return int(self._steps[0].item())

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        for step in self._steps:
            step.fill_(value)

    @property
    def parts(self) -> list[StatePart]:
        return [whole_part(ADAMW, self.master, self.exp_avg, self.exp_avg_sq)]

    @torch.no_grad()
    def update(self, lr: float, muon_momentum: Tensor | None = None) -> None:
        """One step of AdamW with learning rate `lr`, or under Muon with its share of it."""
        for (part, decay), step in zip(self._parts, self._steps, strict=True):
            adamw(
                [self.master[part]],
                [self._gradient[part]],
                [self.exp_avg[part]],
                [self.exp_avg_sq[part]],
                [],
                [step],
                fused=True,
                amsgrad=False,
                beta1=self._config.beta1,
                beta2=self._config.beta2,
                lr=lr * self._share,
                weight_decay=decay,
                eps=self._config.eps,
                maximize=False,
            )
