"""A mesh axis with messages inside blocks: the protocol of the tensor and the context axis."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from terrace.plan.wire import MessageClass
from terrace.runtime.batch import Batch
from terrace.runtime.in_block_comm import InBlockComm


class EdgeComm(Protocol):
    """Cuts an activation that leaves a stage, and makes one that arrives whole again."""

    @property
    def place(self) -> int:
        """Which part this rank sends and receives."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather the parts x (m) of all ranks, (n m)."""


class InBlockAxis:
    """An axis that has put its modules or its attention into the blocks of a rank.

    A new axis overrides the methods that concern it. The step runner calls them on every axis, in the order of
    application, and knows nothing else about an axis.
    """

    in_block: InBlockComm

    @property
    def declared(self) -> Mapping[tuple[MessageClass, str], int]:
        """Bytes sent so far by (message class, tier), where no formula of the plan gives them."""
        return {}

    @property
    def edge(self) -> EdgeComm | None:
        """Collectives for the activations that cross stages, if this axis cuts them into parts."""
        return None

    def take(self, batches: Sequence[Batch], *, trains: bool = True) -> Sequence[Batch]:
        """This rank's part of the micro-batches of a step, or of its forwards alone."""
        return batches

    def begin(self, micro: int, batch: Batch, recomputed: bool) -> None:
        """Prepare for a block that runs on a micro-batch; `recomputed` blocks run again in their backward."""

    def remove(self) -> None:
        """Undo replacements that would keep the blocks from running without the engine."""
