"""Process groups, and when NCCL creates their communicators.

Creating an NCCL communicator blocks until all its ranks take part. If that happened at the first message, a receive
posted early would block the host until the other side sends, which may depend on messages that this host has yet to
issue; and a first batch of sends and receives would wait for members that have none. So the communicator is created
with the group, by passing it the rank's device.

The world itself must not be bound to a device. Torch would then split every group off the world's communicator
(`ncclCommSplit`), in which all ranks of the world must take part, and hang where only members create a group
(`_new_process_group_helper` of torch/distributed/distributed_c10d.py).

Torch 2.11 sorts the ranks of a group; `sort_ranks = False` came later. So members in another order use a sorted group
and their ranks in it (`OrderedGroup`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from terrace.accelerator import COLLECTIVES, HOST, current_device


def new_group(ranks: Sequence[int] | None, timeout: timedelta) -> dist.ProcessGroup:
    """Create a group of `ranks`, called by its members only; None for all ranks of the world, all of which call it.

    With NCCL it returns when all have called it, so ranks that share two groups must create them in the same order.
    """
    members: dict[str, Any] = {} if ranks is None else {"ranks": list(ranks), "use_local_synchronization": True}
    size = dist.get_world_size() if ranks is None else len(ranks)
    # A group of one, created so that all ranks create the same number, sends nothing and needs no communicator.
    if _has_devices() and size > 1:
        members["device_id"] = current_device()
    group: dist.ProcessGroup = dist.new_group(timeout=timeout, **members)
    return group


def rank_device() -> torch.device:
    """This rank's device, set when it joined the world: its GPU if ranks communicate over NCCL, else the CPU."""
    return current_device() if dist.is_initialized() and _has_devices() else HOST


def _has_devices() -> bool:
    return bool(dist.get_backend() == COLLECTIVES)


@dataclass(frozen=True)
class OrderedGroup:
    """A group whose members have a given order, such as that of their slices; in `handle` ranks are sorted."""

    members: tuple[int, ...]
    handle: dist.ProcessGroup

    @staticmethod
    def of(members: Sequence[int], timeout: timedelta) -> "OrderedGroup":
        return OrderedGroup(tuple(members), new_group(members, timeout))

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def position(self) -> int:
        return self.members.index(dist.get_rank())

    @property
    def places(self) -> tuple[int, ...]:
        return tuple(dist.get_group_rank(self.handle, member) for member in self.members)


def barrier() -> None:
    """Wait for all ranks of the world; with NCCL on this rank's device, which torch would otherwise guess."""
    dist.barrier(device_ids=[current_device().index] if _has_devices() else None)
