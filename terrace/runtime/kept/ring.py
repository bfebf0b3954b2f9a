"""The ring: pieces of fixed size in which states pass through the device, read ahead and written back.

A step takes the pieces in the same order every time, so the next pieces are known, across the end of a step too: while
one piece is updated, those after it are being read and those before it written, each on a lane of its own. A slot is
filled again when its last piece is written. There are no more slots than pieces, so a piece is never read before its
own last write.

    lane keep_read     read 3       read 4       read 5          a slot is free when its write is over
    compute               update 1     update 2     update 3
    lane keep_write          write 0      write 1      write 2

On a CPU the update works in the memory that the file is read into. A device has a part of its own memory in each slot,
filled from page-locked memory by streams of the lanes.
"""

import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch
from torch import Tensor

from terrace.accelerator import has_streams
from terrace.base.errors import ConfigError
from terrace.base.words import quantity
from terrace.comm.lane import DONE, Ticket, behind
from terrace.comm.ledger import Ledger
from terrace.plan.keep import SECTOR_BYTES
from terrace.plan.wire import MessageClass
from terrace.runtime.clock import Clock
from terrace.runtime.kept.channel import Channel, Store, Work
from terrace.runtime.kept.host import HostMemory

_MEASURED_BYTES, _MEASURED_S = 128 << 20, 1.0  # of pieces that pass again and again, and for how long
WAIT = f"wait {MessageClass.KEEP_READ.value}"


class Slot(ABC):
    """The memory of one piece: `memory` (bytes) on the device of the update."""

    memory: Tensor

    @abstractmethod
    def fill(self, store: Store, number: int) -> None:
        """Read a piece. Blocks until it is there."""

    @abstractmethod
    def leave(self) -> None:
        """The update is issued: from now on a lane may `store` the piece."""

    @abstractmethod
    def store(self, store: Store, number: int) -> None:
        """Write the piece. Blocks until it is written."""

    @abstractmethod
    def copy_to(self, target: Tensor) -> None:
        """Copy the piece that was read to `target`. Blocks until it is copied."""

    @abstractmethod
    def copy_from(self, source: Tensor, dtype: torch.dtype) -> None:
        """Copy `source` into the piece as `dtype`. `store` may follow at once."""

    def _values(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return self.memory[: like.numel() * dtype.itemsize].view(dtype)


class HostSlot(Slot):
    """A slot of a CPU."""

    def __init__(self, num_bytes: int) -> None:
        memory = mmap(-1, num_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)  # begins a page, as direct I/O asks
        self.memory, self._view = torch.frombuffer(memory, dtype=torch.uint8), memoryview(memory)

    def fill(self, store: Store, number: int) -> None:
        store.read(number, self._view)

    def leave(self) -> None:
        pass

    def store(self, store: Store, number: int) -> None:
        store.write(number, self._view)

    def copy_to(self, target: Tensor) -> None:
        target.copy_(self._values(target, target.dtype))

    def copy_from(self, source: Tensor, dtype: torch.dtype) -> None:
        self._values(source, dtype).copy_(source)


class DeviceSlot(Slot):
    """A slot of a device with streams. `reading` and `writing` are the streams of the two lanes."""

    def __init__(self, num_bytes: int, device: torch.device, reading: torch.Stream, writing: torch.Stream) -> None:
        self._device, self._reading, self._writing = device, reading, writing
        try:
            locked = torch.empty(num_bytes + SECTOR_BYTES, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise ConfigError(
                f"the system cannot page-lock {quantity(num_bytes, 'B')} for a piece of plan.keep: allow more with "
                "ulimit -l, or lower plan.keep.piece, or plan.keep.ring if optimizer states are kept"
            ) from error
        first = -locked.data_ptr() % SECTOR_BYTES
        self._host = locked[first : first + num_bytes]
        self._view = memoryview(self._host.numpy())  # type: ignore[arg-type]
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._updated = torch.Event(device)

    def fill(self, store: Store, number: int) -> None:
        store.read(number, self._view)
        with self._reading:
            self.memory.copy_(self._host, non_blocking=True)
        self._reading.synchronize()

    def leave(self) -> None:
        self._updated.record(torch.accelerator.current_stream(self._device))

    def store(self, store: Store, number: int) -> None:
        self._writing.wait_event(self._updated)
        with self._writing:
            self._host.copy_(self.memory, non_blocking=True)
        self._writing.synchronize()
        store.write(number, self._view)

    def copy_to(self, target: Tensor) -> None:
        with self._reading:
            target.copy_(self._values(target, target.dtype), non_blocking=True)
        self._reading.synchronize()

    def copy_from(self, source: Tensor, dtype: torch.dtype) -> None:
        with self._writing:
            self._values(source, dtype).copy_(source, non_blocking=True)
            self._updated.record(self._writing)


class _Place(Slot):
    """A piece where it rests in the host's memory."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory

    def fill(self, store: Store, number: int) -> None:
        self.memory = self._memory.piece(number)

    def leave(self) -> None: ...

    def store(self, store: Store, number: int) -> None: ...

    def copy_to(self, target: Tensor) -> None:
        target.copy_(self._values(target, target.dtype))

    def copy_from(self, source: Tensor, dtype: torch.dtype) -> None:
        self._values(source, dtype).copy_(source)


def make_slots(number: int, num_bytes: int, device: torch.device) -> list[Slot]:
    """Slots for pieces of up to `num_bytes`. Raises `ConfigError` if the system locks no memory for them."""
    if not has_streams(device):
        return [HostSlot(num_bytes) for _ in range(number)]
    reading, writing = torch.Stream(device), torch.Stream(device)
    return [DeviceSlot(num_bytes, device, reading, writing) for _ in range(number)]


class Ring:
    """Passes pieces of a channel in `order`, again and again. `clock` counts waits."""

    def __init__(self, channel: Channel, order: Sequence[int], slots: Sequence[Slot], clock: Clock) -> None:
        assert len(slots) <= len(order), "a piece could be read before it is written"
        self._channel, self._store, self._order, self._clock = channel, channel.store, tuple(order), clock
        self._next = 0  # place in the order of the next piece to read
        self._ahead = deque[tuple[int, Slot, Ticket]]()  # pieces that are read, or being read
        self._free = deque[tuple[Slot, Ticket]]((slot, DONE) for slot in slots)  # with the write that each waits for

    def take(self, number: int) -> Slot:
        """The slot of piece `number`, the next one in the order but for those left out; `give` returns it."""
        self._channel.on_piece()
        self._read_ahead()
        found, slot, ticket = self._ahead.popleft()
        for _ in self._order:
            if found == number:
                break
            self._free.append((slot, ticket))  # of a block whose update was given up (terrace.runtime.layer_wise)
            self._read_ahead()
            found, slot, ticket = self._ahead.popleft()
        assert found == number, f"no piece {number} passes the ring"
        if not ticket.is_done:
            self._clock.mark("update")
            ticket.wait()
            self._clock.mark(WAIT)
        ticket.wait()  # raises an error of its read
        self._channel.count(MessageClass.KEEP_READ, self._store.sizes[number])
        return slot

    def give(self, number: int, slot: Slot) -> None:
        """Write piece `number` back, and read the next one when its slot is free."""
        slot.leave()
        store, channel = self._store, self._channel
        work = channel.timed(lambda: slot.store(store, number), MessageClass.KEEP_WRITE)
        self._free.append((slot, channel.writer.submit(work)))
        channel.count(MessageClass.KEEP_WRITE, store.sizes[number])
        self._read_ahead()

    def drain(self) -> None:
        for _, ticket in self._free:
            ticket.wait()
        for _, _, ticket in self._ahead:
            ticket.wait()

    @contextmanager
    def apart(self) -> Iterator[tuple[Slot, Store]]:
        """A slot and the store, to read and write pieces in any order; what was read ahead is read again."""
        self.drain()
        self._next -= len(self._ahead)
        self._free.extend((slot, DONE) for _, slot, _ in self._ahead)
        self._ahead.clear()
        yield self._free[0][0], self._store

    def rate(self) -> float:
        """Bytes per second in each direction while pieces pass and nothing is computed. Changes no state."""
        order, size = list[int](), 0
        for number in self._order:
            if size < _MEASURED_BYTES:
                order.append(number)
                size += self._store.sizes[number]
        with self.apart() as (slot, store):
            for number in order:  # a disk reads what was never written faster than anything else
                slot.fill(store, number)
                slot.leave()
                slot.store(store, number)
            slots, alone = [slot for slot, _ in self._free][: len(order)], Channel(store, Ledger(), "")
            ring, rounds_s = Ring(alone, order, slots, self._clock), list[float]()
            while sum(rounds_s) < _MEASURED_S:
                begin_s = time.perf_counter()
                for number in order:
                    ring.give(number, ring.take(number))
                ring.drain()
                rounds_s.append(time.perf_counter() - begin_s)
            alone.stop()
        return size / statistics.median(rounds_s)

    def _read_ahead(self) -> None:
        while self._free:
            slot, written = self._free.popleft()
            number = self._order[self._next % len(self._order)]
            self._next += 1
            work = self._channel.timed(_reading(slot, self._store, number), MessageClass.KEEP_READ)
            self._ahead.append((number, slot, self._channel.reader.submit(behind(written, work))))


def _reading(slot: Slot, store: Store, number: int) -> Work:
    return lambda: slot.fill(store, number)


class InPlace:
    """As `Ring`, for pieces in the host's `memory` that are updated there: nothing passes."""

    def __init__(self, channel: Channel, memory: HostMemory) -> None:
        self._channel, self._place = channel, _Place(memory)

    def take(self, number: int) -> Slot:
        self._channel.on_piece()
        self._place.fill(self._channel.store, number)
        return self._place

    def give(self, number: int, slot: Slot) -> None:
        """The piece is where it belongs."""

    @contextmanager
    def apart(self) -> Iterator[tuple[Slot, Store]]:
        yield self._place, self._channel.store
