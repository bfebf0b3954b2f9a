"""Rows of a table in pages of a file: what is read and written, and what rows that nobody used keep."""

import os
from collections.abc import Sequence
from mmap import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from terrace.base.errors import TrainingError
from terrace.comm.ledger import Ledger
from terrace.comm.pace import UNPACED
from terrace.plan.kept_rows import RowPages
from terrace.plan.tables import TableTraffic
from terrace.runtime.clock import NO_CLOCK
from terrace.runtime.kept.channel import Channel
from terrace.runtime.kept.file import KeptFile, PagedFile
from terrace.runtime.kept.rows import RowsOnDisk, RowState

WIDTH, ROWS = 24, 1000  # a record of 288 bytes, 14 of them in a page
PAGES = RowPages(medium="disk", num_rows=ROWS, width=WIDTH, formats=("fp32", "fp32", "fp32"))


def rows_in(folder: Path, ledger: Ledger, pages: RowPages = PAGES) -> RowsOnDisk:
    channel = Channel(KeptFile(folder, ()), ledger, "disk")
    return RowsOnDisk(pages, channel, NO_CLOCK, UNPACED, 64, folder)


def initial() -> Tensor:
    return torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)


def filled(rows: RowsOnDisk) -> None:
    for window in rows.windows:
        rows.begin(window, initial()[window])


def moved(ledger: Ledger) -> list[int]:
    total = {str(message): size for (message, _), size in ledger.total().items()}
    return [total.get("row_read", 0), total.get("row_write", 0)]


@pytest.mark.parametrize(
    ("width", "states", "page", "number"), [(24, 3, 4096, 14), (1024, 3, 16384, 1), (1, 1, 4096, 1008)]
)
def test_a_page_has_as_many_records_as_fit(width: int, states: int, page: int, number: int) -> None:
    found = RowPages(medium="disk", num_rows=ROWS, width=width, formats=("fp32",) * states)
    assert (found.page_bytes, found.rows_of_page) == (page, number)
    assert number * found.record_bytes + 64 <= page < found.record_bytes * (number + 1) + 64 + 4096
    assert found.num_pages * number >= ROWS > (found.num_pages - 1) * number


def test_steps_read_and_write_the_pages_of_their_rows_once(tmp_path: Path) -> None:
    ledger, generator = Ledger(), torch.Generator().manual_seed(0)
    rows, wanted = rows_in(tmp_path, ledger), [initial(), torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)]
    filled(rows)
    assert moved(ledger) == [0, 0]  # nothing of this is a step's
    read = written = 0
    for step in range(6):
        used = torch.zeros(ROWS, dtype=torch.bool)
        for _ in range(3):  # look-ups of three micro-batches, which share rows and pages
            ids = torch.unique(torch.randint(0, ROWS, (40,), generator=generator))
            assert torch.equal(rows.look_up(ids, torch.float32, holds=True), wanted[0][ids])
            used[ids] = True
        pages = used.nonzero().flatten() // PAGES.rows_of_page
        read += 4096 * len({*pages.tolist()})
        used[::2] = False  # rows without a gradient
        chosen = used.nonzero().flatten()
        for part in rows.parts(len(chosen)):
            for state in range(3):
                wanted[state][chosen[part]] += step + state
                rows.write(state, chosen[part], rows.read(state, chosen[part]) + step + state)
        rows.store(chosen)
        written += 4096 * len({*(chosen // PAGES.rows_of_page).tolist()})
        assert moved(ledger) == [read, written]
        assert dict(rows.declared) == ledger.total()
    rows.drain()
    for state in range(3):  # rows that nobody used keep their bits
        assert torch.equal(RowState(rows, state, torch.device("cpu")).tensor.view(ROWS, WIDTH), wanted[state])
    rows.close()


def test_an_evaluation_holds_nothing_and_a_step_that_is_given_up_writes_nothing(tmp_path: Path) -> None:
    ledger = Ledger()
    rows = rows_in(tmp_path, ledger)
    filled(rows)
    ids = torch.tensor([3, 500])
    for holds, reads in ((True, 2), (True, 2), (False, 4), (True, 6)):
        rows.look_up(ids, torch.bfloat16, holds=holds)
        assert moved(ledger) == [4096 * reads, 0]
    rows.write(0, ids, torch.zeros(2, WIDTH))
    rows.forget()
    assert torch.equal(rows.look_up(ids, torch.float32, holds=True), initial()[ids])
    rows.close()


def test_a_rank_whose_rows_nobody_looks_up_reads_nothing(tmp_path: Path) -> None:
    """From the first step on, of a table that begins with zeros and was never written."""
    ledger, none = Ledger(), torch.empty(0, dtype=torch.int64)
    rows = rows_in(tmp_path, ledger)
    assert rows.look_up(none, torch.bfloat16, holds=True).shape == (0, WIDTH)
    assert not [*rows.parts(0)]
    rows.store(none)
    assert moved(ledger) == [0, 0]
    assert rows.look_up(torch.tensor([7]), torch.float32, holds=True).count_nonzero() == 0
    rows.close()


def test_rows_whose_pages_are_not_held_are_not_updated(tmp_path: Path) -> None:
    """Of look-ups of an evaluation, between those of a step and its update."""
    rows = rows_in(tmp_path, Ledger())
    filled(rows)
    rows.look_up(torch.tensor([3, 500]), torch.float32, holds=True)
    rows.look_up(torch.tensor([17, 900]), torch.float32, holds=False)
    for ids in ([3], [500], [999]):
        with pytest.raises(AssertionError, match="held"):
            rows.write(0, torch.tensor(ids), torch.zeros(1, WIDTH))
    rows.close()


def test_a_checkpoint_that_failed_in_a_window_is_followed_by_a_whole_one(tmp_path: Path) -> None:
    rows = rows_in(tmp_path, Ledger())
    filled(rows)
    with pytest.raises(OSError, match="full"), rows.within(slice(0, 28)):
        raise OSError("full")
    assert torch.equal(RowState(rows, 0, torch.device("cpu")).tensor.view(ROWS, WIDTH), initial())
    rows.close()


def test_neighbours_in_the_file_and_in_memory_pass_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more pages than there are calls at a time, in any order of memory; the bytes of each page are its own."""
    file, calls, places = PagedFile(tmp_path, 4096, 100), list[int](), torch.arange(60)
    memory, call = mmap(-1, 60 * 4096), os.pwritev
    numbers = torch.cat([torch.arange(30), torch.arange(40, 99, 2)])  # 30 neighbours, 30 single pages
    places[:30] = torch.arange(30, 60)
    places[30:] = torch.arange(30).flip(0)

    def counted(handle: int, parts: Sequence[memoryview], offset: int) -> int:
        calls.append(len(parts[0]) // 4096)
        return call(handle, parts, offset)

    monkeypatch.setattr(os, "pwritev", counted)
    contents = torch.frombuffer(memory, dtype=torch.uint8).view(60, 4096)
    contents[places, 0] = numbers.to(torch.uint8)
    file.write_pages(numbers, places, memoryview(memory))
    assert sum(calls) == 60
    assert sorted(calls)[:30] == [1] * 30
    assert len(calls) <= 30 + 16
    other = mmap(-1, 100 * 4096)
    file.read_pages(torch.arange(100), torch.arange(100), memoryview(other))
    found = torch.frombuffer(other, dtype=torch.uint8).view(100, 4096)
    assert torch.equal(found[numbers, 0].long(), numbers)
    assert found[40:99][1::2].count_nonzero() == 0  # never written
    file.close()


def test_a_window_is_set_page_by_page(tmp_path: Path) -> None:
    """Windows that checkpoints set, and a page that is damaged afterwards."""
    rows = rows_in(tmp_path, Ledger())
    rows.windows = [slice(at, min(ROWS, at + 28)) for at in range(0, ROWS, 28)]
    state = RowState(rows, 1, torch.device("cpu"))
    for window in list(rows.windows):
        with rows.within(window):
            state.open()
            state.tensor.copy_(torch.full((len(state.tensor),), float(window.start)))
            state.close()
    rows.drain()
    found = torch.cat([state.tensor for _ in state.windows(ROWS * WIDTH)]).view(ROWS, WIDTH)
    assert torch.equal(found[:, 0], torch.arange(ROWS) // 28 * 28.0)
    os.pwritev(rows._file._handle, [mmap(-1, 4096)], 4096)
    with pytest.raises(TrainingError, match=r"piece 1 of the kept states in .* has no mark"):
        rows.look_up(torch.tensor([20]), torch.float32, holds=True)
    rows.close()


def test_the_mean_of_a_step_is_that_of_drawn_ids() -> None:
    """Pages and rows of uniform ids, by drawing them; of a disk and of the host's memory."""
    generator, tokens, micros, ranks, draws = torch.Generator().manual_seed(1), 50, 2, 2, 400
    traffic = TableTraffic(
        tokens=tokens,
        rows=ROWS * ranks,
        width=WIDTH,
        item_bytes=4,
        degrees=(ranks,),
        dispatch=(),
        combine=(),
        trains=True,
    )
    ids = torch.randint(0, ROWS * ranks, (draws, micros, tokens * ranks), generator=generator)
    own = [[torch.unique(micro[micro < ROWS]) for micro in step] for step in ids]
    of_steps = [torch.unique(torch.cat(step)) for step in own]
    pages = sum(len({*(step // PAGES.rows_of_page).tolist()}) for step in of_steps) / draws
    found = PAGES.expected(traffic, micros, updates=True)
    assert (found.pages_read, found.pages_written) == pytest.approx((pages, pages), rel=0.02)
    assert (found.looked_up, found.written, found.read) == pytest.approx((pages * 4096, pages * 4096, 0), rel=0.02)
    host = RowPages(medium="host", num_rows=ROWS, width=WIDTH, formats=PAGES.formats)
    found = host.expected(traffic, micros, updates=True)
    looked_up = sum(len(micro) for step in own for micro in step) / draws * WIDTH * 4
    updated = sum(map(len, of_steps)) / draws * 3 * WIDTH * 4
    assert (found.looked_up, found.read, found.written) == pytest.approx((looked_up, updated, updated), rel=0.02)
