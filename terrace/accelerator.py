"""A rank's device, as far as its vendor matters: the only module that names `torch.cuda` (tests/test_house.py).

Everything else speaks to `torch.accelerator`, `torch.Stream` and `torch.Event`, which mean the same on every vendor's
devices, and asks here whether a device has streams at all. Ranks run on CPUs and on devices that torch calls "cuda":
those of NVIDIA, and those of AMD under ROCm, whose torch has the same names. docs/cuda.md lists what others lack.

Nothing here opens a context on a device, except `properties`, `name_of` and the functions for one device.
"""

import resource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPE = "cuda"  # torch's type of the devices that ranks run on, ROCm's among them
COLLECTIVES = "nccl"  # torch's backend of their process groups; under ROCm it is RCCL
HOST = torch.device("cpu")
_MOST_ALLOCATIONS = 1_000_000  # in a record; older ones are left out


def has_streams(device: torch.device) -> bool:
    """Whether work on `device` runs behind the host's back: on streams, and copied from page-locked memory."""
    return device.type == TYPE


def placed(values: Tensor, device: torch.device) -> Tensor:
    """`values` of the host on `device`, by a copy that the host does not wait for."""
    return values.pin_memory().to(device, non_blocking=True) if has_streams(device) else values.to(device)


def occurrences(values: Tensor, number: int) -> Tensor:
    """How often each of 0 ... `number` - 1 is in `values`, int64. `bincount` would wait, to learn its length."""
    ones = torch.ones_like(values, dtype=torch.int64).flatten()
    return torch.zeros(number, dtype=torch.int64, device=values.device).index_add_(0, values.flatten(), ones)


def is_available() -> bool:
    """Whether this machine has such a device and this torch can use it. Devices of other types do not count."""
    return bool(torch.cuda.is_available())


def first_device() -> torch.device:
    """The type of device that a process without a launcher runs on."""
    return torch.device(TYPE) if is_available() else HOST


def num_devices() -> int:
    return torch.cuda.device_count() if is_available() else 0


def current_device() -> torch.device:
    return torch.device(TYPE, torch.accelerator.current_device_index())


def is_rocm() -> bool:
    """Whether torch was built for AMD's devices."""
    return torch.version.hip is not None


def toolkit() -> str | None:
    """Version of CUDA that torch was built for; None for other builds."""
    return torch.version.cuda


def properties(device: torch.device | int) -> Any:
    """Name, memory, identity and number of multiprocessors of a device, as its vendor's part of torch has them."""
    return torch.cuda.get_device_properties(device)


def name_of(device: torch.device | int) -> str:
    return str(properties(device).name)


def num_cores(device: torch.device) -> int:
    """Multiprocessors (NVIDIA) or compute units (AMD) of a device; 0 for a CPU."""
    return int(properties(device).multi_processor_count) if has_streams(device) else 0


def compute_capability(device: torch.device) -> tuple[int, int]:
    """NVIDIA's version of a device's instructions, such as (9, 0) for an H100; (0, 0) for every other device.

    `torch.accelerator.get_device_capability` does not have it: it tells which dtypes a device knows.
    """
    if not has_streams(device) or is_rocm():
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def architecture(device: torch.device) -> str:
    """AMD's name of a device's instructions, such as "gfx942" for an MI300X; "" for every other device."""
    return str(properties(device).gcnArchName).split(":")[0] if has_streams(device) and is_rocm() else ""


def bytes_in_use(device: torch.device) -> int:
    """Bytes that a device's allocator has handed out; of a CPU, the resident memory of the process (0 off Linux)."""
    if has_streams(device):
        return torch.accelerator.memory_allocated(device)
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def record_memory(device: torch.device) -> None:
    """Begin to record every allocation on a device, with the lines of code that made it; nothing on a CPU."""
    if has_streams(device):
        torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)


def write_memory(device: torch.device, path: Path) -> bool:
    """End the record and write it for https://pytorch.org/memory_viz. False on a CPU. Raises `OSError`."""
    if not has_streams(device):
        return False
    new = path.with_suffix(".new")
    try:
        dump: Any = torch.cuda.memory._dump_snapshot  # which torch has not typed
        dump(str(new))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    new.replace(path)
    return True


def random_state(device: torch.device) -> Tensor:
    """State of a device's generator of random numbers, which is in main memory for every device."""
    return torch.cuda.get_rng_state(device) if has_streams(device) else torch.get_rng_state()


def set_random_state(state: Tensor, device: torch.device) -> None:
    if has_streams(device):
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
