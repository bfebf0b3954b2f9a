"""`--cluster auto`, and the default cluster of a command: `auto` on a machine with GPUs, else `local`."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrace.cluster.presets import UNNAMED, cluster_table
from terrace.probe.environment import launched_ranks, variables_here

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

    return look_for_gpus(variables_here())


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
    from terrace.launch.launchers import rank_of

    if text and rank_of(variables_here()) == "0":
        print(f"terrace: {text}", file=sys.stderr, flush=True)
