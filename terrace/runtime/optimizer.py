"""The optimizers, as a shard sees them."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from terrace.runtime.adamw import ShardedAdamW
from terrace.runtime.lion import ShardedLion
from terrace.runtime.muon import Extent, ShardedMuon
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.state_part import StatePart


class Optimizer(Protocol):
    """Updates `master`, a slice of a flat buffer, from the gradient that stands in memory it was given."""

    master: Tensor

    @property
    def num_steps(self) -> int:
        """Number of updates made."""

    @num_steps.setter
    def num_steps(self, value: int) -> None: ...

    @property
    def nbytes(self) -> int:
        """Bytes of its state beside `master`."""

    @property
    def parts(self) -> list[StatePart]:
        """What a checkpoint stores."""

    def update(self, lr: float, muon_momentum: Tensor | None = None) -> None:
        """One step with learning rate `lr`; `muon_momentum` is what ORTHOGONALISE gathered, for those that need it."""


def make_optimizer(
    master: Tensor,
    gradient: Tensor,
    start: int,
    extents: Sequence[Extent],
    num_decayed: int,
    config: OptimizerConfig,
    compute: torch.dtype,
) -> Optimizer:
    """The optimizer of the slice `master` that begins at `start` of its flat buffer.

    Of the buffer the first `num_decayed` elements take weight decay; `extents` are its matrices that Muon updates.
    """
    if config.name == "lion":
        return ShardedLion(master, gradient, num_decayed - start, config)
    if extents:
        return ShardedMuon(master, gradient, start, extents, config, compute)
    return ShardedAdamW(master, gradient, num_decayed - start, config)
