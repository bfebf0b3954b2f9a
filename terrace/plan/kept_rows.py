"""Rows of a spread table that are kept below the device (`Keep.table`), and the bytes that a step moves of them.

The parameters of a row and its optimizer states lie beside one another, as a *record*:

    record = sum over states of (elements of a row) x (bytes of an element)

The host's memory is read and written row by row. A look-up reads the parameters of its rows, and an update reads and
writes the records of the rows that have a gradient. A disk moves whole sectors, so a file has *pages*, each with as
many records as it has room for and a mark (terrace.runtime.kept.file):

    page = round4096(record + 64),   rows of a page = floor((page - 64) / record)

A step reads each page that it looks rows up in once, and writes each page of which it updates rows once. In between a
page is in the host's memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from terrace.plan.flats import FlatParamSpec
from terrace.plan.keep import HOST, MARK_BYTES, VECTOR, Medium
from terrace.plan.pieces import with_mark
from terrace.plan.plan import Plan
from terrace.plan.state_bytes import moments, rests_rows
from terrace.plan.tables import TableTraffic, distinct
from terrace.plan.wire import FORMATS


@dataclass(frozen=True, kw_only=True)
class RowPages:
    """The records of one rank's rows of a table on `medium`; `formats` are those of the states, parameters first."""

    medium: Medium
    num_rows: int
    width: int  # elements of a row
    formats: tuple[str, ...]

    @cached_property
    def state_bytes(self) -> tuple[int, ...]:
        return tuple(self.width * FORMATS[name].element_bytes for name in self.formats)

    @cached_property
    def record_bytes(self) -> int:
        return sum(self.state_bytes)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page; in the host's memory a page is a record."""
        return self.record_bytes if self.medium == HOST else with_mark(self.record_bytes)

    @cached_property
    def rows_of_page(self) -> int:
        return 1 if self.medium == HOST else (self.page_bytes - MARK_BYTES) // self.record_bytes

    @cached_property
    def num_pages(self) -> int:
        return -(-self.num_rows // self.rows_of_page)

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    def of_look_up(self, num_rows: int, num_new_pages: int) -> int:
        """Bytes that a look-up of `num_rows` distinct rows reads, which are in `num_new_pages` pages not in memory."""
        return num_rows * self.state_bytes[0] if self.medium == HOST else num_new_pages * self.page_bytes

    def of_update(self, num_rows: int, num_pages: int) -> tuple[int, int]:
        """Bytes that an update of `num_rows` rows in `num_pages` pages reads, and that it writes."""
        if self.medium == HOST:
            return num_rows * self.record_bytes, num_rows * self.record_bytes
        return 0, num_pages * self.page_bytes

    def expected(self, look_ups: TableTraffic, num_micros: int, *, updates: bool) -> "RowBytes":
        """Mean bytes of `num_micros` micro-batches, whose ids are independent and uniform, and of an update of them."""
        ranks = prod(look_ups.degrees)

        def share(number: int, micros: int) -> float:
            """Mean number of distinct rows or pages, of `number` on a rank, that `micros` micro-batches look up."""
            return distinct(number * ranks, micros * look_ups.tokens * ranks) / ranks

        rows, pages = share(self.num_rows, num_micros), share(self.num_pages, num_micros)
        if self.medium == HOST:
            moved = round(updates * rows * self.record_bytes)
            looked_up = num_micros * share(self.num_rows, 1) * self.state_bytes[0]
            return RowBytes(looked_up=round(looked_up), read=moved, written=moved)
        # Without an update no page is held from one look-up to the next.
        read, written = pages if updates else num_micros * share(self.num_pages, 1), updates * pages
        return RowBytes(
            looked_up=round(read * self.page_bytes),
            written=round(written * self.page_bytes),
            pages_read=round(read),
            pages_written=round(written),
        )


@dataclass(frozen=True, kw_only=True)
class RowBytes:
    """Mean bytes of a step: read by its look-ups, read and written by its update; and the pages of a disk among them.

    Pages that are read for an update wait for it in the host's memory.
    """

    looked_up: int = 0
    read: int = 0
    written: int = 0
    pages_read: int = 0
    pages_written: int = 0


NO_ROWS = RowBytes()


def row_pages(plan: Plan, flat: FlatParamSpec) -> tuple[RowPages, ...]:
    """The records of a flat buffer with a spread table that is kept below; none of any other buffer."""
    if not rests_rows(plan, flat):
        return ()
    num_rows, width = flat.params[0].shape
    return (_pages(plan, num_rows, width, flat.trainable),)


def _pages(plan: Plan, num_rows: int, width: int, trainable: bool) -> RowPages:
    formats: tuple[str, ...] = (plan.compute,)
    if trainable:
        numel = num_rows * width
        formats = (plan.master, *(plan.sums for each in moments(plan.update, numel, numel) if each))
    return RowPages(medium=plan.keep.table, num_rows=num_rows, width=width, formats=formats)


def rows_at_once(plan: Plan, width: int) -> int:
    """Rows that an update has on the device at a time.

    Elements that fill no vector are rounded in another way, so these rows end where a vector does.
    """
    return max(1, plan.keep.piece // width // VECTOR) * VECTOR


def passing_bytes(plan: Plan, look_ups: TableTraffic, num_micros: int, *, in_host: bool) -> int:
    """Mean bytes on the device of the rows that an update has there.

    With `in_host` the device is the host: pages that wait for the update are there, too.
    """
    if not plan.keep.table_below or not look_ups.trains:
        return 0
    pages = _pages(plan, -(-look_ups.rows // prod(look_ups.degrees)), look_ups.width, True)
    found = pages.expected(look_ups, num_micros, updates=True)
    updated = min(rows_at_once(plan, look_ups.width), round(look_ups.used(num_micros)))
    return updated * pages.record_bytes + in_host * found.pages_read * pages.page_bytes


def expected_rows(
    plan: Plan, flats: Sequence[FlatParamSpec], look_ups: TableTraffic, num_micros: int, *, updates: bool = True
) -> RowBytes:
    """Mean bytes of rows below that a step moves for a block with these flat buffers."""
    for flat in flats:
        for pages in row_pages(plan, flat):
            return pages.expected(look_ups, num_micros, updates=updates and flat.trainable)
    return NO_ROWS
