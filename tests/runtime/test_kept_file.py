"""The file of kept states: what is private, and what is noticed."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from terrace.base.errors import ConfigError, TrainingError
from terrace.comm.ledger import Ledger
from terrace.plan.wire import MessageClass
from terrace.runtime.clock import HostClock
from terrace.runtime.kept.channel import Channel
from terrace.runtime.kept.file import KeptFile, scratch
from terrace.runtime.kept.ring import Ring, make_slots
from tests.virtual_cuda.rehearsal import rehearsed

SIZE = 8192
CPU = torch.device("cpu")


def view(fill: int) -> memoryview:
    slot = make_slots(1, SIZE, CPU)[0]
    slot.memory.fill_(fill)
    return memoryview(slot.memory.numpy())  # type: ignore[arg-type]


def written(folder: Path) -> KeptFile:
    file = KeptFile(folder, [SIZE] * 3)
    for number in range(2):
        file.write(number, view(number + 1))
    return file


def test_pieces_come_back_and_those_never_written_are_zero(tmp_path: Path) -> None:
    file = written(tmp_path)
    for number, fill in ((0, 1), (1, 2), (2, 0)):
        memory = view(9)
        file.read(number, memory)
        assert bytes(memory[: SIZE - 64]) == bytes([fill]) * (SIZE - 64)


def test_a_file_has_no_name_and_is_private(tmp_path: Path) -> None:
    file = written(tmp_path)
    assert not list(tmp_path.iterdir())
    assert os.fstat(file._handle).st_mode & 0o077 == 0
    assert os.fstat(file._handle).st_blocks * 512 >= 3 * SIZE, "room is claimed at once"
    handle = file._handle
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def spoil(file: KeptFile, place: int, data: bytes) -> None:
    """Write bytes behind the file's back."""
    plain = os.open(f"/proc/self/fd/{file._handle}", os.O_RDWR)
    os.pwrite(plain, data, place)
    os.fsync(plain)
    os.close(plain)


def other_mark(file: KeptFile) -> bytes:
    other = written(file.folder)
    memory = view(0)
    other.read(1, memory)
    return bytes(memory)


def test_what_the_disk_changes_is_noticed(tmp_path: Path) -> None:
    def wrong(change: object) -> str:
        file = written(tmp_path)
        assert callable(change)
        change(file)
        with pytest.raises(TrainingError, match="resume from the last checkpoint") as error:
            file.read(1, view(0))
        return str(error.value)

    assert "was damaged on the disk: its checksum differs" in wrong(lambda file: spoil(file, SIZE + 77, b"\x03"))
    assert "has no mark" in wrong(lambda file: spoil(file, SIZE, bytes(SIZE)))
    assert "is of another run" in wrong(lambda file: spoil(file, SIZE, other_mark(file)))
    assert "ends after 8192 of 24576 bytes" in wrong(lambda file: os.ftruncate(file._handle, SIZE))

    def lost(file: KeptFile) -> None:
        memory = view(0)
        file.read(1, memory)
        before = bytes(memory)
        file.write(1, view(7))
        spoil(file, SIZE, before)

    assert "was written 1 times, not 2: a write never arrived" in wrong(lost)

    def misplaced(file: KeptFile) -> None:
        memory = view(0)
        file.read(0, memory)
        spoil(file, SIZE, bytes(memory))

    assert "is piece 0" in wrong(misplaced)


def test_a_file_is_not_closed_within_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handle's number may be that of another file at once, into which a lane would write."""
    file, begun, over, writes = written(tmp_path), threading.Event(), threading.Event(), os.pwritev

    def slow(*given: Any) -> int:
        begun.set()
        assert over.wait(10)
        return writes(*given)

    monkeypatch.setattr(os, "pwritev", slow)
    writing, closing = (threading.Thread(target=call) for call in (lambda: file.write(0, view(3)), file.close))
    writing.start()
    assert begun.wait(10)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive(), "it waits for the write"
    over.set()
    for thread in (writing, closing):
        thread.join(10)
    with pytest.raises(TrainingError, match=r"cannot be read in .*: Bad file descriptor"):
        file.read(0, view(0))


def test_a_full_disk_is_noticed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(ConfigError, match=r"free, and one rank keeps 24\.6 kB there: free space"):
            KeptFile(tmp_path, [SIZE] * 3)
    # Some file systems take space for a write all the same.
    file = written(tmp_path)
    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(TrainingError, match=r"cannot be written in .*: No space left on device; free space"):
        file.write(0, view(1))


def test_folders_that_cannot_hold_states_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; name a folder that exists"):
        KeptFile(tmp_path / "missing", [SIZE])
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="it is a file; name a folder"):
        KeptFile(tmp_path / "file", [SIZE])
    memory = Path("/dev/shm")  # the one tmpfs that every Linux has
    if memory.is_dir():
        with pytest.raises(ConfigError, match="is on tmpfs, whose files are in memory"):
            KeptFile(memory, [SIZE])


def test_without_direct_io_pieces_pass_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opens = os.open

    def plain(path: str, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opens(path, flags, *more)

    monkeypatch.setattr(os, "open", plain)
    file = written(tmp_path)
    assert not file.is_direct
    assert not list(tmp_path.iterdir())
    memory = view(0)
    file.read(1, memory)
    assert memory[0] == 2


def test_too_little_memory_to_page_lock_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of the ring, and those in which parameters and gradients pass, are made by the same call."""
    empty = torch.empty

    def scarce(*given: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*given, **named)

    with rehearsed():
        monkeypatch.setattr(torch, "empty", scarce)
        with pytest.raises(
            ConfigError, match=r"^the system cannot page-lock 8\.19 kB for a piece of plan\.keep: allow .*"
        ):
            make_slots(2, SIZE, torch.device("cuda"))
        monkeypatch.undo()


def test_a_ring_passes_pieces_in_order_and_counts_them(tmp_path: Path) -> None:
    """With as many slots as pieces, and with fewer: every piece is what the round before has left."""
    for num_slots in (2, 3):
        ledger = Ledger()
        file = KeptFile(tmp_path, [SIZE] * 3)
        channel = Channel(file, ledger, "disk")
        ring = Ring(channel, range(3), make_slots(num_slots, SIZE, CPU), HostClock())
        called = list[int]()
        channel.on_piece = lambda called=called: called.append(1)  # type: ignore[misc]
        for times in range(4):
            for number in range(3):
                slot = ring.take(number)
                assert slot.memory[0] == 10 * number * (times > 0) + times
                slot.memory.fill_(10 * number + times + 1)
                ring.give(number, slot)
            if times == 1:  # what was read ahead is read again
                with ring.apart() as (free, same):
                    free.fill(same, 1)
                    assert free.memory[0] == 12
        assert len(called) == 12, "a watchdog sees every piece"
        ring.drain()
        assert ring.rate() > 0
        slot = ring.take(0)
        assert slot.memory[0] == 4, "measuring changes nothing"
        total = ledger.total()
        assert total[MessageClass.KEEP_READ, "disk"] == 13 * SIZE
        assert total[MessageClass.KEEP_WRITE, "disk"] == 12 * SIZE
        channel.close()


def test_a_piece_that_is_damaged_stops_the_update(tmp_path: Path) -> None:
    file = written(tmp_path)
    channel = Channel(file, Ledger(), "disk")
    ring = Ring(channel, range(2), make_slots(2, SIZE, CPU), HostClock())
    spoil(file, SIZE + 5, b"\xff")
    ring.give(0, ring.take(0))
    with pytest.raises(TrainingError, match="piece 1 of the kept states"):
        ring.take(1)
    channel.close()


def test_a_scratch_file_has_no_name(tmp_path: Path) -> None:
    memory = scratch(tmp_path, 3 * SIZE + 5)
    memory[-1] = 7
    assert len(memory) == 3 * SIZE + 5
    assert not list(tmp_path.iterdir())
