"""This machine as a cluster: `--cluster auto`, and the default of a command, `auto` where GPUs are, else `local`.

Also refuses the launchers of commands that start their ranks themselves.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrace.base.errors import ConfigError
from terrace.cluster.presets import UNNAMED, cluster_table
from terrace.launch.launchers import launcher_of, rank_of
from terrace.probe.environment import environment_variables, launched_ranks

if TYPE_CHECKING:
    from terrace.probe.gpus import Gpus

AUTO = "auto"
_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/sys/class/kfd/kfd/topology/nodes")
_LOCAL = "local"
Find = Callable[[], "Gpus | None"]


def cluster_here(value: Any, ranks: int | None = None, find: Find | None = None) -> Any:
    """Resolves a `cluster` value of "auto" to the table of this machine; other values are returned unchanged.

    `UNNAMED` means "auto" if this machine has GPUs, enough of them for `ranks`, else "local". `find` looks for GPUs.
    """
    if value not in (AUTO, UNNAMED):
        return value
    gpus = (find or gpus_here)()
    if value == UNNAMED and (why := _why_local(gpus, ranks)) is not None:
        _say(why)
        return _LOCAL
    # Imported here: on most machines no command needs them.
    from terrace.launch.machines import num_cores
    from terrace.probe.auto import auto_cluster
    from terrace.probe.gpus import Gpus
    from terrace.probe.machine import memory_bytes

    gpus = gpus or Gpus()
    found = auto_cluster(gpus, num_cores(), memory_bytes(), launched_ranks())
    for line in found.words:
        _say(f"cluster auto: {line}")
    if launched_ranks() is None and ranks is not None and ranks < (num := len(gpus.devices)):
        _say(f"cluster auto: --ranks {ranks} leave {num - ranks} of {num} GPUs idle")
    return found.table


def named_table(name: str, ranks: int | None = None) -> dict[str, Any]:
    """The cluster table for `auto`, a preset, a file, or `UNNAMED`."""
    found = cluster_here(name, ranks)
    return cluster_table(found) if isinstance(found, str) else dict(found)


def gpus_here() -> "Gpus | None":
    """GPUs of this machine; None without a driver."""
    if not any(Path(path).exists() for path in _DRIVERS):
        return None
    from terrace.probe.gpus import look_for_gpus

    return look_for_gpus(environment_variables())


def check_alone(command: str, instead: str = "") -> None:
    """Refuses to run under a launcher a command that starts its ranks itself, because each process would start all of
    them.

    Raises `ConfigError` on rank 0, and ends the other ranks. `instead` says how other machines take part.
    """
    variables = environment_variables()
    launcher = launcher_of(variables)
    if launcher is None or variables[launcher.world_size] == "1":
        return
    rank = rank_of(variables)
    # Rank 0 prints it for all. A rank that is not a number may be the same on every process.
    if rank.isdecimal() and int(rank):
        sys.exit(2)
    raise ConfigError(
        f"terrace {command} starts its ranks itself, and {launcher.name} started {variables[launcher.world_size]} "
        f"processes of it ({launcher.world_size}={variables[launcher.world_size]}): start it once, without a launcher "
        f"(in a job of Slurm with --ntasks 1){f'; {instead}' if instead else ''}"
    )


def _why_local(gpus: "Gpus | None", ranks: int | None) -> str | None:
    num = 0 if gpus is None else len(gpus.devices)
    if not num:
        return ""
    if _torch_is_for_cpus():
        return f"cluster local: torch is built for CPUs, so {num} GPU{'s' * (num > 1)} of this machine not used"
    if launched_ranks() is None and ranks is not None and ranks > num:
        return f"cluster local: --ranks {ranks} are more than the GPUs of this machine, {num}, so all run on its CPU"
    return None


def _torch_is_for_cpus() -> bool:
    from importlib import metadata

    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def _say(text: str) -> None:
    # Printed once for all ranks of a launcher, separately from a command's output.
    if text and rank_of(environment_variables()) == "0":
        print(f"terrace: {text}", file=sys.stderr, flush=True)
