"""AdamW on the slice of one flat buffer that this rank owns.

The arithmetic is torch's functional fused AdamW: constructing its optimizer class would import torch._dynamo, which
takes seconds. This file splits the slice where the matrices end, because only matrices take weight decay, and keeps
each state as one tensor per slice, as checkpoints store it.
"""

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from terrace.runtime.elementwise import Elementwise
from terrace.runtime.states import ADAMW


class ShardedAdamW(Elementwise):
    """AdamW. Under Muon it updates the other parameters, with `adamw_share` of the learning rate."""

    @property
    def group(self) -> str:
        return ADAMW

    def _step(self, values: list[Tensor], gradient: Tensor, num_decayed: int, lr: float) -> None:
        for inside, decay in (
            (slice(0, num_decayed), self._config.weight_decay),
            (slice(num_decayed, len(gradient)), 0.0),
        ):
            if inside.start == inside.stop:
                continue
            master, exp_avg, exp_avg_sq = (each[inside] for each in values)
            adamw(
                [master],
                [gradient[inside]],
                [exp_avg],
                [exp_avg_sq],
                [],
                # The steps before, which it counts on.
                [torch.full((), self.num_steps, dtype=torch.float32, device=master.device)],
                fused=True,
                amsgrad=False,
                beta1=self._config.beta1,
                beta2=self._config.beta2,
                lr=lr * self._config.adamw_share,
                weight_decay=decay,
                eps=self._config.eps,
                maximize=False,
            )
