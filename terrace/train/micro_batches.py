"""Makes a rank's micro-batches on the host, ahead of the step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from terrace.data.batches import Arrays, Batches, micros_of_rank
from terrace.data.eval_batches import EvalBatches
from terrace.plan.dims import has_routers
from terrace.program.program import Program
from terrace.runtime.batch import Batch
from terrace.runtime.further_tokens import further_columns
from terrace.train.context_batches import ContextBatches
from terrace.train.deals import Shares


class StepBatches(NamedTuple):
    """A step's micro-batches, its `StepRecord.balance`, and the tokens trained on over all ranks (None: counted from
    the labels).

    `beside` are the micro-batches of another model's forward, where its plan divides the step otherwise; `time_s` are
    seconds already spent on the step, by category.
    """

    micros: list[Batch]
    balance: float | None
    num_tokens: int | None = None
    beside: Sequence[Batch] = ()
    time_s: Mapping[str, float] = MappingProxyType({})


class MicroBatches:
    """Makes a rank's micro-batches from whole rows, or from local tokens if `context` is given; in page-locked memory
    if `pinned`. `shares_at` are the shares of members in a step (terrace.train.deals), by default the program's.
    """

    def __init__(
        self,
        batches: Batches | EvalBatches,
        program: Program,
        rank: int,
        pinned: bool,
        context: ContextBatches | None = None,
        shares_at: Callable[[int], Shares] | None = None,
    ) -> None:
        self._batches, self._context, self._has_routers = batches, context, has_routers(program.blocks)
        self._program, self._pinned = program, pinned
        self._depths = program.blocks[-1].operations.widths[0] - 1
        self._shares_at = shares_at or (lambda step: program.plan.shares)
        # Tensor and pipeline ranks of one data rank read the same rows.
        self._place = program.layout.data_rank(rank), program.layout.data_degree, program.plan.micro_batch

    def deal(self, place: int, degree: int, shares: tuple[int, ...]) -> None:
        """From now on this rank is data rank `place` of `degree`, in equal groups with these `shares`.

        A share is the number of micro-batches of a rank in a step.
        """
        self._place = place, degree, self._place[2]
        self._shares_at = lambda step: shares

    def step(self, step: int) -> StepBatches:
        if self._context is None:
            rows = self._batches.micro_batches(step, *self._place, self._shares_at(step))
            return StepBatches([self._whole(step, micro, arrays) for micro, arrays in enumerate(rows)], None)
        local = self._context.step(step, self._has_routers, self._depths)
        micros = [
            Batch(
                *map(self._tensor, (micro.inputs, micro.labels, micro.positions)),
                token_layout=micro.token_layout,
                places=None if micro.places is None else self._tensor(micro.places),
                shares=None if micro.shares is None else self._tensor(micro.shares),
                columns=further_columns(list(map(self._tensor, micro.further))),
            )
            for micro in local.micros
        ]
        return StepBatches(micros, local.balance)

    def _whole(self, step: int, micro: int, arrays: Arrays) -> Batch:
        inputs, labels, *positions = map(self._tensor, arrays)
        if not self._has_routers:
            return Batch(inputs, labels, *positions)
        (place, degree, size), shares = self._place, self._shares_at(step)
        micros = micros_of_rank(self._batches.batch // size, place, degree, shares)
        first = step * self._batches.batch + int(micros[micro]) * size
        lengths, pairs = None, self._batches.pairs
        if pairs is not None:
            assert isinstance(self._batches, Batches), "pairs are not evaluated"
            samples = self._batches.samples_of(step, *self._place, shares)
            lengths = torch.from_numpy(pairs.lengths[samples[micro * size : (micro + 1) * size]])
        batch = Batch(inputs, labels, *positions).with_places(first, lengths=lengths)
        if not self._pinned or batch.places is None:
            return batch
        return replace(batch, places=batch.places.pin_memory())

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        # Page-locked memory lets the copy to a GPU overlap with compute.
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._pinned else tensor
