"""Rows of a table that are kept below the device (terrace.plan.kept_rows), in the host's memory or in a file.

Records are a tensor of pages in the host's memory: all pages of the table, or those that a step has read from its file.
A page of a file is read when one of its rows is first looked up, stays in memory until the update, and is written if
the update has changed one of its rows. No page is read before all writes are over.

    lane row_read     pages of look-up 1     pages that look-up 2 is the first to need
    compute           F1 ................... F2 .................... B2  B1  CLIP  UPDATE
    lane row_write                                                                        pages of updated rows

Look-ups gather rows from the pages in memory. An update has some rows on the device at a time.

Shape legend: n distinct rows, H elements of a row, P pages in memory, R rows of a page.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from math import nan
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path

import torch
from torch import Tensor

from terrace.comm.collectives import DTYPES
from terrace.comm.lane import DONE, Ticket
from terrace.comm.pace import Pace, lane_below
from terrace.plan.kept_rows import RowPages
from terrace.plan.wire import MessageClass
from terrace.runtime.clock import Clock
from terrace.runtime.kept.channel import Channel, Work
from terrace.runtime.kept.file import PagedFile
from terrace.runtime.kept.host import HostMemory
from terrace.runtime.stored import Storage

_WINDOW = 1 << 22  # elements of a state that a checkpoint has in memory at a time
_SAMPLE, _ROUNDS = 2048, 5  # rows or pages whose reads and writes are measured, and how often
_Call = Callable[[Tensor, Tensor, memoryview], None]
_READ, _WRITE = MessageClass.ROW_READ, MessageClass.ROW_WRITE


def _sample(number: int) -> Tensor:
    """Some of `number` rows or pages at random places, ascending."""
    return torch.randperm(number, generator=torch.Generator().manual_seed(0))[:_SAMPLE].sort().values


def _seconds(work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


class KeptRows:
    """The records of one rank's rows, of which an update has `num_at_once` on the device.

    `declared` are the bytes of all steps so far, by formula.
    """

    def __init__(self, pages: RowPages, channel: Channel, clock: Clock, pace: Pace, num_at_once: int) -> None:
        self.pages, self._channel, self._clock, self._pace = pages, channel, clock, pace
        self.declared = Counter[tuple[MessageClass, str]]()
        self._states = list[Tensor]()  # of the pages in memory (P, R, H)
        self._rows_at_once = num_at_once
        size = max(1, _WINDOW // pages.width // pages.rows_of_page) * pages.rows_of_page
        # Checkpoints read and write the rows of one window at a time.
        self.windows = [slice(at, min(pages.num_rows, at + size)) for at in range(0, pages.num_rows, size)]

    def look_up(self, rows: Tensor, dtype: torch.dtype, *, holds: bool) -> Tensor:
        """Parameters (n, H) of distinct ascending `rows`, in `dtype`; with `holds` an update of them may follow."""
        raise NotImplementedError

    def store(self, rows: Tensor) -> None:
        """Begin to store the records of distinct ascending `rows`, which an update has changed. Drops all others."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drop the rows of a step that updates none."""

    def bring(self, rows: Tensor) -> None:
        """Make ascending `rows` (n, on the CPU) readable outside of a step. What was `changed` before is stored."""
        raise NotImplementedError

    def changed(self) -> None:
        """Rows that were brought have changed."""

    def begin(self, window: slice, values: Tensor) -> None:
        """Set the initial parameters (n, H) of the rows of `window`, which were never written."""
        with self.within(window):
            self.write(0, torch.arange(window.start, window.stop), values)
            self.changed()

    def rate(self, device: torch.device) -> float:
        """Bytes of rows per second that move to a device, and as many back; 0 if they move in pages."""
        return 0.0

    def page_rates(self) -> tuple[float, float]:
        """Pages at random places that are read per second, and written; nan without pages. Changes no state."""
        return nan, nan

    def drain(self) -> None:
        """Wait until all changed rows are stored."""

    def close(self) -> None:
        """Free the room of the rows."""

    def read(self, state: int, rows: Tensor) -> Tensor:
        """One state (n, H) of rows that are there, on the device of `rows`."""
        here = rows.cpu()
        found: Tensor = self._states[state][self._places(here), here % self.pages.rows_of_page]
        return found.to(rows.device)

    def write(self, state: int, rows: Tensor, values: Tensor) -> None:
        """Set one state (n, H) of rows that are there."""
        here = rows.cpu()
        target = self._states[state]
        target[self._places(here), here % self.pages.rows_of_page] = values.to("cpu", target.dtype)

    def _places(self, rows: Tensor) -> Tensor:
        """The place in memory of the page of each of `rows`."""
        raise NotImplementedError

    def parts(self, num_rows: int) -> Iterator[slice]:
        """Slices of the rows of an update, which are on the device one after the other."""
        for first in range(0, num_rows, self._rows_at_once):
            self._channel.on_piece()
            yield slice(first, min(num_rows, first + self._rows_at_once))

    def visits(self) -> Iterator[slice]:
        """The elements of each window. While one is yielded, checkpoints see its rows alone."""
        for window in self.windows:
            with self.within(window):
                yield slice(window.start * self.pages.width, window.stop * self.pages.width)

    @contextmanager
    def within(self, window: slice) -> Iterator[None]:
        """Context in which checkpoints see the rows of `window` alone."""
        before, self.windows = self.windows, [window]
        self.bring(torch.arange(window.start, window.stop))
        try:
            yield
        finally:  # after an error, too: what is read next is the whole table
            self.windows = before

    def _count(self, message: MessageClass, num_bytes: int, expected: int) -> None:
        self._channel.count(message, num_bytes)
        self.declared[message, self.pages.medium] += expected

    def _views(self, memory: Tensor) -> list[Tensor]:
        """Each state (P, R, H) of the pages in `memory` (uint8)."""
        pages, found, begin = self.pages, list[Tensor](), 0
        shape = memory.numel() // pages.page_bytes, pages.rows_of_page, pages.width
        for name, size in zip(pages.formats, pages.state_bytes, strict=True):
            values = memory.view(DTYPES[name])
            item = values.element_size()
            strides = pages.page_bytes // item, pages.record_bytes // item, 1
            found.append(values.as_strided(shape, strides, begin // item))
            begin += size
        return found


class RowsInMemory(KeptRows):
    """Rows in the host's memory, below a device with one of its own. Raises `ConfigError` if that has no room."""

    def __init__(self, pages: RowPages, channel: Channel, clock: Clock, pace: Pace, num_at_once: int) -> None:
        super().__init__(pages, channel, clock, pace, num_at_once)
        self._states = self._views(HostMemory([pages.num_bytes]).piece(0))

    def look_up(self, rows: Tensor, dtype: torch.dtype, *, holds: bool) -> Tensor:
        self._clock.mark(self._clock.doing)
        with self._pace(lane_below(MessageClass.KEEP_READ, self.pages.medium), len(rows) * self.pages.state_bytes[0]):
            found = self.read(0, rows)
        self._count(_READ, found.nbytes, self.pages.of_look_up(len(rows), 0))
        self._clock.mark(f"wait {_READ.value}")
        return found.to(dtype)

    def store(self, rows: Tensor) -> None:
        # An update has moved them already, part by part.
        moved = sum(state.element_size() * state.shape[-1] for state in self._states) * len(rows)
        for message, expected in zip((_READ, _WRITE), self.pages.of_update(len(rows), 0), strict=True):
            self._count(message, moved, expected)

    def rate(self, device: torch.device) -> float:
        rows = _sample(self.pages.num_rows).to(device)
        rounds_s = [_seconds(lambda: self.write(0, rows, self.read(0, rows))) for _ in range(_ROUNDS)]
        return 2 * len(rows) * self.pages.state_bytes[0] / statistics.median(rounds_s)

    def bring(self, rows: Tensor) -> None:
        """They are there."""

    def _places(self, rows: Tensor) -> Tensor:
        return rows


class RowsOnDisk(KeptRows):
    """Rows in pages of a file in `folder`. Raises `ConfigError` as `KeptFile`."""

    def __init__(
        self, pages: RowPages, channel: Channel, clock: Clock, pace: Pace, num_at_once: int, folder: Path
    ) -> None:
        super().__init__(pages, channel, clock, pace, num_at_once)
        self._file = PagedFile(folder, pages.page_bytes, pages.num_pages)
        self.words = self._file.words
        self._memory, self._view = torch.empty(0, dtype=torch.uint8), memoryview(b"")
        self._states = self._views(self._memory)
        self._held = self._at = torch.empty(0, dtype=torch.int64)  # pages in memory, ascending, and the place of each
        self._is_updated = self._is_changed = False  # whether an update of what is held may follow; outside of a step
        self._written: Ticket = DONE

    def look_up(self, rows: Tensor, dtype: torch.dtype, *, holds: bool) -> Tensor:
        if not (holds and self._is_updated):
            self._let_go()
        self._is_updated, here = holds, rows.cpu()
        missing = self._missing(here)
        if len(missing):
            self._clock.mark(self._clock.doing)
            self._written.wait()
            self._clock.mark(f"wait {_WRITE.value}")
            self._channel.reader.submit(self._channel.timed(self._reading(missing), _READ)).wait()
            self._clock.mark(f"wait {_READ.value}")
            self._count(_READ, len(missing) * self.pages.page_bytes, self.pages.of_look_up(len(here), len(missing)))
        return self.read(0, rows).to(dtype)

    def store(self, rows: Tensor) -> None:
        numbers = self._pages(rows.cpu())
        if len(numbers):
            self._put(numbers)
            _, written = self.pages.of_update(len(rows), len(numbers))
            self._count(_WRITE, len(numbers) * self.pages.page_bytes, written)
        self.forget()

    def forget(self) -> None:
        self._held = self._at = self._held[:0]
        self._is_updated = self._is_changed = False

    def bring(self, rows: Tensor) -> None:
        missing = self._missing(rows)
        if len(missing):
            self._let_go()
            self._written.wait()
            self._reading(self._pages(rows))()

    def changed(self) -> None:
        self._is_changed = True

    def page_rates(self) -> tuple[float, float]:
        self.drain()
        pages, rounds_s = _sample(self.pages.num_pages), list[tuple[float, float]]()
        for _ in range(1 + _ROUNDS):  # a disk reads what was never written faster than anything else
            read_s = _seconds(self._reading(pages))
            self._put(pages)
            rounds_s.append((read_s, _seconds(self._written.wait)))
            self.forget()
        read_s, written_s = (statistics.median(each) for each in zip(*rounds_s[1:], strict=True))
        return len(pages) / read_s, len(pages) / written_s

    def drain(self) -> None:
        self._let_go()
        self._written.wait()

    def close(self) -> None:
        self._file.close()

    def _let_go(self) -> None:
        if self._is_changed:
            self._put(self._held)
        self.forget()

    def _pages(self, rows: Tensor) -> Tensor:
        found: Tensor = torch.unique_consecutive(rows // self.pages.rows_of_page)
        return found

    def _missing(self, rows: Tensor) -> Tensor:
        """The pages of ascending `rows` that are not held."""
        wanted = self._pages(rows)
        return wanted[~torch.isin(wanted, self._held, assume_unique=True)]

    def _places(self, rows: Tensor) -> Tensor:
        pages = rows // self.pages.rows_of_page
        found = torch.searchsorted(self._held, pages).clamp_(max=max(0, len(self._held) - 1))
        assert torch.equal(self._held[found], pages), "rows are read and written while their pages are held"
        return self._at[found]

    def _reading(self, pages: Tensor) -> Work:
        """Give further `pages` (ascending) a place in memory. Returns the work that reads them there."""
        places = torch.arange(len(self._held), len(self._held) + len(pages))
        self._reserve(len(self._held) + len(pages))
        self._held, order = torch.cat([self._held, pages]).sort()
        self._at = torch.cat([self._at, places])[order]
        return self._paced(self._file.read_pages, MessageClass.KEEP_READ, pages, places)

    def _put(self, pages: Tensor) -> None:
        """Begin to write held `pages` (ascending)."""
        places = self._at[torch.searchsorted(self._held, pages)]
        work = self._paced(self._file.write_pages, MessageClass.KEEP_WRITE, pages, places)
        self._written = self._channel.writer.submit(self._channel.timed(work, _WRITE))

    def _paced(self, call: _Call, lane: MessageClass, numbers: Tensor, places: Tensor) -> Work:
        name, num_bytes, view = lane_below(lane, self.pages.medium), len(numbers) * self.pages.page_bytes, self._view

        def work() -> None:
            with self._pace(name, num_bytes):
                call(numbers, places, view)

        return work

    def _reserve(self, num_pages: int) -> None:
        """Make memory for so many pages, with room for more."""
        size, held = self.pages.page_bytes, self._memory
        if num_pages * size <= held.numel():
            return
        room = min(self.pages.num_pages, num_pages + num_pages // 4)
        memory = mmap(-1, room * size, flags=MAP_PRIVATE | MAP_ANONYMOUS)  # begins a page, as direct I/O asks
        self._memory, self._view = torch.frombuffer(memory, dtype=torch.uint8), memoryview(memory)
        self._memory[: len(self._held) * size] = held[: len(self._held) * size]
        self._states = self._views(self._memory)


class RowState:
    """State number `index` of the records, as optimizers and checkpoints see it (terrace.runtime.stored)."""

    is_exact, is_coded, rests_below, nbytes = True, True, True, 0

    def __init__(self, rows: KeptRows, index: int, device: torch.device) -> None:
        self._rows, self._index, self._device, self._opened = rows, index, device, list[Tensor]()

    @property
    def tensor(self) -> Tensor:
        """The values (n) of all rows that are visited, a copy unless the state is open."""
        if self._opened:
            return self._opened[0]
        return torch.cat([self._rows.read(self._index, numbers).flatten() for numbers in self._visited()])

    def windows(self, numel: int) -> Iterator[slice]:
        return self._rows.visits()

    def read_rows(self, rows: Tensor, width: int) -> Tensor:
        return self._rows.read(self._index, rows)

    def write_rows(self, rows: Tensor, values: Tensor) -> None:
        self._rows.write(self._index, rows, values)

    def visits(self, numel: int) -> Iterator[slice]:
        raise AssertionError("rows are updated by their numbers")

    def read(self, part: slice) -> Tensor:
        raise AssertionError("rows are updated by their numbers")

    def write(self, part: slice, values: Tensor, step: int) -> None:
        raise AssertionError("rows are updated by their numbers")

    def open(self) -> None:
        """Hold the values in memory until `close`."""
        self._opened = [self.tensor]

    def close(self) -> None:
        values = self._opened.pop().view(-1, self._rows.pages.width)
        for numbers in self._visited():
            self._rows.write(self._index, numbers, values[: len(numbers)])
            self._rows.changed()
            values = values[len(numbers) :]

    def _visited(self) -> Iterator[Tensor]:
        for window in self._rows.windows:
            numbers = torch.arange(window.start, window.stop)
            self._rows.bring(numbers)
            yield numbers if self._device.type == "cpu" else numbers.to(self._device)


class RowStorage(Storage):
    """The states of `rows`, parameters first."""

    def __init__(self, rows: KeptRows, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._rows, self._numbers = rows, count()

    def parameters(self, values: Tensor, start: int) -> RowState:
        return RowState(self._rows, next(self._numbers), values.device)

    def zeros(self, name: str, numel: int, start: int, device: torch.device, *, signed: bool = True) -> RowState:
        return RowState(self._rows, next(self._numbers), device)
