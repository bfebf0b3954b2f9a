"""Offloaded tensors of a flat parameter: kept below the device, with memory on it only while they are used.

A working copy has memory while it is updated and written; an accumulated gradient has memory from its first backward
until it is written, and from its read to the end of its update. Their addresses stay the same (terrace.runtime.pages),
so views of them remain valid.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from terrace.comm.lane import DONE, Ticket
from terrace.comm.ledger import Meter
from terrace.runtime.kept.whole import Whole
from terrace.runtime.pages import Pages


class Resident:
    """A tensor that stays on the device."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    @property
    def values(self) -> Tensor:
        return self._values

    @contextmanager
    def on_device(self, *, loads: bool = True) -> Iterator[None]:
        """Context in which the tensor has memory on the device; what is written to it is kept.

        Without `loads` its values are undefined at first.
        """
        yield


class Offloaded(Resident):
    """A `buffer` of `pages`, of which `part` is kept below the device as `whole`. Its memory counts as `category`."""

    def __init__(self, buffer: Tensor, part: Tensor, whole: Whole, pages: Pages, meter: Meter, category: str) -> None:
        self._buffer, self._part, self.whole, self._pages = buffer, part, whole, pages
        self._meter, self._category, self._has_memory = meter, category, False

    def free_initial(self) -> None:
        """Free the memory with which the buffer was made. Called once all views of it exist."""
        self._pages.give(self._buffer)

    @property
    def values(self) -> Tensor:
        """The part: a copy that is read from below, unless it has memory. No read or write may be in flight."""
        if self._has_memory:
            return self._part
        found = torch.empty_like(self._part)
        self.whole.read(found, counted=False).wait()
        return found

    @contextmanager
    def on_device(self, *, loads: bool = True) -> Iterator[None]:
        if self._has_memory:
            yield
            return
        self._pages.fill(self._buffer)
        self._has_memory = True
        if loads:
            self.whole.read(self._part, counted=False).wait()
        yield
        self.whole.write(self._part, counted=False).wait()
        self._has_memory = False
        self._pages.give(self._buffer)

    def open(self, *, reads: bool) -> Ticket:
        """Give the buffer memory until `evict` or `free`. With `reads` begin to read the part from below."""
        self._pages.fill(self._buffer)
        self._has_memory = True
        self._meter.add(self._category, self._buffer.nbytes)
        return self.whole.read(self._part) if reads else DONE

    def evict(self, after: Ticket = DONE) -> Ticket:
        """Write the part below once `after` is done, then free the memory. Call `count_freed` when that is over."""
        self._has_memory = False
        return self.whole.write(self._part, after, lambda: self._pages.give(self._buffer))

    def count_freed(self) -> None:
        """Subtract the memory that `evict` has freed from its category."""
        self._meter.add(self._category, -self._buffer.nbytes)

    def free(self) -> None:
        self._has_memory = False
        self._pages.give(self._buffer)
        self.count_freed()
