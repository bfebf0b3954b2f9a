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
from terrace.runtime.stored import State, Storage, chunks


class ShardedSGD:
    """SGD over `master`, the elements from `start` on of a flat buffer; the buffer's first `num_decayed` elements take
    weight decay.

    `gradient` is the memory where the finished gradient of the same elements stands at `update`. `storage` says how
    states are kept.
    """

    def __init__(
        self,
        master: Tensor,
        gradient: Tensor,
        num_decayed: int,
        config: OptimizerConfig,
        *,
        start: int,
        storage: Storage,
    ) -> None:
        self.master, self.num_steps = master, 0
        kept = ("momentum",) if config.momentum_or_default else ()
        self.states: tuple[State, ...] = (
            storage.parameters(master, start),
            *(storage.zeros(name, master.numel(), start, master.device) for name in kept),
        )
        self._gradient, self._config, self._start = gradient, config, start
        self._num_decayed = min(max(num_decayed - start, 0), master.numel())

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states[1:])

    @property
    def parts(self) -> list[StatePart]:
        return [whole_part(self._config.update, *(state.tensor for state in self.states))]

    @torch.no_grad()
    def update(self, lr: float, muon_momentum: Tensor | None = None) -> None:
        for part in chunks(self.states, self.master.numel(), self._start, self.master.device):
            values = [state.read(part) for state in self.states]
            self._step(values, self._gradient[part], self._num_decayed - part.start, lr)
            for state, each in zip(self.states, values, strict=True):
                state.write(part, each, self.num_steps + 1)
        self.num_steps += 1

    def _step(self, values: list[Tensor], gradient: Tensor, num_decayed: int, lr: float) -> None:
        master, *momentum = values
        if self._config.weight_decay and num_decayed > 0:
            master[:num_decayed].mul_(1 - lr * self._config.weight_decay)
        step = gradient
        for each in momentum:
            step = torch.add(gradient, each, alpha=self._config.momentum_or_default, out=each)
        master.add_(step, alpha=-lr)
