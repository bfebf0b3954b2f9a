"""A rank takes its CUDA device: the cores beside it, and an allocator that grows its segments."""

import os
from pathlib import Path

import torch

from terrace.launch.machines import numa_of

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_NODES = Path("/sys/devices/system/node")


def take_device(index: int) -> torch.device:
    """Make CUDA device `index` this process's own, before anything else touches CUDA.

    Unless the user has set the allocator, it has expandable segments: gathers and activations of many sizes otherwise
    leave memory that nothing fits into. ROCm's has none. The process moves to the cores of the device's NUMA node.
    """
    if torch.version.hip is None and not any(name in os.environ for name in _ALLOCATOR):
        os.environ[_ALLOCATOR[1]] = "expandable_segments:True"
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    bind(numa_of(torch.cuda.get_device_properties(device)))
    return device


def bind(numa: int, nodes: Path = _NODES) -> set[int]:
    """Move this process to the cores of NUMA node `numa`, and return them; without effect the set is empty.

    A launcher that has chosen cores (`srun --cpus-per-task`, `numactl`, torchrun's `--numa-binding`) knows better:
    a process that does not have all cores stays where it is. Call it before threads are made, which inherit it.
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
        # Some systems show no nodes, and some containers forbid the move: a rank is right on any core.
        return set()
    return own


def cores(text: str) -> set[int]:
    """The numbers in a list as Linux writes it: `0-3,8` are 0, 1, 2, 3 and 8."""
    found = set[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1)) if part else set()
    return found
