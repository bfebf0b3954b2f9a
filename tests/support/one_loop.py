"""Gloo groups of a process that share one device, so one thread for their sockets instead of one for each group.

Ranks of tests live for thousands of cases, and gloo's groups with them: dozens in a rank, each with a thread that wakes
a hundred times a second, were an eighth of the suite's processor time. A run has a handful and keeps torch's default,
where each group's messages have a thread of their own.
"""

from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo, distributed_c10d

_devices: list[Any] = []  # made at the first group: threads do not survive a fork


class OneLoop(ProcessGroupGloo):
    """A group on the device of this process."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        if not _devices:
            _devices.append(ProcessGroupGloo.create_default_device())
        options = vars(ProcessGroupGloo)["_Options"]()
        options._devices, options._timeout, options._threads = _devices, timeout, 2
        super().__init__(store, rank, size, options)


def share() -> None:
    """From now on, torch makes its gloo groups so."""
    vars(distributed_c10d)["ProcessGroupGloo"] = OneLoop
