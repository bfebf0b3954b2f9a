"""The lines that only a GPU reaches, found in the syntax of the code, and which of them a rehearsal executes.

A line belongs to a GPU if its function or class is named in `WHOLE`, or if it is on the GPU's side of a branch that
asks for one (`ASKED`), also behind an early return of the other side. Lines are statements; what an import
runs, such as a `def`, is left out. Not among them are lines that other tests run without a device: Triton's kernels in
the interpreter, and the calls for mapped pages against a driver that is simulated.
"""

import ast
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from uuid import uuid4

from tests.virtual_cuda.findings import ROOT

FOLDER = "VIRTUAL_CUDA_LINES"  # environment variable: where processes leave what they have executed
# Rooms that run on devices; the others compute about them without one.
ROOMS = ("accelerator.py", "checkpoint", "comm", "generation", "launch", "model", "probe", "rl", "runtime", "train")
ASKED = ("has_streams(", "is_available()", "num_devices()", "self._on_device", "self._pinned")
WHOLE = {
    "accelerator.py": "*",
    "comm/process_group.py": "_has_devices",
    "comm/lane.py": "Stream* _Stream*",
    "launch/device.py": "take_device",
    "model/fused_attention.py": "*",
    "model/pair_kernels.py": "_cuda_* _cudnn_* _repeats",
    "runtime/block_messages.py": "*._gather_fetched*",
    "runtime/clock.py": "timed_event StreamClock*",
    "runtime/kept/ring.py": "DeviceSlot*",
    "runtime/kept/whole.py": "_Computed*",
    "runtime/scaled_products.py": "on_device _padded compiled_quantise _in_form _compiled",
}


class Line(NamedTuple):
    """A statement of a file below `terrace`: its lines up to its first inner statement, and its function."""

    file: str
    first: int
    last: int
    function: str

    def __str__(self) -> str:
        return f"terrace/{self.file}:{self.first} {self.function}"


@cache
def gpu_lines() -> tuple[Line, ...]:
    """All of them, by file."""
    top = ROOT / "terrace"
    found: list[Line] = []
    for room in ROOMS:
        for path in sorted((top / room).rglob("*.py")) if (top / room).is_dir() else [top / room]:
            name = path.relative_to(top).as_posix()
            found += in_source(path.read_text(), name, WHOLE.get(name, "").split())
    return tuple(found)


def in_source(source: str, name: str, whole: Sequence[str] = ()) -> list[Line]:
    """The GPU's lines of one file; `whole` are patterns of qualified names that are the GPU's altogether."""
    found: list[Line] = []

    def visit(body: Sequence[ast.stmt], qualified: str, is_gpu: bool, runs: bool) -> None:
        for index, statement in enumerate(body):
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                inner = f"{qualified}.{statement.name}".lstrip(".")
                named = is_gpu or any(fnmatch(inner, pattern) for pattern in whole)
                visit(statement.body, inner, named, runs or isinstance(statement, ast.FunctionDef))
                continue
            parts = [getattr(statement, part, []) for part in ("body", "orelse", "finalbody")]
            parts += [each.body for each in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ()))]
            sides = [is_gpu] * len(parts)
            if isinstance(statement, ast.If) and (side := _side(statement.test)) is not None:
                sides[:2] = [side, not side]
                # One side ends here, so what follows is the other's.
                leaves = isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue)
                rest_is_gpu = not side if leaves and not statement.orelse else None
            else:
                rest_is_gpu = None
            if is_gpu and runs and not _is_text(statement):
                inside = [part[0].lineno for part in parts if part]
                last = min(inside) - 1 if inside else statement.end_lineno or statement.lineno
                found.append(Line(name, statement.lineno, max(statement.lineno, last), qualified))
            for part, side_is_gpu in zip(parts, sides, strict=True):
                visit(part, qualified, side_is_gpu, runs)
            if rest_is_gpu is not None:
                visit(body[index + 1 :], qualified, rest_is_gpu, runs)
                return

    visit(ast.parse(source).body, "", False, False)
    return found


def _side(test: ast.expr) -> bool | None:
    """Whether the body of `if test` is the GPU's (True), or what is behind it (False); None if nobody asks."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _side(test.operand)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        sides = [side for each in test.values if (side := _side(each)) is not None]
        # `not a GPU or ...` may hold on one, too: only a conjunction says something of the body.
        return sides[0] if sides and isinstance(test.op, ast.And) and all(sides) else None
    text = ast.unparse(test)
    return True if any(each in text for each in ASKED) and not isinstance(test, ast.Compare) else None


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass | ast.Global | ast.Nonlocal)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        or (isinstance(statement, ast.AnnAssign) and statement.value is None)
    )


@contextmanager
def noted() -> Iterator[None]:
    """Note which lines run, if a folder for them is named; else nothing."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        yield
        return
    hit: set[tuple[str, int]] = set()
    trace, before = _tracer(hit), (sys.gettrace(), threading.gettrace())
    sys.settrace(trace)
    threading.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before[0])
        threading.settrace(before[1])
        (Path(folder) / f"{uuid4()}.json").write_text(json.dumps(sorted(hit)))


def _tracer(hit: set[tuple[str, int]]) -> Any:
    top = f"{ROOT / 'terrace'}/"
    files = {f"{top}{line.file}": line.file for line in gpu_lines()}

    def of_call(frame: FrameType, event: str, argument: Any) -> Any:
        name = files.get(frame.f_code.co_filename)
        if name is None:
            return None

        def of_line(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                hit.add((name, frame.f_lineno))
            return of_line

        return of_line

    return of_call


def executed(folder: Path) -> tuple[list[Line], list[Line]]:
    """The lines that the processes of `folder` have executed, and those that none has."""
    hit = {tuple(each) for path in folder.glob("*.json") for each in json.loads(path.read_text())}
    done = [line for line in gpu_lines() if any((line.file, at) in hit for at in range(line.first, line.last + 1))]
    return done, [line for line in gpu_lines() if line not in set(done)]
