"""AdamW on the slice of one flat buffer that this rank owns.

torch's fused AdamW does the arithmetic, as the function: making the class's object imports torch._dynamo, which takes a
process seconds. This file only cuts the slice where the matrices end, because weight decay applies to matrices only,
and keeps the state as whole slices, as checkpoints store it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.state_part import StatePart, whole_part
from terrace.runtime.states import ADAMW
from terrace.runtime.stored import State, Storage, chunks


class ShardedAdamW:
    """AdamW over `master`, the elements from `start` on of a flat buffer; the buffer's first `num_decayed` elements
    take weight decay.

    `gradient` is the memory where the finished gradient of the same elements stands at `update`. Both are 1-D and of
    one length. `storage` says how states are kept; None: in the dtype of `gradient`.
    """

    def __init__(
        self,
        master: Tensor,
        gradient: Tensor,
        num_decayed: int,
        config: OptimizerConfig,
        *,
        start: int = 0,
        storage: Storage | None = None,
    ) -> None:
        storage, numel, device = storage or Storage(gradient.dtype), master.numel(), master.device
        self.master, self.num_steps = master, 0
        self._share = config.adamw_share
        self.states: tuple[State, ...] = (
            storage.parameters(master, start),
            storage.zeros("exp_avg", numel, start, device),
            storage.zeros("exp_avg_sq", numel, start, device, signed=False),
        )
        self._gradient, self._config, self._start = gradient, config, start
        # A slice may lie before, across or after the end of the decayed elements.
        self._num_decayed = min(max(num_decayed - start, 0), numel)
        self._count = torch.zeros((), dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states[1:])

    @property
    def parts(self) -> list[StatePart]:
        return [whole_part(ADAMW, *(state.tensor for state in self.states))]

    @torch.no_grad()
    def update(self, lr: float, muon_momentum: Tensor | None = None) -> None:
        """One step of AdamW with learning rate `lr`, or under Muon with its share of it."""
        for part in chunks(self.states, self.master.numel(), self._start, self.master.device):
            values = [state.read(part) for state in self.states]
            for inside, decay in self._decays(part):
                self._step([each[inside] for each in values], self._gradient[part][inside], lr, decay)
            for state, each in zip(self.states, values, strict=True):
                state.write(part, each, self.num_steps + 1)
        self.num_steps += 1

    def _decays(self, part: slice) -> Iterator[tuple[slice, float]]:
        cut, numel = min(max(self._num_decayed - part.start, 0), part.stop - part.start), part.stop - part.start
        if cut:
            yield slice(0, cut), self._config.weight_decay
        if cut < numel:
            yield slice(cut, numel), 0.0

    def _step(self, values: list[Tensor], gradient: Tensor, lr: float, decay: float) -> None:
        master, exp_avg, exp_avg_sq = values
        adamw(
            [master],
            [gradient],
            [exp_avg],
            [exp_avg_sq],
            [],
            [self._count.fill_(self.num_steps)],  # which it counts on
            fused=True,
            amsgrad=False,
            beta1=self._config.beta1,
            beta2=self._config.beta2,
            lr=lr * self._share,
            weight_decay=decay,
            eps=self._config.eps,
            maximize=False,
        )
