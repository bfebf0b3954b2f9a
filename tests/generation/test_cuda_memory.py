"""Calls for CUDA's virtual memory, held to the rules of the driver's page by a driver without a device."""

from typing import Any

import pytest
import torch

from terrace.base.errors import ConfigError
from terrace.generation.cuda_memory import CudaMemory

PAGE = 2 << 20


class Rules:
    """Breaks off at a call that the driver would refuse; knows each mapping, and which memory may be read."""

    def __init__(self, num_handles: int = 100) -> None:
        self.handles: set[int] = set()
        self.ranges: dict[int, int] = {}
        self.mapped: dict[int, int] = {}  # address -> handle
        self.readable: set[int] = set()
        self.left, self.made = num_handles, 0

    def cuMemGetAllocationGranularity(self, step: Any, properties: Any, option: int) -> int:  # noqa: N802
        properties = properties._obj
        assert (properties.type, properties.location.type, properties.location.id, option) == (1, 1, 0, 0)
        step._obj.value = PAGE
        return 0

    def cuMemAddressReserve(self, found: Any, size: Any, alignment: Any, address: Any, flags: Any) -> int:  # noqa: N802
        assert size.value % PAGE == 0
        assert (alignment.value, address.value, flags.value) == (0, 0, 0)
        found._obj.value = max((start + length for start, length in self.ranges.items()), default=PAGE)
        self.ranges[found._obj.value] = size.value
        return 0

    def cuMemCreate(self, handle: Any, size: Any, properties: Any, flags: Any) -> int:  # noqa: N802
        assert (size.value, flags.value) == (PAGE, 0)
        if not self.left:
            return 2  # CUDA_ERROR_OUT_OF_MEMORY
        self.left -= 1
        self.made += 1
        handle._obj.value = 1000 + self.made
        self.handles.add(handle._obj.value)
        return 0

    def cuMemMap(self, at: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:  # noqa: N802
        assert any(start <= at.value < start + length for start, length in self.ranges.items())
        assert at.value not in self.mapped, "unmap first"
        assert handle.value in self.handles
        assert (size.value, offset.value, flags.value) == (PAGE, 0, 0)
        self.mapped[at.value] = handle.value
        return 0

    def cuMemSetAccess(self, at: Any, size: Any, access: Any, count: Any) -> int:  # noqa: N802
        assert at.value in self.mapped
        assert (size.value, count.value, access._obj.flags, access._obj.location.type) == (PAGE, 1, 3, 1)
        self.readable.add(at.value)
        return 0

    def cuMemUnmap(self, at: Any, size: Any) -> int:  # noqa: N802
        del self.mapped[at.value]
        self.readable.discard(at.value)
        return 0

    def cuMemRelease(self, handle: Any) -> int:  # noqa: N802
        assert handle.value not in self.mapped.values(), "it is still mapped"
        self.handles.remove(handle.value)
        self.left += 1
        return 0

    def cuMemAddressFree(self, at: Any, size: Any) -> int:  # noqa: N802
        assert not any(at.value <= address < at.value + size.value for address in self.mapped)
        assert self.ranges.pop(at.value) == size.value
        return 0


def memory_of(driver: Rules, num_pages: int, page_bytes: int = PAGE) -> CudaMemory:
    # The device has no addresses here: only the calls are looked at.
    return CudaMemory(num_pages, page_bytes, torch.device("meta"), driver)


def test_pages_are_shown_in_ranges_and_all_goes_back() -> None:
    driver = Rules()
    memory = memory_of(driver, 4)
    pages = list(driver.mapped.values())
    assert len(set(pages)) == 4
    first, second = memory.reserve()[0], memory.reserve()[0]
    memory.map(first, 0, 2, 2)
    memory.map(second, 0, 2, 1)
    memory.map(second, 1, 0, 1)
    # A page that takes the place of another, as a copy does.
    memory.map(first, 1, 1, 1)
    assert [driver.mapped[first + place * PAGE] for place in range(2)] == [pages[2], pages[1]]
    assert [driver.mapped[second + place * PAGE] for place in range(2)] == [pages[2], pages[0]]
    assert driver.readable == set(driver.mapped)
    memory.clear(first)
    memory.clear(second)
    assert len(driver.mapped) == 4
    memory.give_back()
    assert not driver.mapped
    assert not driver.handles
    memory.take_back()
    assert len(driver.mapped) == len(driver.handles) == 4
    memory.close()
    assert not {*driver.mapped, *driver.handles, *driver.ranges}


def test_what_the_driver_refuses_is_told() -> None:
    with pytest.raises(ConfigError, match=f"a page of 4096 bytes is no multiple of the device's {PAGE}"):
        memory_of(Rules(), 4, 4096)
    with pytest.raises(ConfigError, match="cuMemCreate failed with the driver's error 2"):
        memory_of(Rules(num_handles=3), 4)
