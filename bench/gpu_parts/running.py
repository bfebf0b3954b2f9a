"""Parts one after the other, each a process of its own with a limit, whose rows are read while it runs.

A part may end in any way: an exception, `os._exit`, a signal, memory that ran out, a hang, children that stay behind.
Each costs that part alone and is one row. A part has ended well when its file ends with `END`. A part for which no time
is left, or not its own limit, has failed in nothing: it was not run.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bench.gpu_parts.setting import NOT_RUN, Row

ROOT = Path(__file__).parents[2]
END = "end"  # the last line of a part's file
_LEAST_S = 5.0  # a part that has less is not started
_POLL_S = 0.2
_KILLED_S = 5.0  # for a killed process to go; one inside a driver's call may never
_SHOWN = 200  # characters of an error


class Part(NamedTuple):
    """A module of `bench/gpu_parts/`, with an argument after a colon, and the most seconds that it may take."""

    name: str
    limit_s: float


def run_parts(
    parts: Sequence[Part],
    command: Callable[[str, Path], Sequence[str]],
    out: Path,
    end_s: float,
) -> Iterator[tuple[str, Row]]:
    """Run one part after the other until `end_s` on the monotonic clock; yields (part, row) as rows are found.

    `command(part, file)` is a command that appends rows to the file, a JSON list a line, and `END` as JSON. A part that
    fails or is late ends with a row that says so and names its log, a file beside the rows.
    """
    for part in parts:
        left_s = end_s - time.monotonic()
        if left_s < _LEAST_S:
            yield part.name, Row("all", "no time was left", without=NOT_RUN)
            continue
        name = part.name.replace(":", "-").replace(" ", "-")
        file, log = out / f"{name}.jsonl", out / f"{name}.log"
        try:
            file.unlink(missing_ok=True)
            yield from ((part.name, row) for row in _watched(command(part.name, file), file, log, part, left_s))
        except OSError as error:  # a full disk, no more processes
            yield part.name, Row("failed", f"could not be run: {error}", False)


def _watched(command: Sequence[str], file: Path, log: Path, part: Part, left_s: float) -> Iterator[Row]:
    begin_s, rows, problem, limit_s = time.monotonic(), _Rows(file), "", min(part.limit_s, left_s)
    with log.open("w", encoding="utf-8") as text:
        # A session of its own, so that its children can be ended with it: they would keep the device's memory.
        process = subprocess.Popen(command, cwd=ROOT, stdout=text, stderr=text, start_new_session=True)
    try:
        while process.poll() is None and time.monotonic() - begin_s < limit_s:
            time.sleep(_POLL_S)
            yield from rows.new()
        if process.poll() is None:
            problem = f"had not ended after {limit_s:.0f} s"
    finally:
        gone = _end(process)
    yield from rows.new()
    if problem and gone and limit_s < part.limit_s:  # not its own fault
        yield Row("the rest", f"the time ended after {limit_s:.0f} s of this part", without=NOT_RUN)
        return
    if not problem and (process.returncode or not rows.has_ended):
        problem = f"ended with {process.returncode}" + ("" if process.returncode else " before its last row")
    if not gone:
        problem += " and could not be killed"
    if problem:
        yield Row("failed", f"{problem}: {_last_line(log)} ({log.name})", False)


def _end(process: "subprocess.Popen[bytes]") -> bool:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # also children of a part that has ended
    try:
        process.wait(_KILLED_S)
    except subprocess.TimeoutExpired:
        return False
    return True


class _Rows:
    """Rows of a file that another process appends to."""

    def __init__(self, file: Path) -> None:
        self._file, self._read = file, 0
        self.has_ended = False

    def new(self) -> Iterator[Row]:
        """Rows of the whole lines that were added; a line that is none is a row that says so."""
        if not self._file.exists():
            return
        with self._file.open("rb") as file:
            file.seek(self._read)
            lines = file.read().split(b"\n")[:-1]
        for line in lines:
            self._read += len(line) + 1
            try:
                found = json.loads(line)
                if found == END:
                    self.has_ended = True
                else:
                    yield Row(*found)
            except (ValueError, TypeError):
                yield Row("a broken row", line[:_SHOWN].decode(errors="replace"), False)


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError as error:
        return str(error)
    # A library's farewell may follow the error itself.
    errors = [line for line in lines if "Error" in line.partition(":")[0]]
    return (errors or lines or ["nothing was printed"])[-1].strip()[:_SHOWN]
