"""What the device adds to a storage: its owner, its accesses, and when its memory may be handed out again.

The record is an attribute of the storage, so all views have it, and it goes when the storage goes.
"""

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tests.virtual_cuda.allocator import Block
from tests.virtual_cuda.clocks import Timeline
from tests.virtual_cuda.findings import Kind, Place, here, told
from tests.virtual_cuda.machine import Machine

if TYPE_CHECKING:
    from tests.virtual_cuda.pages import Range

_NAME = "virtual_cuda"
_KEPT = 400  # accesses of a storage, the latest
# Offset, sizes, strides, bytes of an element; or the bytes themselves.
_Form = tuple[int, tuple[int, ...], tuple[int, ...], int] | frozenset[int]


class Access(NamedTuple):
    """An operation on a range of bytes."""

    stream: int
    tick: int
    low: int
    high: int
    writes: bool
    operation: str
    place: Place
    form: _Form | None  # where strides leave gaps

    def told(self) -> str:
        """The operation, its stream and lines."""
        return f"{self.operation} {'writes' if self.writes else 'reads'} on {{}} at {told(self.place)}"


class DeviceMemory:
    """Record of a storage on the device."""

    __slots__ = ("accesses", "block", "machine", "num_bytes", "owner", "pages", "recorded")

    def __init__(self, machine: Machine, num_bytes: int) -> None:
        self.machine, self.num_bytes = machine, 0
        self.accesses: list[Access] = []
        self.recorded = set[int]()  # streams of `record_stream`
        self.block: Block | None = None
        self.pages: Range | None = None  # of addresses into which pages are mapped
        self.owner = machine.current()
        self.begin(num_bytes)

    def begin(self, num_bytes: int) -> None:
        """Allocate on the current stream."""
        if not num_bytes:
            return
        self.num_bytes, self.owner = num_bytes, self.machine.current()
        self._hand_out()
        self.block = self.machine.allocator.allocate(num_bytes, self.owner.number)

    def access(self, at: Timeline, tick: int, tensor: Tensor, writes: bool, operation: str, place: Place) -> None:
        """Note an access by operation `tick` of a stream, and report those that it is in no order with."""
        now = access_of(at.number, tick, tensor, writes, operation, place)
        if now is None:
            return
        if self.pages is not None:
            self.pages.access(at, now)
        else:
            self.note(at, now)

    def note(self, at: Timeline, now: Access) -> None:
        """As `access`, for an access that is known."""
        kept, low, high, writes = [], now.low, now.high, now.writes
        for was in self.accesses:
            stream, then, low_then, high_then, wrote, *_ = was
            is_inside = low <= low_then and high_then <= high
            if stream == now.stream or at.follows(stream, then):
                # A later access in no order with this one is in no order with `now` either.
                if not (is_inside and (writes or not wrote) and now.form is None):
                    kept.append(was)
                continue
            kept.append(was)
            if (writes or wrote) and low < high_then and low_then < high and _meet(now, was):
                self._race(at, now, was)
        kept.append(now)
        self.accesses = kept if len(kept) <= _KEPT else kept[-_KEPT:]

    def free(self) -> None:
        """Give the memory back to the pool of its stream."""
        if self.block is None:
            return
        # Garbage may be collected while the allocator is at work, so it is told later: before it allocates again.
        is_shared = any(each.stream not in self.recorded and each.stream != self.owner.number for each in self.accesses)
        accesses = [each for each in self.accesses if each.stream not in self.recorded] if is_shared else []
        self.machine.dead.append((self.block, self.owner, accesses, here() if is_shared else ()))
        self.block, self.accesses, self.num_bytes = None, [], 0
        self.recorded.clear()

    def __del__(self) -> None:
        self.free()

    def _hand_out(self) -> None:
        # The allocator may give this request what was freed on its stream before.
        machine, owner = self.machine, self.owner
        machine.settle()
        for accesses, place in machine.freed.pop(owner.number, ()):
            late = [each for each in accesses if not owner.follows(each.stream, each.tick)]
            for each in late[:1]:
                used = each.told().format(machine.name(each.stream))
                words = f"{used}; {owner.name} freed it at {told(place)} and allocates again at {told(here())}"
                machine.findings.add(Kind.FREED, words)

    def _race(self, at: Timeline, now: Access, was: Access) -> None:
        name = self.machine.name
        words = f"{now.told().format(at.name)}; {was.told().format(name(was.stream))}"
        self.machine.findings.add(Kind.RACE, words)


class PageLocked:
    """Record of a storage in page-locked memory of the host: copies under way."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._copies: list[Access] = []

    def copied(self, at: Timeline, tick: int, tensor: Tensor, writes: bool, operation: str, place: Place) -> None:
        """Note a copy that a stream makes; `writes` if it is one to the host."""
        now = access_of(at.number, tick, tensor, writes, operation, place)
        if now is None:
            return
        for was in self._copies:
            meets = (writes or was.writes) and now.low < was.high and was.low < now.high
            if meets and not at.follows(was.stream, was.tick):
                words = f"{now.told().format(at.name)}; {was.told().format(self.machine.name(was.stream))}"
                self.machine.findings.add(Kind.RACE, f"page-locked memory: {words}")
        self._copies = [each for each in self._copies if not self._is_over(each)] + [now]

    def used(self, tensor: Tensor, writes: bool, operation: str) -> None:
        """Note that the host reads or writes."""
        self._copies = [each for each in self._copies if not self._is_over(each)]
        now = access_of(0, 0, tensor, writes, operation, ()) if self._copies else None
        for copy in self._copies if now is not None else ():
            assert now is not None
            if (copy.writes or writes) and now.low < copy.high and copy.low < now.high and _meet(now, copy):
                kind = Kind.HOST_READS if copy.writes else Kind.HOST_WRITES
                words = f"{operation} at {told(here())}; {copy.told().format(self.machine.name(copy.stream))}"
                self.machine.findings.add(kind, words)

    def _is_over(self, copy: Access) -> bool:
        return self.machine.host.clock.get(copy.stream, 0) >= copy.tick


Record = DeviceMemory | PageLocked


def record_of(tensor: Tensor) -> Record | None:
    """The record of a tensor's storage; None in pageable memory of the host."""
    try:
        return record_of_storage(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # a tensor without a storage
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return record_of(torch._C._functorch.get_unwrapped(tensor))
        return None


def record_of_storage(storage: Any) -> Record | None:
    """The record of a storage."""
    found: Record | None = storage.__dict__.get(_NAME)
    return found


def is_on_device(tensor: Tensor) -> bool:
    """Whether a tensor is on the virtual device."""
    return type(record_of(tensor)) is DeviceMemory


def put_on_device(tensor: Tensor, machine: Machine, *, is_allocated: bool = True) -> DeviceMemory:
    """Make a fresh tensor one of the device, in memory of torch's allocator if `is_allocated`."""
    storage: Any = tensor.untyped_storage()
    record = storage.__dict__.get(_NAME)
    if type(record) is not DeviceMemory or record.machine is not machine:
        storage.__dict__[_NAME] = record = DeviceMemory(machine, storage.nbytes() if is_allocated else 0)
    return record


def lock_pages(tensor: Tensor, machine: Machine) -> Tensor:
    """Make a fresh tensor one of page-locked memory. Raises `RuntimeError` where the system locks no more."""
    storage: Any = tensor.untyped_storage()
    if storage.nbytes() > machine.hardware.lockable_bytes:
        raise RuntimeError("CUDA error: out of memory")
    storage.__dict__[_NAME] = PageLocked(machine)
    return tensor


def access_of(stream: int, tick: int, tensor: Tensor, writes: bool, operation: str, place: Place) -> Access | None:
    """The access of an operation to a tensor; None if it has no elements."""
    numel = tensor.numel()
    if not numel:
        return None
    size, offset = tensor.element_size(), int(tensor.storage_offset())
    if tensor.is_contiguous():
        return Access(stream, tick, offset * size, (offset + numel) * size, writes, operation, place, None)
    sizes, strides = tuple(tensor.size()), tensor.stride()
    span = 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
    form = (offset, sizes, strides, size) if span != numel else None
    return Access(stream, tick, offset * size, (offset + span) * size, writes, operation, place, form)


def _meet(one: Access, other: Access) -> bool:
    """Whether two accesses whose ranges overlap have a byte in common."""
    if one.form is None and other.form is None:
        return True
    return not bytes_of(one).isdisjoint(bytes_of(other))


def bytes_of(access: Access) -> frozenset[int]:
    """Places of all bytes of an access."""
    if access.form is None:
        return frozenset(range(access.low, access.high))
    if isinstance(access.form, frozenset):
        return access.form
    offset, sizes, strides, size = access.form
    return frozenset(size * (offset + place) + byte for place in _places(sizes, strides) for byte in range(size))


def _places(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Iterator[int]:
    for index in product(*(range(1 if stride == 0 else n) for n, stride in zip(sizes, strides, strict=True))):
        yield sum(i * stride for i, stride in zip(index, strides, strict=True))


_resize = torch.UntypedStorage.resize_


def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """`UntypedStorage.resize_`: memory of the device is freed, and allocated on the current stream."""
    record = storage.__dict__.get(_NAME)
    if type(record) is DeviceMemory and size != record.num_bytes:
        before = list(record.accesses)
        record.free()
        record.begin(size)
        if size and before:  # the contents are copied
            record.accesses = []
    _resize(storage, size)
    return storage
