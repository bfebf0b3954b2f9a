"""A process's view of its world, and the errors that indicate a failed peer.

This module starts no process and reads no environment variables; `launch` does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from terrace.base.errors import HangError
from terrace.launch.seal import Seal

# Words of gloo, NCCL and the socket layer. gloo raises no class of its own, so only the text distinguishes a lost
# connection from another `RuntimeError`.
_LOST_CONNECTION = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
_OUT_OF_MEMORY = "can't allocate memory"


@dataclass(frozen=True)
class World:
    """One rank's view of a joined world.

    `store` is a fresh name space shared by all ranks of this lifetime of the world. `on_hang`, if any, delivers a hang
    message to the parent process. `supervised`: the launcher sends SIGTERM to every rank as soon as one dies.
    `store_rank` is the rank that hosts the store, or None if the store outlives every rank. `seal` authenticates values
    written to the store and checks those read from it. `hosts` and `machines` name where each rank of a launcher is;
    several hosts, such as containers, may be on one machine.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    store: Store
    on_hang: Callable[[str], None] | None = field(default=None, repr=False, compare=False)
    supervised: bool = False
    store_rank: int | None = None
    seal: Seal = field(default_factory=Seal.fresh, repr=False, compare=False)
    hosts: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()


@contextmanager
def store_lost() -> Iterator[None]:
    """Turns the error of a lost store into a `HangError`, before a watchdog explains such errors."""
    try:
        yield
    except dist.DistError as error:
        first = str(error).split("\n")[0]
        raise HangError(
            "the process that hosts the store of the ranks, torchrun or rank 0, has ended; its output says why "
            f"({first})"
        ) from error


def is_communication_error(error: BaseException, *, waiting: bool) -> bool:
    """Whether `error` comes from a failed peer, not from this rank itself.

    With `waiting` (the rank was inside a collective) a bare `RuntimeError` counts, too; its subclasses, such as out of
    memory, never do.
    """
    if isinstance(error, dist.DistError):
        return True
    # Gloo raises bare `RuntimeError`s for lost connections.
    if type(error) is not RuntimeError or _OUT_OF_MEMORY in str(error):
        return False
    return waiting or any(word in str(error) for word in _LOST_CONNECTION)
