"""A rank's micro-batches of each step, as the engine takes them: made on the host, ahead of the step."""

from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from terrace.data.batches import Batches
from terrace.program import Program
from terrace.runtime.batch import Batch
from terrace.train.spreading import Spreading


class Fed(NamedTuple):
    """The micro-batches of a step, and how even it is where ranks attend together (`StepRecord.balance`)."""

    micros: list[Batch]
    balance: float | None


class MicroBatches:
    """Makes the micro-batches of a rank: whole rows, or what `spreading` says. With `pinned` in page-locked memory."""

    def __init__(
        self, batches: Batches, program: Program, rank: int, pinned: bool, spreading: Spreading | None = None
    ) -> None:
        self._batches, self._spreading = batches, spreading
        self._program, self._place, self._pinned = program, program.layout.data_place(rank), pinned

    def step(self, step: int) -> Fed:
        """Return those of a step."""
        if self._spreading is None:
            return Fed([self._rows(step, micro) for micro in range(self._program.num_micros)], None)
        local = self._spreading.step(step)
        micros = [
            cast(Batch, (*self._tensors(micro.inputs, micro.labels, micro.positions), micro.spread))
            for micro in local.micros
        ]
        return Fed(micros, local.balance)

    def _rows(self, step: int, micro: int) -> Batch:
        degree, size = self._program.layout.data_degree, self._program.plan.micro_batch
        return cast(Batch, self._tensors(*self._batches.micro_batch(step, micro, self._place, degree, size)))

    def _tensors(self, *arrays: npt.NDArray[np.int64]) -> tuple[torch.Tensor, ...]:
        tensors = (torch.from_numpy(array) for array in arrays)
        return tuple(each.pin_memory() if self._pinned else each for each in tensors)
