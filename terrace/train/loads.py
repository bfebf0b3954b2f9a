"""Tokens per expert over a run: `loads.jsonl` of a run folder, and `loads-N.jsonl` for each further stage N.

Each line holds sums over a range of steps, to keep the file small. The first rank of every stage writes the layers of
its stage.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from terrace.base.errors import TrainingError
from terrace.base.files import write_atomic
from terrace.base.fitting import fitting, parse_table
from terrace.base.foreign import read_lines
from terrace.base.sealed import sealed_json
from terrace.program.loads import Loads

NUM_PARTS = 120  # of a run


@dataclass(frozen=True, kw_only=True)
class LoadsOfSteps:
    """Tokens per expert by layer, summed over steps `first` to `last` (from 1)."""

    first: int
    last: int
    counts: dict[str, list[int]]


class LoadsFile:
    """Writes the file of one stage: `NUM_PARTS` lines, plus one at each save.

    On resume, lines of repeated steps are dropped. Raises `TrainingError` if the file cannot be written.
    """

    def __init__(self, folder: Path, stage: int, first_step: int, num_steps: int) -> None:
        self._path = folder / _name(stage)
        self._first, self._num_steps = first_step + 1, num_steps
        self._every, self._newest = math.ceil(num_steps / NUM_PARTS), first_step
        self._sums: dict[str, list[int]] = {}
        _cut(self._path, first_step)

    def add(self, step: int, loads: Loads) -> None:
        """Adds the loads of a step (from 1)."""
        for layer, counts in zip(loads.layers, loads.counts, strict=True):
            before = self._sums.get(layer, [0] * len(counts))
            self._sums[layer] = [a + b for a, b in zip(before, counts, strict=True)]
        self._newest = step
        if step % self._every == 0 or step == self._num_steps:
            self.end()

    def end(self) -> None:
        """Ends the range of a line with the newest step: a save does, so that a resume keeps all steps before it."""
        if self._sums:
            with _writing(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write(_line(LoadsOfSteps(first=self._first, last=self._newest, counts=self._sums)))
            self._first, self._sums = self._newest + 1, {}


def cut_other_stages(folder: Path, num_stages: int, first_step: int) -> None:
    """Drops repeated steps from the files of stages that a resumed run no longer has. Raises `TrainingError`."""
    for path in folder.glob("loads-*.jsonl"):
        number = path.stem.removeprefix("loads-")
        if number.isdecimal() and int(number) >= num_stages:
            _cut(path, first_step)


def _cut(path: Path, first_step: int) -> None:
    lines = [each for each in _read(path) if each.last <= first_step]
    with _writing(path):
        write_atomic(path, "".join(map(_line, lines)))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainingError(f"cannot write {path}: {error.strerror}; make room there") from error


def read_loads(folder: Path) -> list[LoadsOfSteps]:
    """The loads of a run in order, merged over stages. Damaged lines and missing files are skipped."""
    parts: dict[tuple[int, int], dict[str, list[int]]] = defaultdict(dict)
    stages = sorted(folder.glob("loads-*.jsonl"), key=lambda path: (len(path.name), path.name))
    for path in (folder / _name(0), *stages):
        for each in _read(path):
            parts[each.first, each.last].update(each.counts)
    return [LoadsOfSteps(first=first, last=last, counts=counts) for (first, last), counts in sorted(parts.items())]


def _name(stage: int) -> str:
    return f"loads-{stage}.jsonl" if stage else "loads.jsonl"


def _line(part: LoadsOfSteps) -> str:
    return sealed_json(json.dumps(asdict(part)))


def _read(path: Path) -> list[LoadsOfSteps]:
    found = []
    with suppress(OSError):
        for line in read_lines(path, path.parent):
            try:
                part = fitting(LoadsOfSteps, parse_table(line))
            except ValueError:
                continue
            if all(row and min(row) >= 0 for row in part.counts.values()):
                found.append(part)
    return found
