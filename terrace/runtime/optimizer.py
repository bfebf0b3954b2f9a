"""The optimizer protocol, and the choice of an optimizer for a flat parameter."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from terrace.plan.update import OWN, parse_update
from terrace.runtime.adamw import ShardedAdamW
from terrace.runtime.elementwise import Gradient, StatePart
from terrace.runtime.flat_slices import Matrix
from terrace.runtime.lion import ShardedLion
from terrace.runtime.muon import ShardedMuon
from terrace.runtime.own_rule import ShardedOwn
from terrace.runtime.projected import ShardedProjected
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.sgd import ShardedSGD
from terrace.runtime.stored import State, Storage


class Optimizer(Protocol):
    """Updates a slice of a flat buffer from the gradient buffer given at construction."""

    @property
    def master(self) -> Tensor:
        """The slice; a copy if it is kept below the device."""

    @property
    def masters(self) -> Sequence[tuple[int, State]]:
        """The states that together are `master`, each with its first element."""

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
    def parts(self) -> Iterable[StatePart]:
        """The state that a checkpoint stores, a part at a time.

        Block-coded states are decoded into copies, unless already decoded.
        """

    def update(self, lr: float, gathered: Tensor | None = None) -> None:
        """Take one step. `gathered` is the gathered flat buffer, if matrices are updated as wholes."""


class NoOptimizer:
    """Stands in for the optimizer of frozen parameters, which must not be updated.

    It has no state but frozen parameters that are kept below the device, which `states` then has.
    """

    def __init__(self, *states: State) -> None:
        self.master, self.states, self.parts = torch.empty(0), states, list[StatePart]()
        self.num_steps, self.nbytes, self.masters = 0, 0, list[tuple[int, State]]()

    def update(self, lr: float, gathered: Tensor | None = None) -> None:
        raise AssertionError("frozen parameters have no update")


def make_optimizer(
    master: Tensor,
    gradient: Gradient,
    start: int,
    matrices: Sequence[Matrix],
    num_decayed: int,
    config: OptimizerConfig,
    compute: torch.dtype,
    storage: Storage,
) -> Optimizer:
    """Make the optimizer of `master`, the slice from `start` on of its flat buffer.

    The buffer's first `num_decayed` elements take weight decay; `matrices` are those that are updated as wholes.
    `storage` is how states are stored.
    """
    if config.name == "lion":
        return ShardedLion(master, gradient, num_decayed, config, start=start, storage=storage)
    if config.name == "sgd":
        return ShardedSGD(master, gradient, num_decayed, config, start=start, storage=storage)
    if parse_update(config.update).name == OWN:
        return ShardedOwn(master, gradient, num_decayed, config, start=start, storage=storage)
    if not matrices:
        return ShardedAdamW(master, gradient, num_decayed, config, start=start, storage=storage)
    assert isinstance(gradient, Tensor), "the host's cores update no whole matrices"
    if parse_update(config.update).projects:
        return ShardedProjected(master, gradient, start, matrices, num_decayed, config, compute, storage, ShardedAdamW)
    return ShardedMuon(master, gradient, start, matrices, num_decayed, config, compute, storage, ShardedAdamW)
