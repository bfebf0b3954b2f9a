"""Rank 0's record of a run besides its metrics: predictions, events and trackers.

`prediction.json` holds the measurements and predictions made at the start of the run; `events.jsonl` has a line, with
the seconds since 1970, for every start, checkpoint and end. With them `terrace report` also covers a run that never
finished. A new start appends to `events.jsonl` and replaces `prediction.json`.
"""

import json
import os
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrace.base.errors import TrainingError
from terrace.base.files import write_atomic
from terrace.base.fitting import MaybeNaN, fitting, parse_table
from terrace.base.foreign import read_lines, read_text
from terrace.base.schema import dump
from terrace.base.sealed import sealed_json, sealed_toml
from terrace.cluster.cluster import Cluster
from terrace.program.report import StepReport, plain, why_no_verdict
from terrace.train.config import run_toml
from terrace.train.metrics import Observer, Outcome, StepRecord
from terrace.train.trackers import Tracker, open_trackers, values_of

if TYPE_CHECKING:
    from terrace.train.job import RunJob

EVENTS, PREDICTION = "events.jsonl", "prediction.json"


class EventLog:
    """Appends to the events of a run, which goes on if they cannot be written: that is said once, on stderr."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._says_lost = folder, False

    def add(self, name: str, /, **facts: Any) -> None:
        try:
            append_event(self._folder, name, **facts)
        except OSError as error:
            # A full disk must not end a run whose metrics file survived, nor fill the screen.
            if not self._says_lost:
                print(f"terrace: cannot write {self._folder / EVENTS}: {error.strerror}", file=sys.stderr, flush=True)
            self._says_lost = True


@contextmanager
def event_log(folder: Path) -> Iterator[EventLog]:
    """The events of a run until the end of the body; an error or an interrupt that ends it is recorded."""
    events = EventLog(folder)
    try:
        yield events
    except BaseException as error:
        events.add("stopped", why=f"{type(error).__name__}: {' '.join(str(error).split())}"[:500])
        raise


@contextmanager
def recorded(observer: Observer, job: "RunJob") -> Iterator[Observer]:
    """Context manager on rank 0: an observer that records events, the error that ends the run included, and forwards
    them to `observer`.

    Once all ranks have started, config.toml is replaced by the job's.
    """
    with event_log(job.folder) as events:
        recorder = _Recorder(observer, job, events)
        try:
            yield recorder
        finally:
            recorder.close()


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """A line of `events.jsonl`: `event` is its kind, `time` in seconds since 1970. None marks a field that is absent or
    damaged.
    """

    event: str
    time: float | None = None
    step: int | None = None
    first_step: int = 0
    plan: str | None = None
    cluster: str | None = None
    ranks: int | None = None
    folder: str = ""
    why: str | None = None
    text: str | None = None
    final_loss: MaybeNaN | None = None
    no_verdict: str = ""  # of a finished run: why its steps say nothing about the prediction
    slowest_rank: int | None = None  # of a finished run: the rank with the most own work
    slowest_s: dict[str, dict[str, float]] = field(default_factory=dict)  # its "predicted" and "measured" seconds


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Content of `prediction.json`: `predicted` maps names and categories to amounts, `cluster` is the cluster's
    table.

    Where the categories of `time_s` overlap, as stages of several pools do, `step_s` are the seconds of a step; `parts`
    then names the categories of a line's `time_s` that are measured for each predicted one.
    """

    is_measured: bool
    cluster: dict[str, Any]
    predicted: dict[str, Any] = field(default_factory=dict)
    step_s: float | None = None
    parts: dict[str, list[str]] = field(default_factory=dict)


def read_events(folder: Path) -> tuple[list[RunEvent], int]:
    """Events of a run folder, and its number of damaged lines, such as a last one truncated by a crash."""
    found, num_written = list[RunEvent](), 0
    with suppress(OSError):
        for line in read_lines(folder / EVENTS, folder):
            num_written += bool(line.strip())
            # A torn line may happen to be JSON.
            with suppress(ValueError):
                found.append(fitting(RunEvent, parse_table(line), skip=True))
    return found, num_written - len(found)


def write_prediction(folder: Path, prediction: Predicted) -> None:
    """Write `prediction.json`. Raises `OSError`."""
    write_atomic(folder / PREDICTION, sealed_json(json.dumps(asdict(prediction), indent=1)))


def read_prediction(folder: Path) -> Predicted:
    """The prediction made at the start of a run. Raises `OSError` for a missing file, `ValueError` for a damaged
    one.
    """
    return fitting(Predicted, parse_table(read_text(folder / PREDICTION, folder)))


def append_event(run_folder: Path, name: str, /, **facts: Any) -> None:
    """Appends an event to a run's events. Raises `OSError`."""
    line = sealed_json(json.dumps({"time": time.time(), "event": name, **facts}))
    with (run_folder / EVENTS).open("ab+") as file:
        if file.tell():
            # The last byte shows whether the file ends with a complete line.
            file.seek(-1, os.SEEK_END)
        torn = file.read(1) not in (b"", b"\n")  # a crash cut the last line short
        file.write(f"{chr(10) * torn}{line}".encode())


class _Recorder:
    def __init__(self, observer: Observer, job: "RunJob", events: EventLog) -> None:
        self._observer, self._job, self._run, self._folder = observer, job, job.run, job.folder
        self._trackers: dict[str, Tracker] = {}
        self._step, self._events = 0, events

    def started(self, predicted: StepReport, cluster: Cluster, first_step: int) -> None:
        run, is_measured = self._run, cluster is not self._run.cluster
        name = PREDICTION
        try:
            write_prediction(
                self._folder, Predicted(is_measured=is_measured, cluster=dump(cluster), predicted=plain(predicted))
            )
            name = "config.toml"
            if self._job.config:
                write_atomic(self._folder / name, sealed_toml(self._job.config))
        except OSError as error:
            raise TrainingError(f"cannot write {self._folder / name}: {error.strerror}") from error
        ranks = run.cluster.world_size
        self._events.add("started", first_step=first_step, plan=run.plan.name, cluster=run.cluster.name, ranks=ranks)
        if run.train.metrics:
            config = tomllib.loads(run_toml(run))
            self._trackers = open_trackers(run.train.metrics, self._folder, config, first_step)
        self._step = first_step
        self._observer.started(predicted, cluster, first_step)
        for change in self._job.changes:
            self.note(f"{change} since step {first_step}")

    def stepped(self, record: StepRecord, seconds_left: float) -> None:
        self._step = record.step
        if self._trackers:
            self._tell(values_of(record), record.step)
        self._observer.stepped(record, seconds_left)

    def saved(self, folder: Path) -> None:
        # A save ends during a later step; the folder's name has the step at which it began.
        self._events.add("saved", step=int(folder.name.removeprefix("step-")), folder=folder.name)
        self._observer.saved(folder)

    def note(self, text: str) -> None:
        self._events.add("note", step=self._step, text=text)
        self._observer.note(text)

    def detail(self, text: str) -> None:
        self._events.add("note", step=self._step, text=text)
        self._observer.detail(text)

    def finished(self, outcome: Outcome) -> None:
        slowest: dict[str, Any] = {}
        if outcome.slowest is not None:
            sides = {"predicted": dict(outcome.slowest.predicted_s), "measured": dict(outcome.slowest.measured_s)}
            slowest = {"slowest_rank": outcome.slowest.rank, "slowest_s": sides}
        why_not = why_no_verdict(outcome.num_timed, outcome.busy)
        self._events.add(
            "finished", step=outcome.num_steps, final_loss=outcome.final_loss, no_verdict=why_not, **slowest
        )
        self._observer.finished(outcome)

    def close(self) -> None:
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:
                _say_lost(name, error)
        self._trackers = {}

    def _tell(self, values: Mapping[str, float], step: int) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(values, step)
            except Exception as error:  # a server that is gone must not end hours of training
                _say_lost(name, error)
                del self._trackers[name]


def _say_lost(name: str, error: Exception) -> None:
    print(
        f"terrace: {name} takes no more metrics ({type(error).__name__}: {' '.join(str(error).split())}); "
        "metrics.jsonl has every step",
        file=sys.stderr,
        flush=True,
    )
