"""Faults of a file of kept states, for each state in it: one line, and the run resumes with the same bits."""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from terrace.base.errors import ConfigError, TrainingError
from terrace.checkpoint.reading import Checkpoint, resume
from terrace.checkpoint.writing import save
from terrace.launch.start import LocalPool, World
from terrace.plan.keep import MARK_BYTES, Keep
from terrace.runtime.engine import Engine
from tests.support.checkpoints import BATCH, make, train
from tests.support.nightly import nightly

STATES = {
    "optimizer": Keep(optimizer="disk", piece=128),
    "params": Keep(params="disk", piece=128),
    "grads": Keep(grads="disk", piece=128),
    "activations": Keep(activations="disk", piece=128),
    "table": Keep(table="disk", piece=128),
}
Call = Callable[[int, Sequence[Any], int], int]  # preadv(2) or pwritev(2): handle, buffers, offset
Fault = Callable[[Call, int, Sequence[Any], int], int]


def refused(call: Call, handle: int, parts: Sequence[Any], offset: int) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def full(call: Call, handle: int, parts: Sequence[Any], offset: int) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def short(call: Call, handle: int, parts: Sequence[Any], offset: int) -> int:
    return 0


def flipped(call: Call, handle: int, parts: Sequence[Any], offset: int) -> int:
    count = call(handle, parts, offset)
    parts[0][3] ^= 16
    return count


def never_written(call: Call, handle: int, parts: Sequence[Any], offset: int) -> int:
    return len(parts[0])


def of_another_run(call: Call, handle: int, parts: Sequence[Any], offset: int) -> int:
    count = call(handle, parts, offset)
    parts[0][-MARK_BYTES + 8 : -MARK_BYTES + 24] = bytes(16)  # the file's number (terrace.runtime.kept.file)
    return count


FAULTS: dict[str, tuple[str, Fault]] = {
    "cannot be read in .*: Input/output error; free space or repair the disk": ("preadv", refused),
    "cannot be written in .*: No space left on device; free space": ("pwritev", full),
    r"ends after \d+ of \d+ bytes: the disk lost a part of it": ("preadv", short),
    "was damaged on the disk: its checksum differs": ("preadv", flipped),
    "a write never arrived|has no mark": ("pwritev", never_written),
    "is of another run": ("preadv", of_another_run),
}


@contextmanager
def broken(name: str, fault: Fault, after: int) -> Iterator[None]:
    """Calls of `os.name` have a fault, all but the first few."""
    call, left = getattr(os, name), [after]

    def spoiled(handle: int, parts: Sequence[Any], offset: int) -> int:
        left[0] -= 1
        return call(handle, parts, offset) if left[0] >= 0 else fault(call, handle, parts, offset)

    vars(os)[name] = spoiled
    try:
        yield
    finally:
        vars(os)[name] = call


def engine_of(world: World, state: str, folder: Path, scale: float = 9) -> Engine:
    stored: dict[str, Any] = {"keep": STATES[state], "micro_batch": BATCH}
    model = "llama tied"
    if state == "table":
        model, stored["vocabulary"] = "llama, many ids", {"package": 1}
    return make(world, (1,), "ddp", "fp32", scale, model, stored=stored, keep_folder=folder)


def file_of(engine: Engine, state: str) -> int:
    """The handle of the file that has the state."""
    kept: Any = engine.below
    (rows,) = kept._rows.values() if state == "table" else (None,)
    return int((kept._channels["disk"].store if rows is None else rows._file)._handle)


def error_of(engine: Engine) -> str:
    """The error with which two steps end, or the writes after them."""
    try:
        train(engine, 2, 4)
        engine.drain()
    except TrainingError as error:
        return str(error)
    return ""


def faults(world: World, state: str, folder: Path) -> tuple[list[float], dict[str, str], list[list[float]]]:
    """Losses of two steps behind a checkpoint; the error that each fault ends with; and losses of resumed runs."""
    kept = folder / "kept"
    kept.mkdir()
    engine = engine_of(world, state, kept, 1)
    train(engine, 0, 2)
    engine.drain()
    save(engine, folder, 2, {}, 2)
    whole = train(engine, 2, 4)
    handle = file_of(engine, state)
    assert stat.S_IMODE(os.fstat(handle).st_mode) == 0o600
    assert os.fstat(handle).st_nlink == 0
    engine.close()
    (checkpoint,) = (folder / "checkpoints").glob("step-*")

    def resumed() -> Engine:
        again = engine_of(world, state, kept)
        resume(again, Checkpoint(checkpoint))
        return again

    errors, losses = {}, []
    for words, (name, fault) in FAULTS.items():
        again = resumed()
        # A step reads and writes all its rows in a call.
        with broken(name, fault, 0 if state == "table" else 2):
            errors[words] = error_of(again)
        again.close()
        assert not list(kept.iterdir())
        again = resumed()
        losses.append(train(again, 2, 4))
        again.close()
    with without_direct_io():
        again = resumed()
    assert re.fullmatch("kept states pass the page cache: .* has no direct I/O", again.below.words)
    losses.append(train(again, 2, 4))
    again.close()
    assert not list(kept.iterdir())
    return whole, errors, losses


@contextmanager
def without_direct_io() -> Iterator[None]:
    opens = os.open

    def plain(path: str, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opens(path, flags, *more, **named)

    vars(os)["open"] = plain
    try:
        yield
    finally:
        vars(os)["open"] = opens


@pytest.mark.parametrize("state", ["optimizer", "activations", "table", *nightly("params", "grads")])
def test_a_fault_of_the_file_is_one_line_and_the_run_resumes(pool: LocalPool, tmp_path: Path, state: str) -> None:
    ((whole, errors, losses),) = pool.run(1, faults, state, tmp_path, timeout_s=120.0)
    assert len(errors) == len(FAULTS)
    for words, error in errors.items():
        assert re.search(words, error), error
        assert "\n" not in error
        assert "resume from the last checkpoint" in error
    assert losses == [whole] * (len(FAULTS) + 1)


def in_memory(world: World, state: str) -> str:
    with pytest.raises(ConfigError) as error:
        engine_of(world, state, Path("/dev/shm"))
    return str(error.value)


@pytest.mark.parametrize("state", STATES)
def test_files_in_memory_are_refused(pool: LocalPool, state: str) -> None:
    (error,) = pool.run(1, in_memory, state, timeout_s=60.0)
    assert re.fullmatch("/dev/shm is on tmpfs, whose files are in memory, .* as train.keep_folder", error)
