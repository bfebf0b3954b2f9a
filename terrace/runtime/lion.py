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
from terrace.runtime.stored import State, Storage, chunks

# Elements worked on at a time: on a CPU they stay in a cache, on CUDA the temporary tensors stay small.
_CHUNK_NUMEL = {"cpu": 1 << 16}
_LARGE_CHUNK_NUMEL = 1 << 26


class ShardedLion:
    """Lion over `master`, the elements from `start` on of a flat buffer; the buffer's first `num_decayed` elements take
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
        self.states: tuple[State, ...] = (
            storage.parameters(master, start),
            storage.zeros("momentum", master.numel(), start, master.device),
        )
        self._gradient, self._config, self._start = gradient, config, start
        self._num_decayed = min(max(num_decayed - start, 0), master.numel())

    @property
    def nbytes(self) -> int:
        return self.states[1].nbytes

    @property
    def parts(self) -> list[StatePart]:
        return [whole_part(LION, *(state.tensor for state in self.states))]

    @torch.no_grad()
    def update(self, lr: float, muon_momentum: Tensor | None = None) -> None:
        for part in chunks(self.states, self.master.numel(), self._start, self.master.device):
            values = [state.read(part) for state in self.states]
            self._step(values, self._gradient[part], self._num_decayed - part.start, lr)
            for state, each in zip(self.states, values, strict=True):
                state.write(part, each, self.num_steps + 1)
        self.num_steps += 1

    def _step(self, values: list[Tensor], gradient: Tensor, num_decayed: int, lr: float) -> None:
        master, momentum = values
        config, step = self._config, _CHUNK_NUMEL.get(master.device.type, _LARGE_CHUNK_NUMEL)
        if config.weight_decay and num_decayed > 0:
            master[:num_decayed].mul_(1 - lr * config.weight_decay)
        for part in slices(master.numel(), step):
            sign = torch.lerp(gradient[part], momentum[part], config.beta1).sign_()
            master[part].add_(sign, alpha=-lr)
            momentum[part].lerp_(gradient[part], 1 - config.beta2)
