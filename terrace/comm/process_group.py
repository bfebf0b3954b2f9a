"""Process groups, and when NCCL makes the communicators behind them.

A communicator on NCCL is made by all its ranks at once, which wait for each other. Made at the first message, a receive
that is posted early would hold up the host until the other side sends, which may depend on messages that this host has
yet to issue; and a first batch of sends and receives would wait for members that have none. So a group's communicator
is made with the group: it gets the rank's device.

The world itself must not be bound to a device. Torch would then split every group off the world's communicator
(`ncclCommSplit`), in which all ranks of the world must take part, and hang where only members make a group
(`_new_process_group_helper` of torch/distributed/distributed_c10d.py).

Torch 2.11 sorts the ranks of a group; `sort_ranks = False` came later. So members with an order of their own have a
sorted group, and their places in it (`OrderedGroup`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def new_group(ranks: Sequence[int] | None, timeout: timedelta) -> dist.ProcessGroup:
    """A group of `ranks`, whose members alone call this; None for all ranks of the world, which then all call it.

    With NCCL it returns when all have called it: two groups are made in the same order by all who are in both.
    """
    members: dict[str, Any] = {} if ranks is None else {"ranks": list(ranks), "use_local_synchronization": True}
    size = dist.get_world_size() if ranks is None else len(ranks)
    # A group of one, made so that all ranks make as many, sends nothing and needs no communicator.
    if dist.get_backend() == "nccl" and size > 1:
        members["device_id"] = torch.device("cuda", torch.cuda.current_device())
    group: dist.ProcessGroup = dist.new_group(timeout=timeout, **members)
    return group


@dataclass(frozen=True)
class OrderedGroup:
    """A group of ranks in an order of their own, such as that of the slices they hold; in `handle` they are sorted."""

    members: tuple[int, ...]
    handle: dist.ProcessGroup

    @staticmethod
    def of(members: Sequence[int], timeout: timedelta) -> "OrderedGroup":
        """Made by its members alone, as by `new_group`."""
        return OrderedGroup(tuple(members), new_group(members, timeout))

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def position(self) -> int:
        """The place of this rank among the members."""
        return self.members.index(dist.get_rank())

    @property
    def places(self) -> tuple[int, ...]:
        """The rank in `handle` of each member."""
        return tuple(dist.get_group_rank(self.handle, member) for member in self.members)


def barrier() -> None:
    """Wait for all ranks of the world; with NCCL on this rank's device, which torch would else guess and warn of."""
    dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)
