"""Calls for CUDA's virtual memory, held to the rules of the driver's page by a driver without a device."""

import pytest
import torch

from terrace.base.errors import ConfigError
from terrace.generation.cuda_memory import CudaMemory
from tests.support.cuda_driver import Driver

PAGE = Driver.page_bytes


def memory_of(driver: Driver, num_pages: int, page_bytes: int = PAGE) -> CudaMemory:
    # The device has no addresses here: only the calls are looked at.
    return CudaMemory(num_pages, page_bytes, torch.device("meta"), driver)


def test_pages_are_shown_in_ranges_and_all_goes_back() -> None:
    driver = Driver()
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
        memory_of(Driver(), 4, 4096)
    with pytest.raises(ConfigError, match="cuMemCreate failed with the driver's error 2"):
        memory_of(Driver(num_handles=3), 4)
