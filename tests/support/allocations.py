"""Every allocation of tensor memory on the CPU, kernels' scratch included, as torch's profiler records them."""

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

Result = TypeVar("Result")


def allocated(run: Callable[[], Result]) -> tuple[int, int, Result]:
    """Run on this thread and return (bytes at the peak, bytes at the end, result); both count from the start.

    The garbage collector has run and waits meanwhile: tensors of an earlier profile that it freed would be subtracted.
    It looks at nothing twice: all that a worker of pytest has kept from hundreds of tests would take most of a second.
    Ranks look again: an engine, which is a reference cycle, would else stay with its process groups, of each of which
    three threads wake up a hundred times a second.
    """
    gc.collect()
    if not dist.is_initialized():
        gc.freeze()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            result = run()
    finally:
        gc.enable()
    profiler: Any = record.profiler
    now = peak = 0
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak, now, result


def saved_bytes(run: Callable[[], Tensor], ignored: set[int]) -> int:
    """Return the bytes of the storages that autograd saves in `run`, without those at the `ignored` addresses."""
    storages: dict[int, Tensor] = {}

    def pack(saved: Tensor) -> Tensor:
        storages.setdefault(saved.untyped_storage().data_ptr(), saved)  # held, so that no address is used twice
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved):
        output = run()
    total = sum(saved.untyped_storage().nbytes() for address, saved in storages.items() if address not in ignored)
    del output
    return total


def addresses(tensors: list[Tensor]) -> set[int]:
    """Return the addresses of the tensors' storages."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def seeded(seed: int) -> torch.Generator:
    """Return a generator for reproducible inputs."""
    return torch.Generator().manual_seed(seed)
