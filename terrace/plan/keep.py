"""Where each state is kept between its uses: on the device, or on a medium below it (docs/offload.md).

This is independent of the tier over which a state is sharded: a rank keeps its own shard below its device.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Medium = Literal["device", "host", "disk"]
Side = Literal["device", "host"]
Order = Literal["forward", "backward"]
HOST: Side = "host"
CORES = "host cores"  # the lane of updates on the host
DEVICE: Medium = "device"
PLACED = ("params", "grads", "optimizer")  # states that have a placement, and a medium
KEPT = (*PLACED, "activations", "table")  # all that has a medium
# Groups of states that one instruction changes together (terrace.plan.kept).
GroupName = Literal["states", "momentum", "matrices"]
STATES: GroupName = "states"
MOMENTUM: GroupName = "momentum"
MATRICES: GroupName = "matrices"
SECTOR_BYTES = 4096  # direct I/O moves whole blocks of the file system, which are no larger on what is sold today
MOST_UPDATED = 2  # blocks whose working copies are on the device in updates: one is updated, one written
MOST_WRITTEN = 1  # blocks whose gradients are written while a backward computes the next ones
NUM_WAYS = 2  # reading and writing: each has a buffer for a piece of parameters or gradients
MARK_BYTES = 64  # at the end of a piece
# Elements. Torch's AdamW on a CPU rounds those that do not fill a vector in another way: pieces begin where vectors do.
VECTOR = 64


@dataclass(frozen=True, kw_only=True)
class Keep:
    """The medium of each state, and the pieces in which states kept below the device pass through it."""

    optimizer: Medium = "device"  # optimizer states, and the master copy if it is separate
    grads: Medium = "device"  # accumulated gradients
    params: Medium = "device"  # the working copy of the parameters
    activations: Medium = "device"  # inputs of blocks, from their forward to their backward (terrace.plan.boundaries)
    table: Medium = "device"  # rows that `Plan.vocabulary` spreads, and their states (terrace.plan.kept_rows)
    update: Side = "device"  # where UPDATE runs: on the device or on the host's cores
    order: Order = "forward"  # of updates: behind CLIP, or each in the backward behind the SYNC of its block
    blocks: tuple[str, ...] = ()  # the blocks whose inputs leave, as in `Plan.recompute`; empty: all layers
    piece: int = 1 << 20  # elements of a flat buffer that are read or written at a time
    ring: int = 4  # pieces of optimizer states that are on the device at a time

    @cached_property
    def optimizer_below(self) -> bool:
        return self.optimizer != DEVICE

    @cached_property
    def grads_below(self) -> bool:
        """Whether accumulated gradients are kept below the device, from their reduction to their update."""
        return self.grads != DEVICE

    @cached_property
    def params_below(self) -> bool:
        """Whether the working copy of the parameters is kept below the device."""
        return self.params != DEVICE

    @cached_property
    def activations_below(self) -> bool:
        """Whether inputs of blocks are kept below the device, from their forward to their backward."""
        return self.activations != DEVICE

    @cached_property
    def table_below(self) -> bool:
        """Whether rows of the table, with their optimizer states, are kept below the device."""
        return self.table != DEVICE

    @cached_property
    def updates_on_host(self) -> bool:
        """Whether UPDATE runs on the host's cores, on a lane of their own."""
        return self.update == HOST

    @cached_property
    def layer_wise(self) -> bool:
        """Whether each block is updated when its gradient is complete, without the norm of the whole model."""
        return self.order == "backward"

    @cached_property
    def hands_over(self) -> bool:
        """Whether gradients are copied to the host for updates there, and parameters back. On a CPU nothing moves."""
        return self.updates_on_host and self.grads_below

    @cached_property
    def states_pass(self) -> bool:
        """Whether optimizer states pass a ring: they are kept below, and elsewhere than where they are updated."""
        return self.optimizer_below and not (self.updates_on_host and self.optimizer == HOST)

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """The media in use, and the host's cores if they update: a step has a lane for each."""
        return (*self.media, *((CORES,) if self.updates_on_host else ()))

    def on(self, medium: str) -> tuple[str, ...]:
        return tuple(state for state in KEPT if getattr(self, state) == medium)

    @cached_property
    def media(self) -> tuple[Medium, ...]:
        used = dict.fromkeys((self.optimizer, self.params, self.grads, self.activations, self.table))
        return tuple(each for each in used if each != DEVICE)

    @cached_property
    def is_below(self) -> bool:
        return bool(self.media)


ALL_ON_DEVICE = Keep()
