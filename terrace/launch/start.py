"""Joining a world: under torchrun, srun or mpirun, or as child processes of this one.

One of the modules that may read or set environment variables; the others are `terrace/launch/device.py`,
`terrace/launch/flight.py`, `terrace/launch/fork_server.py` and `terrace/probe/environment.py`, and of the laboratory
the module that makes the environments of a rehearsal's ranks.
"""

import math
import os
import platform
import socket
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

import terrace.accelerator as accelerator
from terrace.base.errors import ConfigError, TerraceError
from terrace.base.words import counted
from terrace.launch import flight
from terrace.launch.device import take_device
from terrace.launch.fork_server import start_fork_server
from terrace.launch.launchers import Place, place
from terrace.launch.machines import Facts, boot_id, files_digest, numa_of
from terrace.launch.process_pool import ProcessPool
from terrace.launch.rendezvous import host_store, join_ranks, open_store
from terrace.launch.seal import Seal, user_secret
from terrace.launch.stop import StoppedEarly, passed_on
from terrace.launch.world import World, store_lost

__all__ = ["LocalPool", "World", "detect", "is_restarted", "join", "launch_local", "pace", "world_size"]

_LEAST_SECRET = 16  # characters
_TELL_S = 5.0  # for rank 0 to hear why another rank does not come


def _print(text: str) -> None:
    print(text, flush=True)  # at once: in a job's file a line on what is waited for would stand there at its end


def detect() -> bool:
    """Whether a launcher (torchrun, srun, mpirun) started this process as one of several ranks.

    Raises `ConfigError` if the launcher did not set the rendezvous address.
    """
    return _place() is not None


def world_size() -> int | None:
    """Number of ranks started by a launcher, or None. Raises as `detect` does."""
    own = _place()
    return None if own is None else own.world_size


def is_restarted() -> bool:
    """Whether torchrun has restarted the ranks, or Slurm has requeued the job."""
    counts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count.isdecimal() and int(count) > 0 for count in counts)


def pace() -> float | None:
    """Factor by which a product slows down every link (`TERRACE_PACE`); None at full speed.

    Raises `ConfigError` unless the value is a number above 0.
    """
    text = os.environ.get("TERRACE_PACE")
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"TERRACE_PACE={text!r} must be a number above 0, such as 0.01; unset it for full speed")
    return value


def faults() -> str:
    """The faults that a rehearsal has this run carry out (`TERRACE_FAULTS`), in words of its own; "" for none."""
    return os.environ.get("TERRACE_FAULTS", "")


@store_lost()
def join(
    timeout_s: float,
    say: Callable[[str], None] = _print,
    *,
    sections: Mapping[str, str] | None = None,
    renumber: bool = True,
) -> World:
    """Joins the other ranks and starts torch's default process group: nccl with CUDA, otherwise gloo.

    Ranks get new numbers if the launcher's numbers separate the ranks of a machine; without `renumber` that is an
    error. `say` gets a few lines on rank 0: the backend and its reason, which ranks run on which machine, and ranks
    whose configuration differs from rank 0's by `sections` (digests); and, after some seconds, a line on ranks that do
    not come. Raises `ConfigError` outside a launcher, for an unusable address, and as `join_ranks` does; `HangError`
    naming the ranks that did not join within `timeout_s`.
    """
    own = _place()
    if own is None:
        raise ConfigError("no launcher started this process; use torchrun, srun or mpirun, or run it locally")
    timeout = timedelta(seconds=timeout_s)
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    seal = secret()
    hosting = own.rank == 0 and not agent_hosts
    waiting = say if own.local_rank == 0 or own.rank == 0 else lambda text: None
    if hosting:
        shared = host_store(own.address, own.port, timeout_s)
    else:
        shared = open_store(own.address, own.port, timeout_s, waiting, agent_hosts=agent_hosts)
    local_rank, backend, why = own.rank if own.local_rank is None else own.local_rank, "", ""
    facts: Facts | TerraceError
    try:
        backend, device, why = _backend(own.launcher, local_rank)
        facts = _facts(device, sections or {}, backend, why)
    except ConfigError as error:
        facts = error
    found = join_ranks(
        shared, own.rank, own.world_size, facts, seal, timeout_s, renumber=renumber, say=waiting, late=own.late
    )
    store = PrefixStore(f"terrace/{found.namespace}", shared)
    if found.rank == 0:
        say(f"{counted(own.world_size, 'rank')} under {own.launcher}, backend {backend}: {why}")
        for line in (found.map, *found.notes) if len(set(found.machines)) > 1 else found.notes:
            say(line)
    os.environ.update(flight.settings())
    dist.init_process_group(
        backend,
        store=PrefixStore("group", store),
        rank=found.rank,
        world_size=own.world_size,
        timeout=timeout,  # no `device_id`: see terrace/comm/process_group.py
    )
    return World(
        rank=found.rank,
        world_size=own.world_size,
        local_rank=local_rank,
        local_world_size=own.local_world_size or found.local_world_size,
        store=PrefixStore("world", store),
        supervised=True,
        store_rank=None if agent_hosts else 0,
        seal=found.seal,
        hosts=found.hosts,
        machines=found.machines,
    )


def refuse(error: TerraceError) -> None:
    """Reports to the other ranks of a launcher's world why this one does not join them.

    Rank 0 raises the error if it joins within seconds, and the other ranks end. Does nothing outside a launcher, and on
    rank 0, whose own output is the one that users read.
    """
    with suppress(TerraceError, RuntimeError):  # the others cannot be reached
        own = _place()
        if own is None or own.rank == 0:
            return
        store = open_store(own.address, own.port, _TELL_S)
        join_ranks(store, own.rank, own.world_size, error, secret(), _TELL_S, renumber=False)


class LocalPool(ProcessPool):
    """Up to `num_processes` ranks on this machine that stay alive between calls, mainly for tests.

    `with LocalPool(4) as pool: results = pool.run(3, function, argument)`.
    """

    def __init__(self, num_processes: int, *, grace_s: float = 10.0) -> None:
        start_fork_server()
        super().__init__(num_processes, grace_s=grace_s)

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
        """Runs `function(world, *arguments)` in a fresh gloo world. Returns the results in rank order.

        `function` must be picklable: a top-level function of a module that the children can import.
        """
        return self.call(world_size, function, arguments, timeout_s)


def launch_local(
    world_size: int,
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    *,
    grace_s: float = 10.0,
    say: Callable[[str], None] = _print,
    stoppable: bool = False,
) -> Any:
    """Runs `target(world, *args)` in `world_size` processes on this machine. Returns rank 0's result.

    With enough CUDA devices each rank gets one and the backend is nccl; otherwise ranks run on the CPU with gloo. `say`
    gets one line with the choice and the reason.

    The parent hosts the store. If a rank fails or dies, the others have `grace_s` to leave, then all are ended and one
    error is raised: `HangError` with the watchdogs' message, the class of a rank's `TerraceError`, or `RuntimeError`
    with the traceback of the first failure. There is no time limit: only a watchdog in `target` ends a stall. Children
    end with the parent, however it ends, and keep the environment of the first launch.

    If `target` is `stoppable`, the first SIGTERM, SIGUSR1 or Ctrl-C asks it to end in order (terrace.launch.stop); the
    second has its previous effect. Before `target` has begun (`terrace.launch.stop.begin_steps`) the first one ends the
    ranks, and its name is returned.
    """
    start_fork_server(target.__module__)
    backend, why = _local_backend(world_size)
    say(f"{counted(world_size, 'local process')}, backend {backend}: {why}")
    try:
        with (
            ProcessPool(world_size, grace_s=grace_s) as pool,
            passed_on(pool.ask_to_stop) if stoppable else nullcontext(),
        ):
            return pool.call(world_size, target, args, None, backend)[0]
    except StoppedEarly as early:
        return str(early)


def _place() -> Place | None:
    return place(os.environ)


def _backend(launcher: str, local_rank: int) -> tuple[str, torch.device | None, str]:
    why_not = _why_no_nccl()
    if why_not:
        return "gloo", None, why_not
    num_devices = accelerator.num_devices()
    if launcher != "torchrun" and num_devices == 1:
        # Slurm's --gpus-per-task=1 and scripts around mpiexec show every rank its own device only.
        local_rank = 0
    if local_rank >= num_devices:
        raise ConfigError(
            f"local rank {local_rank} has no device, this machine has {num_devices}: start at most "
            f"{counted(num_devices, 'rank')} here, and set LOCAL_RANK"
        )
    device = take_device(local_rank)
    return accelerator.COLLECTIVES, device, f"rank 0 uses {accelerator.name_of(device)}"


def _local_backend(world_size: int) -> tuple[str, str]:
    why_not = _why_no_nccl()
    if not why_not and (num_devices := accelerator.num_devices()) < world_size:
        why_not = f"{counted(world_size, 'rank')}, and this machine has {counted(num_devices, 'CUDA device')}"
    return ("gloo", why_not) if why_not else (accelerator.COLLECTIVES, f"rank 0 uses {accelerator.name_of(0)}")


def local_devices() -> list[int]:
    """Memory, in bytes, of each CUDA device available to local ranks."""
    if _why_no_nccl():
        return []
    return [accelerator.properties(index).total_memory for index in range(accelerator.num_devices())]


def _why_no_nccl() -> str:
    if not accelerator.is_available():
        return "this machine has no usable CUDA device"
    return "" if dist.is_nccl_available() else "this torch was built without nccl"


def secret() -> Seal:
    """The secret of this user's runs, or of `TERRACE_SECRET`. Raises `ConfigError`."""
    text = os.environ.get("TERRACE_SECRET")
    if text is None:
        folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
        if not os.path.isabs(folder):
            raise ConfigError(
                "the ranks of a run know each other by a secret, and there is no home folder to keep one in: set "
                "TERRACE_SECRET to the same random text for every rank"
            )
        return user_secret(Path(folder, "terrace"))
    if len(text) < _LEAST_SECRET:
        raise ConfigError(
            f"TERRACE_SECRET has {len(text)} characters, at least {_LEAST_SECRET} are needed: set the same random text "
            "for every rank, such as that of openssl rand -hex 16"
        )
    return Seal(os.fsencode(text), "TERRACE_SECRET")


def _facts(device: torch.device | None, sections: Mapping[str, str], backend: str, why: str) -> Facts:
    versions = {"Python": platform.python_version(), "torch": torch.__version__, "Terrace's files": files_digest()}
    host = socket.gethostname()
    if device is None:
        return Facts(host, boot_id(), versions=versions, sections=sections, backend=backend, why=why)
    properties = accelerator.properties(device)
    return Facts(host, boot_id(), str(properties.uuid), numa_of(properties), versions, sections, backend, why)
