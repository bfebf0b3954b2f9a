"""Interface of a mesh axis that sends messages inside blocks: the tensor and the context axis."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from terrace.plan.wire import MessageClass
from terrace.runtime.batch import Batch
from terrace.runtime.in_block_comm import InBlockComm


class EdgeComm(Protocol):
    """Splits an activation before it is sent to another stage, and gathers a received one."""

    @property
    def place(self) -> int:
        """Index of the part that this rank sends and receives."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather x (m) from all ranks, (n m)."""


class InBlockAxis:
    """An axis that has replaced modules or attention in the blocks of a rank.

    An axis overrides only the methods that it needs. The step runner calls them on every axis, in order of
    application, and knows nothing else about it.
    """

    in_block: InBlockComm

    @property
    def declared(self) -> Mapping[tuple[MessageClass, str], int]:
        """Bytes sent so far by (message class, tier), for messages whose size the plan alone does not give."""
        return {}

    @property
    def edge(self) -> EdgeComm | None:
        """Collectives for activations that cross stages, if this axis splits them."""
        return None

    def take(self, batches: Sequence[Batch], *, trains: bool = True) -> Sequence[Batch]:
        """This rank's part of the micro-batches of a training step, or of an evaluation if not `trains`."""
        return batches

    def begin(self, micro: int, batch: Batch, recomputed: bool) -> None:
        """Prepare for a block to run on a micro-batch; `recomputed` if its forward runs again in the backward."""

    def remove(self) -> None:
        """Undo changes that would keep the blocks from running without the engine."""
