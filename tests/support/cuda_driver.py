"""CUDA's driver for virtual memory without a device: it refuses what its documentation forbids.

Source: CUDA driver API, "Virtual Memory Management". Arguments are those of ctypes.
"""

from typing import Any


class Driver:
    """Breaks off at a call that the driver would refuse; knows each mapping, and which memory may be read."""

    page_bytes = 2 << 20  # the granularity of known devices

    def __init__(self, num_handles: int = 100) -> None:
        self.handles: set[int] = set()
        self.ranges: dict[int, int] = {}  # address -> bytes
        self.mapped: dict[int, int] = {}  # address -> handle
        self.readable: set[int] = set()
        self.left, self.made = num_handles, 0

    def refuse(self, words: str) -> None:
        """End a call that breaks a rule."""
        raise AssertionError(words)

    def _check(self, holds: bool, words: str) -> None:
        if not holds:
            self.refuse(words)

    def cuMemGetAllocationGranularity(self, step: Any, properties: Any, option: int) -> int:  # noqa: N802
        properties = properties._obj
        given = (properties.type, properties.location.type, properties.location.id, option)
        self._check(given == (1, 1, 0, 0), f"properties {given} of no pinned memory of device 0")
        step._obj.value = self.page_bytes
        return 0

    def cuMemAddressReserve(self, found: Any, size: Any, alignment: Any, address: Any, flags: Any) -> int:  # noqa: N802
        self._check(size.value % self.page_bytes == 0, f"a range of {size.value} bytes is no multiple of a page")
        self._check((alignment.value, address.value, flags.value) == (0, 0, 0), "a range with wishes")
        found._obj.value = self.reserved(size.value)
        self.ranges[found._obj.value] = size.value
        return 0

    def reserved(self, size: int) -> int:
        """The address of a new range."""
        return max((start + length for start, length in self.ranges.items()), default=self.page_bytes)

    def cuMemCreate(self, handle: Any, size: Any, properties: Any, flags: Any) -> int:  # noqa: N802
        self._check(size.value > 0 and size.value % self.page_bytes == 0, f"memory of {size.value} bytes")
        self._check(flags.value == 0, f"flags {flags.value}")
        if not self.left:
            return 2  # CUDA_ERROR_OUT_OF_MEMORY
        self.left -= 1
        self.made += 1
        handle._obj.value = 1000 + self.made
        self.handles.add(handle._obj.value)
        return 0

    def cuMemMap(self, at: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:  # noqa: N802
        inside = any(start <= at.value < start + length for start, length in self.ranges.items())
        self._check(inside, "memory is mapped outside every range")
        self._check(at.value not in self.mapped, "memory is mapped where other memory is: unmap first")
        self._check(handle.value in self.handles, "memory is mapped that was released")
        self._check(size.value % self.page_bytes == 0, f"a mapping of {size.value} bytes")
        self._check((offset.value, flags.value) == (0, 0), "a part of a handle is mapped")
        self.mapped[at.value] = handle.value
        return 0

    def cuMemSetAccess(self, at: Any, size: Any, access: Any, count: Any) -> int:  # noqa: N802
        self._check(at.value in self.mapped, "access to an address without memory")
        given = (count.value, access._obj.flags, access._obj.location.type)
        self._check(given == (1, 3, 1), f"access {given} is not to read and write on a device")
        self.readable.add(at.value)
        return 0

    def cuMemUnmap(self, at: Any, size: Any) -> int:  # noqa: N802
        self._check(at.value in self.mapped, "an address without memory is unmapped")
        del self.mapped[at.value]
        self.readable.discard(at.value)
        return 0

    def cuMemRelease(self, handle: Any) -> int:  # noqa: N802
        # CUDA keeps memory that is still mapped until it is unmapped: here that would be a leak.
        self._check(handle.value not in self.mapped.values(), "memory is released that is still mapped")
        self._check(handle.value in self.handles, "memory is released twice")
        self.handles.remove(handle.value)
        self.left += 1
        return 0

    def cuMemAddressFree(self, at: Any, size: Any) -> int:  # noqa: N802
        is_used = any(at.value <= address < at.value + size.value for address in self.mapped)
        self._check(not is_used, "a range is freed that has memory mapped")
        self._check(self.ranges.pop(at.value, None) == size.value, "a range is freed that was not reserved so")
        return 0
