"""Pages of GPU memory mapped at several virtual addresses (CUDA virtual memory management).

NOT RUN ON HARDWARE: written from the CUDA driver API documentation ("Virtual Memory Management"), and tested against a
fake driver that checks the rules given there. It is never selected automatically; pass an engine a `BuildPool` that
creates `MappedPages` with it.

    cuMemCreate                  allocates physical memory; one handle per page, since a handle is mapped as a whole
    cuMemAddressReserve          reserves a range of addresses
    cuMemMap, cuMemSetAccess     map a handle into a range; one handle may be mapped into many ranges
    cuMemUnmap                   must come before another handle is mapped at the same address

The page size must be a multiple of the driver's granularity, 2 MiB on known devices.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from terrace.accelerator import has_streams, is_rocm
from terrace.base.errors import ConfigError

_PINNED, _DEVICE, _READ_WRITE, _MINIMUM = 1, 1, 3, 0  # of the driver's enumerations
_NUM_MAPPINGS = 2**31  # the driver states no limit


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp: pinned memory of one device, exported nowhere, not compressed."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows_meta_data", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@dataclass(frozen=True)
class _Bytes:
    """Device memory that torch wraps as a tensor without a copy (`__cuda_array_interface__`)."""

    address: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}


class CudaMemory:
    """`num_pages` pages of `page_bytes` on a CUDA device; see `terrace.generation.host_memory.VirtualMemory`.

    Mappings change only after the device has been synchronised, because running kernels may read them. All memory is
    freed when this object is deleted. Raises `ConfigError` if `page_bytes` is not a multiple of the granularity, or a
    driver call fails.
    """

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device, driver: Any = None) -> None:
        self._handles: list[ctypes.c_ulonglong] = []
        self._mapped: dict[int, dict[int, int]] = {}  # address of a range -> page index in it -> physical page
        if is_rocm():
            raise ConfigError("mapped pages call NVIDIA's driver, and torch is built for ROCm: keep pages of tensors")
        self._driver = driver or ctypes.CDLL("libcuda.so.1")
        self._device, self._page_bytes, self._size = device, page_bytes, num_pages * page_bytes
        index = device.index or 0
        self._properties = _Properties(type=_PINNED, location=_Location(_DEVICE, index))
        self._access = _Access(_Location(_DEVICE, index), _READ_WRITE)
        torch.zeros(1, device=device)  # creates the CUDA context; an empty tensor would not
        step = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(self._properties), _MINIMUM)
        if page_bytes % step.value:
            raise ConfigError(f"a page of {page_bytes} bytes is no multiple of the device's {step.value}")
        self._num_pages, self.num_mappings = num_pages, _NUM_MAPPINGS
        self._first = self._range()
        self.take_back()
        self.whole = self._tensor(self._first)

    def reserve(self) -> tuple[int, Tensor]:
        address = self._range()
        # Torch asks the driver for the device of an address, which is known only of mapped addresses.
        self.map(address, 0, 0, 1)
        found = self._tensor(address)
        self.clear(address)
        return address, found

    def map(self, address: int, index: int, page: int, count: int) -> None:
        self._wait()
        mapped, size = self._mapped[address], ctypes.c_size_t(self._page_bytes)
        for each in range(count):
            self._unmap(address, index + each)
            at = ctypes.c_ulonglong(address + (index + each) * self._page_bytes)
            self._call("cuMemMap", at, size, ctypes.c_size_t(0), self._handles[page + each], ctypes.c_ulonglong(0))
            self._call("cuMemSetAccess", at, size, ctypes.byref(self._access), ctypes.c_size_t(1))
            mapped[index + each] = page + each

    def clear(self, address: int) -> None:
        self._wait()
        for index in list(self._mapped[address]):
            self._unmap(address, index)

    def give_back(self) -> None:
        self.clear(self._first)
        self._release()

    def take_back(self) -> None:
        for _ in range(self._num_pages):
            handle = ctypes.c_ulonglong()
            size, none = ctypes.c_size_t(self._page_bytes), ctypes.c_ulonglong(0)
            self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), none)
            self._handles.append(handle)
        self.map(self._first, 0, 0, self._num_pages)

    def close(self) -> None:
        """Free memory and address ranges. Tensors of this memory must not be used afterwards."""
        for address in self._mapped:
            self.clear(address)
        self._release()
        for address in self._mapped:
            self._call("cuMemAddressFree", ctypes.c_ulonglong(address), ctypes.c_size_t(self._size))
        self._mapped.clear()

    def __del__(self) -> None:
        self.close()

    def _release(self) -> None:
        while self._handles:
            self._call("cuMemRelease", self._handles.pop())

    def _range(self) -> int:
        found, none = ctypes.c_ulonglong(), ctypes.c_ulonglong(0)
        size, alignment = ctypes.c_size_t(self._size), ctypes.c_size_t(0)
        self._call("cuMemAddressReserve", ctypes.byref(found), size, alignment, none, none)
        self._mapped[found.value] = {}
        return found.value

    def _unmap(self, address: int, index: int) -> None:
        if self._mapped[address].pop(index, None) is not None:
            at = ctypes.c_ulonglong(address + index * self._page_bytes)
            self._call("cuMemUnmap", at, ctypes.c_size_t(self._page_bytes))

    def _wait(self) -> None:
        if has_streams(self._device):
            torch.accelerator.synchronize(self._device)

    def _tensor(self, address: int) -> Tensor:
        if not has_streams(self._device):
            return torch.empty(self._size, dtype=torch.uint8, device=self._device)
        return torch.as_tensor(_Bytes(address, self._size), device=self._device)

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._driver, name)(*arguments)
        if result:
            raise ConfigError(f"{name} failed with the driver's error {result}")
