"""Buffers that come and go: their values stay while they are filled, and their pages serve the next ones."""

import random
import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor

from terrace.runtime import pages
from terrace.runtime.pages import LEAST_BYTES, Pages

CPU = torch.device("cpu")
MIB = 1 << 20

linux = pytest.mark.skipif(not pages._moves_pages(), reason="this system does not move pages")


def num_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.fixture(params=[True, False], ids=["moved", "freed"])
def _system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(pages, "_moves_pages", lambda: False)


@pytest.mark.usefixtures("_system")
@pytest.mark.parametrize("limit", [0, 20 * MIB, 1 << 40])
def test_filled_buffers_keep_their_values(limit: int) -> None:
    choose, memory = random.Random(0), Pages(limit)
    sizes = [choose.randrange(1, 3 * LEAST_BYTES) for _ in range(12)]
    buffers = [memory.make(size, torch.uint8, CPU) for size in sizes]
    views = [buffer[size // 2 :] for buffer, size in zip(buffers, sizes, strict=True)]
    for buffer in buffers:
        memory.give(buffer)
    filled: dict[int, int] = {}
    for turn in range(300):
        number = choose.randrange(len(buffers))
        if number in filled:
            assert torch.equal(buffers[number], torch.full_like(buffers[number], filled.pop(number)))
            memory.give(buffers[number])
        else:
            memory.fill(buffers[number])
            filled[number] = turn % 251
            # Written and read through views that were made when there was no memory.
            buffers[number].fill_(filled[number])
            assert int(views[number][-1]) == filled[number]


@linux
def test_no_more_is_held_than_was_filled_at_one_time() -> None:
    sizes = [5 * MIB, 3 * MIB + 5, 8 * MIB - 1, 4 * MIB, 4 * MIB]
    memory = Pages(12 * MIB + 4)
    buffers = [memory.make(size, torch.uint8, CPU) for size in sizes]

    def visit(buffer: Tensor, other: Tensor) -> None:
        for each in (buffer, other):
            memory.fill(each)
            each.fill_(1)
        for each in (buffer, other):
            memory.give(each)

    before = resident_bytes()
    for number in range(-1, 4):  # at most 12 MiB at one time
        visit(buffers[number], buffers[number + 1])
    assert 11.9 * MIB < resident_bytes() - before < 13 * MIB
    faults = num_faults()
    for _ in range(3):
        for number in range(-1, 4):
            visit(buffers[number], buffers[number + 1])
    assert num_faults() - faults < 100  # 36,000 where memory is returned


@linux
def test_memory_beyond_the_limit_is_returned() -> None:
    memory = Pages(8 * MIB)
    buffers = [memory.make(8 * MIB, torch.uint8, CPU) for _ in range(4)]
    before = resident_bytes()
    for buffer in buffers:
        memory.fill(buffer)
        buffer.fill_(1)
    assert resident_bytes() - before > 31 * MIB
    for buffer in buffers:
        memory.give(buffer)
    assert resident_bytes() - before < 9 * MIB


def test_small_buffers_are_torchs() -> None:
    memory = Pages()
    buffer = memory.make(1000, torch.float32, CPU)
    memory.give(buffer)
    assert buffer.untyped_storage().nbytes() == 0
    memory.fill(buffer)
    assert buffer.untyped_storage().nbytes() == 4000
