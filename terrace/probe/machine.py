"""Facts about this machine: looked up, not measured, in about the time of importing torch."""

import importlib.util
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from terrace.launch.machines import num_cores
from terrace.probe.environment import launcher_variables

# package -> purpose; the first three are needed for training
PACKAGES = {
    "torch": "training",
    "numpy": "training",
    "safetensors": "checkpoints",
    "triton": "block codecs as kernels on CUDA",
    "liger-kernel": 'train.kernels = "liger" on CUDA',
    "tokenizers": "a tokenizer.json",
    "transformers": "comparing models with Hugging Face's",
    "jinja2": "chat templates",
    "pyarrow": "Parquet files",
    "ray": "roles on several machines",
    "tensorboard": 'train.metrics = ["tensorboard"]',
    "wandb": 'train.metrics = ["wandb"]',
    "trackio": 'train.metrics = ["trackio"]',
    "mlflow": 'train.metrics = ["mlflow"]',
}
NEEDED = ("torch", "numpy", "safetensors")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A CUDA device."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about one machine.

    `packages` maps a name to its version, None if absent; `torch_error` says why importing torch fails. `memory_bytes`
    is the smaller of the machine's memory and the control group's limit. Limits are this process's, -1 for none.
    """

    python: tuple[int, int, int]
    system: str
    num_cores: int
    memory_bytes: int
    free_memory_bytes: int
    free_disk_bytes: int
    interfaces: tuple[str, ...]
    fabrics: tuple[str, ...]  # InfiniBand and the like
    has_nvidia: bool  # whether a driver is there, whatever torch sees
    open_files: int
    locked_bytes: int
    variables: Mapping[str, str]
    packages: Mapping[str, str | None]
    torch_error: str = ""
    torch_cuda: str | None = None  # the CUDA version that torch was built for
    has_nccl: bool = False
    has_gloo: bool = False
    gpus: tuple[Gpu, ...] = field(default=())


def look(folder: Path) -> Machine:
    """Look up this machine and the disk of `folder`. Imports torch if installed."""
    packages = {name: _version(name) for name in PACKAGES}
    page = os.sysconf("SC_PAGE_SIZE")
    return Machine(
        python=sys.version_info[:3],
        system=f"{platform.system()} {platform.release()} on {platform.machine()}",
        num_cores=num_cores(),
        memory_bytes=memory_bytes(),
        free_memory_bytes=_free_memory(page),
        free_disk_bytes=shutil.disk_usage(folder).free,
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        fabrics=_names_in(Path("/sys/class/infiniband")),
        has_nvidia=Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        variables=launcher_variables(),
        packages=packages,
        **(_torch() if packages["torch"] else {}),
    )


def memory_bytes() -> int:
    """Memory of the machine, or the limit of the control group if lower."""
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _group_limit())


def torch_gpus() -> tuple[Gpu, ...]:
    """The devices that torch sees; none if it is missing or broken."""
    gpus: tuple[Gpu, ...] = _torch().get("gpus", ()) if _version("torch") else ()
    return gpus


def _torch() -> dict[str, Any]:
    # The fields of `Machine` that torch knows.
    try:
        import torch.distributed as dist

        import terrace.accelerator as accelerator

        devices = map(accelerator.properties, range(accelerator.num_devices()))
        return {
            "torch_cuda": accelerator.toolkit(),
            "has_nccl": dist.is_nccl_available(),
            "has_gloo": dist.is_gloo_available(),
            "gpus": tuple(Gpu(name=each.name, memory_bytes=each.total_memory) for each in devices),
        }
    except Exception as error:  # a broken installation fails in any way
        return {"torch_error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}


def _version(name: str) -> str | None:
    try:
        # Metadata alone would count a package whose files are gone.
        if importlib.util.find_spec(name) is None:
            return None
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
    except (ImportError, ValueError):
        return None


def _group_limit() -> int:
    # Both versions of cgroups; without a limit, more than any machine has.
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            return int(text)
    return 2**63


def _free_memory(page_bytes: int) -> int:
    try:
        # MemAvailable counts reclaimable caches; the sysconf figure of other systems does not.
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        names = os.sysconf_names
        return page_bytes * os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in names else 0


def _names_in(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(each.name for each in folder.iterdir()))
    except OSError:
        return ()
