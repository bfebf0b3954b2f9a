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

from dataclasses import dataclass
from functools import cached_property

from terrace.plan.flats import FlatParamSpec
from terrace.plan.keep import HOST, MARK_BYTES, Medium
from terrace.plan.pieces import with_mark
from terrace.plan.plan import Plan
from terrace.plan.state_bytes import moments
from terrace.plan.tables import TableTraffic, distinct
from terrace.plan.wire import FORMATS


@dataclass(frozen=True, kw_only=True)
class RowPages:
    """The records of one rank's rows of a table on `medium`; `formats` are those of the states, parameters first."""

    medium: Medium
    num_rows: int
    width: int  # elements of a row
    formats: tuple[str, ...]
    trains: bool

    @cached_property
    def state_bytes(self) -> tuple[int, ...]:
        """Bytes of each state in a record."""
        return tuple(self.width * FORMATS[name].element_bytes for name in self.formats)

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of a record."""
        return sum(self.state_bytes)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page; in the host's memory a page is a record."""
        return self.record_bytes if self.medium == HOST else with_mark(self.record_bytes)

    @cached_property
    def rows_of_page(self) -> int:
        """Rows of a page."""
        return 1 if self.medium == HOST else (self.page_bytes - MARK_BYTES) // self.record_bytes

    @cached_property
    def num_pages(self) -> int:
        """Pages of all rows."""
        return -(-self.num_rows // self.rows_of_page)

    @property
    def num_bytes(self) -> int:
        """Bytes on the medium."""
        return self.num_pages * self.page_bytes

    def of_look_up(self, num_rows: int, num_new_pages: int) -> int:
        """Bytes that a look-up of `num_rows` distinct rows reads, of whose pages `num_new_pages` are not held yet."""
        return num_rows * self.state_bytes[0] if self.medium == HOST else num_new_pages * self.page_bytes

    def of_update(self, num_rows: int, num_pages: int) -> tuple[int, int]:
        """Bytes that an update of `num_rows` rows in `num_pages` pages reads, and that it writes."""
        if self.medium == HOST:
            return num_rows * self.record_bytes, num_rows * self.record_bytes
        return 0, num_pages * self.page_bytes

    def expected(self, look_ups: TableTraffic, num_micros: int) -> "RowBytes":
        """Mean bytes of a step of `num_micros` micro-batches, whose ids are independent and uniform."""
        ranks = self.ranks(look_ups)

        def pages(micros: int) -> float:
            return distinct(self.num_pages * ranks, micros * look_ups.tokens * ranks) / ranks

        def rows(micros: int) -> float:
            return distinct(look_ups.rows, micros * look_ups.tokens * ranks) / ranks

        # A page of a step that updates is read once; where none is updated, none is held from a look-up to the next.
        read_pages = pages(num_micros) if self.trains else num_micros * pages(1)
        updated = self.trains * rows(num_micros), self.trains * pages(num_micros)
        if self.medium == HOST:
            looked_up, (read, written) = num_micros * rows(1) * self.state_bytes[0], [updated[0] * self.record_bytes] * 2
            return RowBytes(round(looked_up), round(read), round(written), round(2 * updated[0]))
        return RowBytes(
            round(read_pages * self.page_bytes),
            0,
            round(updated[1] * self.page_bytes),
            round(read_pages + updated[1]),
            held=round(self.trains * pages(num_micros) * self.page_bytes),
        )

    @staticmethod
    def ranks(look_ups: TableTraffic) -> int:
        """Ranks that have different rows."""
        found = 1
        for degree in look_ups.degrees:
            found *= degree
        return found


@dataclass(frozen=True)
class RowBytes:
    """Mean bytes of a step: read by its look-ups, read and written by its update; single reads and writes of these.

    `held` are those of pages that wait in the host's memory for an update.
    """

    looked_up: int = 0
    read: int = 0
    written: int = 0
    accesses: int = 0
    held: int = 0


NO_ROWS = RowBytes()


def row_pages(plan: Plan, flat: FlatParamSpec) -> tuple[RowPages, ...]:
    """The records of a flat buffer with a spread table that is kept below; none of any other buffer."""
    if not plan.keep.table_below or not flat.is_spread:
        return ()
    num_rows, width = flat.params[0].shape
    formats = (plan.compute,)
    if flat.trainable:
        numels = moments(plan.update, flat.padded, flat.padded)
        formats = (plan.master, *(plan.sums for numel in numels if numel))
    found = RowPages(medium=plan.keep.table, num_rows=num_rows, width=width, formats=formats, trains=flat.trainable)
    return (found,)
