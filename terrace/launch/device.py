"""Sets up a rank's device: CPU affinity beside it, and an allocator with expandable segments."""

import os
from pathlib import Path

import torch

import terrace.accelerator as accelerator
from terrace.launch.machines import numa_of

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_NODES = Path("/sys/devices/system/node")


def take_device(index: int) -> torch.device:
    """Makes device `index` this process's own. Call it before anything else touches the device.

    Unless the user has configured the allocator, it gets expandable segments: otherwise gathers and activations of many
    sizes fragment the memory. ROCm's allocator does not have them. The process moves to the cores of the device's NUMA
    node.
    """
    if not accelerator.is_rocm() and not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[1]] = "expandable_segments:True"
    torch.accelerator.set_device_index(index)
    device = accelerator.current_device()
    bind(numa_of(accelerator.properties(device)))
    return device


def bind(numa: int, nodes: Path = _NODES) -> set[int]:
    """Moves this process to the cores of NUMA node `numa`, and returns them; the set is empty if nothing was changed.

    A process that does not have all cores stays where it is: its launcher has chosen them (`srun --cpus-per-task`,
    `numactl`, torchrun's `--numa-binding`). Call it before threads are made, since they inherit it.
    """
    if not hasattr(os, "sched_setaffinity"):
        return set()
    try:
        own, every = cores((nodes / f"node{numa}" / "cpulist").read_text()), cores((nodes / "has_cpu").read_text())
        all_cores = set[int]().union(*(cores((nodes / f"node{each}" / "cpulist").read_text()) for each in every))
        if not own or os.sched_getaffinity(0) != all_cores:
            return set()
        os.sched_setaffinity(0, own)
    except (OSError, ValueError):
        # Some systems show no nodes, and some containers forbid the move; a rank works on any core.
        return set()
    return own


def cores(text: str) -> set[int]:
    """Parses a Linux CPU list: `0-3,8` is {0, 1, 2, 3, 8}."""
    found = set[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1)) if part else set()
    return found
