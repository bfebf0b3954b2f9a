"""The part that AdamW, Lion and SGD share: the states of a slice, read, updated and written chunk by chunk.

Their update of an element depends on that element alone, so any slice of a flat buffer is updated by itself.
"""

import torch
from torch import Tensor

from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.state_part import StatePart, whole_part
from terrace.runtime.states import KINDS, UNSIGNED
from terrace.runtime.stored import State, Storage, chunks


class Elementwise:
    """An optimizer of `master`, the elements from `start` on of a flat buffer; the buffer's first `num_decayed`
    elements take weight decay.

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
        self._gradient, self._num_decayed, self._config, self._start = gradient, num_decayed, config, start
        self.states: tuple[State, ...] = (
            storage.parameters(master, start),
            *(storage.zeros(kind, numel, start, device, signed=kind not in UNSIGNED) for kind in KINDS[self.group][1:]),
        )

    @property
    def group(self) -> str:
        """The group of its states (`KINDS`)."""
        return self._config.update

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states[1:])

    @property
    def parts(self) -> list[StatePart]:
        return [whole_part(self.group, *(state.tensor for state in self.states))]

    @torch.no_grad()
    def update(self, lr: float, muon_momentum: Tensor | None = None) -> None:
        """One step with learning rate `lr`."""
        for part in chunks(self.states, self.master.numel(), self._start, self.master.device):
            values = [state.read(part) for state in self.states]
            # A part may lie before, across or after the end of the decayed elements.
            num_decayed = min(max(self._num_decayed - self._start - part.start, 0), part.stop - part.start)
            self._step(values, self._gradient[part], num_decayed, lr)
            for state, each in zip(self.states, values, strict=True):
                state.write(part, each, self.num_steps + 1)
        self.num_steps += 1

    def _step(self, values: list[Tensor], gradient: Tensor, num_decayed: int, lr: float) -> None:
        """Update the values of all states, parameters first; the first `num_decayed` parameters decay."""
        raise NotImplementedError
