"""The optimizer protocol, and the choice of an optimizer for a flat parameter."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from terrace.plan.flats import Extent
from terrace.runtime.adamw import ShardedAdamW
from terrace.runtime.elementwise import StatePart
from terrace.runtime.lion import ShardedLion
from terrace.runtime.muon import ShardedMuon
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.sgd import ShardedSGD
from terrace.runtime.stored import State, Storage


class Optimizer(Protocol):
    """Updates `master`, a slice of a flat buffer, from the gradient buffer given at construction."""

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
        """Bytes of all states except `master`."""

    @property
    def parts(self) -> list[StatePart]:
        """The state that a checkpoint stores. Block-coded states are decoded into copies, unless already decoded."""

    def update(self, lr: float, muon_momentum: Tensor | None = None) -> None:
        """Take one step. Under Muon, `muon_momentum` is the gathered flat buffer."""


class NoOptimizer:
    """Stands in for the optimizer of frozen parameters. It has no state and must not be updated."""

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
    """Make the optimizer of `master`, the slice from `start` on of its flat buffer.

    The buffer's first `num_decayed` elements take weight decay; `extents` are the matrices that Muon updates.
    `storage` is how states are stored.
    """
    if config.name == "lion":
        return ShardedLion(master, gradient, num_decayed, config, start=start, storage=storage)
    if config.name == "sgd":
        return ShardedSGD(master, gradient, num_decayed, config, start=start, storage=storage)
    if extents:
        return ShardedMuon(master, gradient, start, extents, config, compute, storage)
    return ShardedAdamW(master, gradient, num_decayed, config, start=start, storage=storage)
