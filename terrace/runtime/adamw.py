"""AdamW on the slice of one flat buffer that this rank owns.

torch's fused AdamW does the arithmetic. This file only cuts the slice where the matrices end, because
weight decay applies to them alone, and keeps the state as whole slices, which is what a checkpoint
stores.
"""

import torch
from torch import Tensor

from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.state_part import StatePart
from terrace.runtime.states import ADAMW, KINDS


class ShardedAdamW:
    """AdamW over `master`, of which the first `num_decayed` elements take weight decay.

    `gradient` is the memory where the finished gradient of the same elements stands at `update`. All
    are 1-D, of one length and dtype.
    """

    def __init__(self, master: Tensor, gradient: Tensor, num_decayed: int, config: OptimizerConfig) -> None:
        self.master = master
        self._share = config.adamw_share
        self.exp_avg = torch.zeros_like(master)
        self.exp_avg_sq = torch.zeros_like(master)
        cut = min(max(num_decayed, 0), master.numel())
        parts = [(slice(0, cut), config.weight_decay), (slice(cut, master.numel()), 0.0)]
        self._leaves: list[Tensor] = []
        groups = []
        for part, decay in parts:
            if part.start < part.stop:
                leaf = master[part]
                leaf.grad = gradient[part]
                groups.append({"params": [leaf], "weight_decay": decay})
                self._leaves.append(leaf)
        self._optimizer = torch.optim.AdamW(
            groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
        )
        for leaf, (part, _) in zip(self._leaves, (p for p in parts if p[0].start < p[0].stop), strict=True):
            self._optimizer.state[leaf] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": self.exp_avg[part],
                "exp_avg_sq": self.exp_avg_sq[part],
            }

    @property
    def nbytes(self) -> int:
        """Bytes of the two moments."""
        return self.exp_avg.nbytes + self.exp_avg_sq.nbytes

    @property
    def num_steps(self) -> int:
        """Number of updates made."""
        return int(self._optimizer.state[self._leaves[0]]["step"].item())

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        for leaf in self._leaves:
            self._optimizer.state[leaf]["step"].fill_(value)

    @property
    def parts(self) -> list[StatePart]:
        """What a checkpoint stores: every element is in one part."""
        values = dict(zip(KINDS[ADAMW], (self.master, self.exp_avg, self.exp_avg_sq), strict=True))
        return [StatePart(group=ADAMW, elements=slice(0, self.master.numel()), values=values)]

    def update(self, lr: float, directions: Tensor | None = None) -> None:
        """One step of AdamW with learning rate `lr`, or under Muon with its share of it."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr * self._share
        self._optimizer.step()
