"""A whole command of this project on a machine with virtual devices, as a script: `whole.py FOLDER PROGRAM WORD ...`.

PROGRAM is `terrace`, `mapped` for `terrace` with mapped pages in the place of gathered ones, `gpu_parts` with names of
parts of `bench/gpu.py`, or `python` with `-m MODULE` or `-c CODE`, whose own processes have virtual devices, too. The
command, and each of the ranks that it starts, write what they have noticed to FOLDER.
"""

import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from bench.gpu_parts import prediction
from bench.gpu_parts.setting import Setting
from terrace.cli.main import main
from terrace.launch import workers
from terrace.launch.fork_server import start_fork_server
from terrace.probe import compute, grid, links, measure, sustained
from terrace.rl.calls.processes import Processes
from terrace.rl.workers import drawing
from tests.support import warm
from tests.support.tiny_runs import environment
from tests.virtual_cuda.findings import ROOT
from tests.virtual_cuda.pages import mapped_pages
from tests.virtual_cuda.rehearsal import rehearsed
from tests.virtual_cuda.rules import Entry, Key, faults_of

_TAKES_S = 300.0


class Noticed(NamedTuple):
    """What a process has noticed: faults, waits of the host by reason and line, and its messages."""

    name: str
    faults: list[str]
    waits: dict[str, int]
    log: list[Entry]
    rows: list[list[Any]]  # of parts of `bench/gpu.py`
    error: str


class Ran(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    error: str
    noticed: list[Noticed]

    @property
    def faults(self) -> list[str]:
        """Those of all processes, and those of several ranks."""
        found = [f"{each.name}: {fault}" for each in self.noticed for fault in each.faults]
        worlds: dict[str, list[Noticed]] = {}
        for each in self.noticed:
            rank, _, world = each.name.partition(" of ")
            if rank.startswith("rank"):
                worlds.setdefault(world, []).append(each)
        for ranks in worlds.values():
            ranks.sort(key=lambda each: int(each.name.split()[1]))
            found += [str(fault) for fault in faults_of([each.log for each in ranks])]
        return found


def run(folder: Path, program: str, *words: object, takes_s: float = _TAKES_S) -> Ran:
    """Run a command in `folder` to its end, after `takes_s` at most, in a process of its own that starts warm."""
    there = folder / "noticed"
    there.mkdir(exist_ok=True)
    for each in there.iterdir():
        each.unlink()
    done = warm.run([__file__, str(there), program, *map(str, words)], folder, environment(), takes_s)
    noticed = [_read(path) for path in sorted(there.iterdir())]
    return Ran(done.returncode, done.stdout, done.stderr, noticed)


def _read(path: Path) -> Noticed:
    found = Noticed(**json.loads(path.read_text()))
    log = [entry._replace(key=Key(tuple(entry.key[0]), entry.key[1])) for entry in (Entry(*each) for each in found.log)]
    return found._replace(log=log)


@contextmanager
def _noticing(folder: Path, name: str, rows: Sequence[Any] = ()) -> Iterator[None]:
    error = ""
    with rehearsed() as rehearsal:
        try:
            yield
        except SystemExit:
            raise
        except BaseException:
            error = traceback.format_exc()
            raise
        finally:
            waits = {f"{reason}: {place}": number for (reason, place), number in rehearsal.findings.waits.items()}
            found = Noticed(name, [*map(str, rehearsal.faults)], waits, rehearsal.log, [*rows], error)
            (folder / f"{name} {os.getpid()}.json").write_text(json.dumps(found._asdict()))


def _rank(inner: Callable[..., Any], folder: Path, job: Any, port: int, send: Any) -> Any:
    with _noticing(folder, f"rank {job.rank} of world {port} {job.number}"):
        return inner(job, port, send)


def _prepare(folder: Path) -> None:
    """Ranks have devices of their own, and what is measured on a device is as small as on a CPU."""
    tables: list[dict[str, Any]] = [sustained.HEAT_S, sustained._CUBE]
    tables += [links.LARGEST_BYTES, links.OVERLAP_BYTES, links._PRODUCT]
    tables += [compute.TRAINS_IN, compute._LARGE_BYTES, compute._NORM_ROWS, compute._NORM_WIDTH, compute._SHARD_NUMELS]
    for table in tables:
        table["cuda"] = table["cpu"]
    vars(measure)["overlap_layer"] = lambda kind: grid.overlap_layer("cpu")
    # Ranks of roles would be killed before they could say what they have noticed.
    close = Processes.close
    Processes.close = lambda self, patience_s: close(self, _TAKES_S)  # type: ignore[method-assign]
    vars(workers)["_run"] = partial(_rank, workers._run, folder)
    warm.fork_servers()
    start_fork_server("terrace.cli.worker")  # a fork of this process, before it has a device


def _terrace(folder: Path, words: Sequence[str]) -> int:
    with _noticing(folder, "command"):
        return main(words)


def _gpu_parts(folder: Path, words: Sequence[str]) -> int:
    vars(prediction)["_terrace"] = lambda given: f"terrace {given[0]} failed" if main(given) else ""
    for name in words:
        rows = list[Any]()
        module, _, argument = name.partition(":")
        setting = Setting(tiny=True, peak_tflops=1.0, folder=folder.parent)
        try:
            with _noticing(folder, name.replace(":", " "), rows):
                part = import_module(f"bench.gpu_parts.{module}").rows
                for row in part(setting, argument) if argument else part(setting):
                    rows.append([*row, row.verdict])
        except Exception as error:
            print(f"{name}: {error}", file=sys.stderr)
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _mapped(folder: Path, words: Sequence[str]) -> int:
    vars(drawing)["platform_pages"] = mapped_pages  # of ranks, too, which are forked from here
    return _terrace(folder, words)


def _python(folder: Path, words: Sequence[str]) -> int:
    kind, what, *rest = words
    # Processes that are started with this interpreter come here.
    interpreter = folder.parent / "python"
    line = f"PYTHONPATH={ROOT} exec {sys.executable} {__file__} {folder} python"
    interpreter.write_text(f'#!/bin/sh\n{line} "$@"\n')
    interpreter.chmod(0o700)
    sys.executable = str(interpreter)
    sys.argv = [what, *rest] if kind == "-m" else ["-c", *rest]
    name = f"python {what} {rest[0].replace(':', ' ')}" if kind == "-m" else "python code"
    with _noticing(folder, name):
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(what, {"__name__": "__main__"})
    return 0


_PROGRAMS = {"terrace": _terrace, "mapped": _mapped, "gpu_parts": _gpu_parts, "python": _python}

if __name__ == "__main__":
    _, _folder, _program, *_words = sys.argv
    sys.argv = [_program, *_words]
    _prepare(Path(_folder))
    sys.exit(_PROGRAMS[_program](Path(_folder), _words))
