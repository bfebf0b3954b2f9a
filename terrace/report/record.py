"""Reads the record of a run, of any command, from its folder: everything readable, and a sentence on each missing part.

A run may be unfinished, killed, or damaged: no content of a file raises here. Values are checked by
`terrace.base.fitting`, so types are right, and numbers are finite except losses, norms and rounding errors.
"""

import stat
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from terrace.base.errors import TerraceError
from terrace.base.fitting import numbers, parse_table
from terrace.base.foreign import leaves, open_file, read_lines
from terrace.base.schema import read_table
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import parse_cluster
from terrace.train.metrics import StepRecord, read_sound_metrics
from terrace.train.recorder import PREDICTION, Predicted, RunEvent, read_events, read_prediction
from terrace.train.runs import command_of

_FILES = ("config.toml", "metrics.jsonl", "events.jsonl")
_LONGEST_TEXT = 200_000  # characters shown of a settings file or a sample
_AMOUNTS = ("time_s", "sent_bytes", "memory_bytes")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The parsed files of a run, empty where missing or unreadable; `missing` has a sentence for each of those.

    `predicted` maps names of amounts and categories to values, `parts` as in `Predicted`. `cluster` has the constants
    that were measured at the start, if they were.
    """

    folder: Path
    missing: list[str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    records: Sequence[StepRecord] = ()
    events: Sequence[RunEvent] = ()
    predicted: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    predicted_s: float = 0.0  # seconds of a step; 0 if unknown
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    cluster: Cluster | None = None

    @property
    def steady(self) -> Sequence[StepRecord]:
        """Records without the first steps, which warm up caches."""
        return steady(self.records)

    def section(self, name: str) -> Mapping[str, Any]:
        found = self.settings.get(name)
        return found if isinstance(found, Mapping) else {}

    def lines(self, name: str, of: str, read: Callable[[Mapping[str, Any]], T]) -> list[T]:
        """The readable lines of a further file, by `read`; `missing` says that `of` lacks damaged lines or the file."""
        found, num_written = list[T](), 0
        try:
            for line in read_lines(self.folder / name, self.folder):
                num_written += bool(line.strip())
                with suppress(ValueError):
                    found.append(read(parse_table(line)))
        except OSError as error:
            self.missing.append(f"{of}: {name} cannot be read ({error.strerror})")
            return []
        if len(found) < num_written:
            self.missing.append(f"{of}: damaged lines in {name}: {num_written - len(found)}")
        if not num_written:
            self.missing.append(f"{of}: {name} is empty")
        return found

    def text(self, name: str) -> str:
        """The beginning of a file; empty if it cannot be read."""
        try:
            with open_file(self.folder / name, self.folder) as file:
                # A UTF-8 character has at most four bytes.
                return file.read(4 * _LONGEST_TEXT).decode("utf-8", errors="replace")[:_LONGEST_TEXT]
        except OSError:
            return ""


def is_run_folder(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES)


def command_of_folder(folder: Path) -> str:
    """The command that made a run folder, by its settings; of files without settings it is `train`."""
    with suppress(TerraceError):
        return command_of(read_table(folder / "config.toml", folder))
    return "train"


def read_record(folder: Path) -> RunRecord:
    missing: list[str] = []
    settings: Mapping[str, Any] = {}
    try:
        settings = read_table(folder / "config.toml", folder)
    except TerraceError as error:
        missing.append(f"settings and plan: {error}")
    records, num_unsound = _metrics(folder, missing)
    prediction, cluster = _prediction(folder, missing)
    events, num_damaged = read_events(folder)
    if not (folder / "events.jsonl").is_file():
        missing.append("events: there is no events.jsonl")
    elif num_damaged:
        missing.append(f"events: damaged lines in events.jsonl: {num_damaged}")
    done = [event.step or 0 for event in events if event.event in ("saved", "finished")]
    last = max([*done, *(record.step for record in records)], default=0)
    num_lost = max(num_unsound, last - len(records))
    if records and num_lost:
        missing.append(f"curves and times: damaged or missing lines in metrics.jsonl: {num_lost}")
    amounts = {name: numbers(prediction.predicted.get(name)) for name in _AMOUNTS}
    return RunRecord(
        folder=folder,
        missing=missing,
        settings=settings,
        records=records,
        events=events,
        predicted=amounts,
        predicted_s=prediction.step_s or sum(amounts["time_s"].values()),
        parts=prediction.parts,
        cluster=cluster,
    )


def _metrics(folder: Path, missing: list[str]) -> tuple[list[StepRecord], int]:
    try:
        records, num_unsound = read_sound_metrics(folder / "metrics.jsonl")
    except OSError as error:
        missing.append(f"curves and times: metrics.jsonl cannot be read ({error.strerror})")
        return [], 0
    except TerraceError as error:
        missing.append(f"curves and times: {error}")
        return [], 0
    if not records:
        missing.append("curves and times: no step has ended")
    return records, num_unsound


def _prediction(folder: Path, missing: list[str]) -> tuple[Predicted, Cluster | None]:
    try:
        found = read_prediction(folder)
        # The prediction's cluster differs from the run's only where the start measured constants.
        return found, parse_cluster(found.cluster) if found.is_measured else None
    except FileNotFoundError:
        missing.append(f"predictions: there is no {PREDICTION}, which a run writes once its step is predicted")
    except OSError as error:
        missing.append(f"predictions: {PREDICTION} cannot be read ({error.strerror})")
    except (ValueError, TerraceError):
        missing.append(f"predictions: {PREDICTION} is damaged")
    return Predicted(is_measured=False, cluster={}), None


def steady(records: Sequence[T]) -> Sequence[T]:
    """Records without those of the first steps, which warm up caches."""
    return records[min(len(records) // 4, 10) :]


def mean_by_name(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each amount; a table without it has 0."""
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: statistics.fmean(table.get(name, 0.0) for table in tables) for name in names}


def checkpoint_rows(folder: Path, missing: list[str]) -> list[tuple[str, int, str]]:
    """(Name, bytes, state) of each checkpoint; adds a sentence to `missing` if none is complete.

    Symbolic links out of the folder are not followed, since their targets may be arbitrarily large.
    """
    found = []
    inside = not leaves(folder / "checkpoints", folder)
    for path in sorted((folder / "checkpoints").glob("*")) if inside else ():
        if path.is_dir() and not leaves(path, folder):
            # The manifest is written last: without it the checkpoint is incomplete.
            whole = (path / "manifest.json").is_file()
            size = sum(map(_size, path.rglob("*")))
            found.append((path.name, size, "complete" if whole else "incomplete"))
    if not any(state == "complete" for _, _, state in found):
        missing.append("a checkpoint: none is complete, so this run cannot be resumed")
    return found


def _size(path: Path) -> int:
    # An active run may remove old checkpoints meanwhile.
    with suppress(OSError):
        about = path.lstat()
        return about.st_size if stat.S_ISREG(about.st_mode) else 0
    return 0
