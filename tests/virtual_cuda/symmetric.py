"""Torch's symmetric memory between ranks of one machine, each of which maps the files of the others.

Products that are fused with messages run as torch's own Python (`torch.distributed._symmetric_memory`): its two
streams, its copies and its order. Here is what it asks of a device: buffers that all ranks of a group see, and
barriers. A barrier is an operation of the current stream, and blocks the host until all ranks have come. Accesses of
two ranks to one buffer are not compared, those of two streams of a rank are.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory, distributed_c10d

from tests.virtual_cuda.findings import Kind, here, told
from tests.virtual_cuda.functions import Patch
from tests.virtual_cuda.machine import Machine
from tests.virtual_cuda.messages import Messages
from tests.virtual_cuda.storages import DeviceMemory, put_on_device, record_of

_CHANNELS = 2  # of barriers, those that torch's products use


def patches(machine: Machine, messages: Messages) -> Iterator[Patch]:
    """What torch's Python calls, and what it keeps from one call to the next."""
    yield _symmetric_memory, "_SymmetricMemory", _Memory(machine, messages)
    yield _symmetric_memory, "_group_name_to_workspace_tensor", {}
    yield _symmetric_memory, "_backend_streams", {}


class _Memory:
    """In the place of `torch._C._distributed_c10d._SymmetricMemory`."""

    def __init__(self, machine: Machine, messages: Messages) -> None:
        self._machine, self._messages = machine, messages
        self._files: dict[int, tuple[str, str]] = {}  # address of a buffer -> its file and group
        self._shared: dict[int, _Shared] = {}

    def empty_strided_p2p(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, group_name: str
    ) -> Tensor:
        """A buffer of this rank that others may map."""
        assert dtype == torch.uint8
        assert tuple(stride) == (1,)
        if self._machine.thread.is_fused:
            self._machine.findings.add(Kind.LATE_SHARING, f"{size[0]} bytes at {told(here())}")
        handle, path = tempfile.mkstemp(prefix="virtual_cuda_shared")
        os.truncate(handle, size[0])
        os.close(handle)
        found = _of_file(path, size[0], self._machine)
        self._files[found.data_ptr()] = path, group_name
        return found

    def rendezvous(self, tensor: Tensor, group_name: str | None = None) -> "_Shared":
        """The buffers of all ranks; all come here at first."""
        address = tensor.data_ptr()
        if address not in self._shared:
            path, group = self._files[address]
            self._shared[address] = _Shared(self._machine, self._messages, tensor, path, group)
        return self._shared[address]

    def has_multicast_support(self, device_type: Any, index: int) -> bool:
        """Whether switches between devices add and copy, as those between H100s do."""
        return True


class _Shared:
    """The buffers of a group."""

    def __init__(self, machine: Machine, messages: Messages, own: Tensor, path: str, group_name: str) -> None:
        self._machine, self._messages = machine, messages
        resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
        self._group = resolve(group_name)
        self.rank, self.world_size = self._group.rank(), self._group.size()
        self._pad = torch.zeros(_CHANNELS, dtype=torch.uint8)
        put_on_device(self._pad, machine, is_allocated=False)
        store = distributed_c10d._get_process_group_store(self._group)
        store.set(f"virtual_cuda {self.rank}", path)
        paths = [store.get(f"virtual_cuda {rank}").decode() for rank in range(self.world_size)]
        self._buffers = [
            own if rank == self.rank else _of_file(path, own.numel(), machine) for rank, path in enumerate(paths)
        ]
        messages.meet(self._group, "memory is shared", here())
        os.unlink(path)

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> Tensor:
        """The buffer of a rank from element `storage_offset` on."""
        whole = self._buffers[rank].view(dtype)
        end = storage_offset + torch.Size(sizes).numel()
        assert end <= whole.numel(), f"{end} elements of a buffer of {whole.numel()}"
        return whole[storage_offset:end].view(sizes)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait on the current stream until all ranks are here, by signals that each channel has once."""
        at, place = self._machine.current(), here()
        record = record_of(self._pad)
        assert isinstance(record, DeviceMemory)
        record.access(at, at.tick(), self._pad[channel : channel + 1], True, f"barrier {channel}", place)
        self._messages.meet(self._group, f"barrier {channel}", place)


def _of_file(path: str, num_bytes: int, machine: Machine) -> Tensor:
    with torch._C._DisableTorchDispatch():
        found = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    put_on_device(found, machine, is_allocated=False)
    return found
