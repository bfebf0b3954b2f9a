"""The protocol of the optimizers, and the choice of one for a flat parameter."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from terrace.plan.flats import Extent
from terrace.runtime.adamw import ShardedAdamW
from terrace.runtime.lion import ShardedLion
from terrace.runtime.muon import ShardedMuon
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.sgd import ShardedSGD
from terrace.runtime.state_part import StatePart
from terrace.runtime.stored import State, Storage


class Optimizer(Protocol):
    """Updates `master`, a slice of a flat buffer, from the gradient in memory given at construction."""

    master: Tensor

    @property
    def states(self) -> tuple[State, ...]:
        """All states, `master` included."""

    @property
    def num_steps(self) -> int: ...

    @num_steps.setter
    def num_steps(self, value: int) -> None: ...

    @property
    def nbytes(self) -> int:
        """Bytes of state, without `master`."""

    @property
    def parts(self) -> list[StatePart]:
        """The state that a checkpoint stores; block-coded states are decoded into copies, unless they are open."""

    def update(self, lr: float, muon_momentum: Tensor | None = None) -> None:
        """One step with learning rate `lr`; `muon_momentum` is the gathered flat buffer, under Muon."""


class NoOptimizer:
    """The optimizer of frozen parameters: it has no state and is never asked for an update."""

    def __init__(self) -> None:
        self.master, self.states, self.parts = torch.empty(0), tuple[State, ...](), list[StatePart]()
        self.num_steps, self.nbytes = 0, 0

    def update(self, lr: float, muon_momentum: Tensor | None = None) -> None:
        raise AssertionError("frozen parameters have no update")


def make_optimizer(
    master: Tensor,
    gradient: Tensor,
    start: int,
    extents: Sequence[Extent],
    num_decayed: int,
    config: OptimizerConfig,
    compute: torch.dtype,
    storage: Storage,
) -> Optimizer:
    """The optimizer of the slice `master` that begins at `start` of its flat buffer.

    The first `num_decayed` elements of the buffer take weight decay; `extents` are its matrices that Muon updates.
    `storage` says how states are kept.
    """
    if config.name == "lion":
        return ShardedLion(master, gradient, num_decayed, config, start=start, storage=storage)
    if config.name == "sgd":
        return ShardedSGD(master, gradient, num_decayed, config, start=start, storage=storage)
    if extents:
        return ShardedMuon(master, gradient, start, extents, config, compute, storage)
    return ShardedAdamW(master, gradient, num_decayed, config, start=start, storage=storage)
