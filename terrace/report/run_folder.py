"""Contents of a run folder as a `RunView`: everything readable, and a sentence on each missing part.

A run may be unfinished, killed, or damaged: no content of a file raises here.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from terrace.base.errors import TerraceError
from terrace.base.schema import read_table
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import parse_cluster
from terrace.model.config import num_params
from terrace.report.run_curves import Curve
from terrace.report.run_page import RunView
from terrace.report.run_timeline import StepPicture, step_picture
from terrace.report.tables import plan_rows, plan_title, quantity, seconds, time_categories
from terrace.simulate.recording import record
from terrace.simulate.step import play_whole
from terrace.simulate.trace import passes_events, recording_events
from terrace.train.config import RunConfig, parse_run
from terrace.train.metrics import StepRecord, read_metrics
from terrace.train.prediction import step_of
from terrace.train.recorder import PREDICTION, read_events

_FILES = ("config.toml", "metrics.jsonl", "events.jsonl")
_US = 1e6
_LONGEST_TEXT = 200_000  # characters shown of a settings file or a sample


@dataclass(frozen=True, kw_only=True)
class _Left:
    # Files of a run; None or empty where missing or unreadable.
    folder: Path
    run: RunConfig | None
    records: Sequence[StepRecord]
    events: Sequence[Mapping[str, Any]]
    prediction: Mapping[str, Any]
    cluster: Cluster | None  # with the constants measured at the start


def is_run_folder(folder: Path) -> bool:
    """Whether a folder has any file of a run."""
    return any((folder / name).is_file() for name in _FILES)


def run_view(folder: Path) -> RunView:
    # Every reader below appends a sentence for each part it cannot read.
    missing: list[str] = []
    left = _read(folder, missing)
    picture, picture_words = _picture(left, missing)
    run, steady = left.run, _steady(left.records)
    predicted = _table(left.prediction, "predicted")
    first_steps = [int(event.get("first_step", 0)) for event in left.events if event["event"] == "started"]
    return RunView(
        title=folder.resolve().name,
        subtitle=_subtitle(run),
        status=_status(left),
        figures=_figures(left, first_steps),
        missing=missing,
        notes=_notes(left),
        curves=_curves(left),
        resumed=[step for step in first_steps if step],
        plan=None if run is None else plan_rows(left.cluster or run.cluster, run.plan),
        predicted_time_s=_amounts(predicted, "time_s"),
        measured_time_s=_means([record.time_s for record in steady]),
        predicted_sent=_by_tier(_amounts(predicted, "sent_bytes")),
        measured_sent=_medians([record.sent_bytes for record in steady]),
        predicted_memory=_amounts(predicted, "memory_bytes"),
        measured_memory=left.records[-1].memory_bytes if left.records else {},
        peak_memory=left.records[-1].peak_memory_bytes if left.records else {},
        picture=picture,
        picture_words=picture_words,
        events=[_event_row(event) for event in left.events],
        checkpoints=_checkpoints(folder, missing),
        settings=_text(folder / "config.toml"),
        sample=_text(folder / "sample.txt"),
    )


def _read(folder: Path, missing: list[str]) -> _Left:
    run: RunConfig | None = None
    try:
        run = parse_run(read_table(folder / "config.toml"))
    except TerraceError as error:
        missing.append(f"settings and plan: {error}")
    records: list[StepRecord] = []
    try:
        records = read_metrics(folder / "metrics.jsonl")
    except OSError as error:
        missing.append(f"curves and times: metrics.jsonl cannot be read ({error.strerror})")
    else:
        if not records:
            missing.append("curves and times: no step has ended")
    prediction: dict[str, Any] = {}
    cluster: Cluster | None = None
    try:
        # The prediction's cluster differs from the run's only where the start measured constants.
        prediction = json.loads((folder / PREDICTION).read_text(encoding="utf-8"))
        cluster = parse_cluster(prediction["cluster"]) if prediction["is_measured"] else None
    except OSError:
        missing.append(f"predictions: there is no {PREDICTION}, which a run writes once it has measured its machine")
    except (ValueError, TypeError, KeyError, TerraceError):
        prediction = {}
        missing.append(f"predictions: {PREDICTION} is damaged")
    if not (folder / "events.jsonl").is_file():
        missing.append("events: there is no events.jsonl")
    # Events from a damaged file may lack their time, and cannot be shown.
    events = [event for event in read_events(folder) if isinstance(event.get("time"), (int, float))]
    return _Left(folder=folder, run=run, records=records, events=events, prediction=prediction, cluster=cluster)


def _subtitle(run: RunConfig | None) -> str:
    if run is None:
        return ""
    return (
        f"{run.model.family} decoder of {quantity(num_params(run.model), ' parameters')}; a step of {run.train.batch} "
        f"sequences x {run.train.sequence} tokens; {plan_title(run.cluster, run.plan)}"
    )


def _status(left: _Left) -> str:
    # The last event decides: a killed run has neither "finished" nor "stopped".
    last = left.events[-1]["event"] if left.events else ""
    done = left.records[-1].step if left.records else 0
    wanted = f" of {left.run.train.steps}" if left.run is not None else ""
    if last == "finished":
        return f"Finished after {done} steps, with a loss of {left.events[-1].get('final_loss', math.nan):.4g}."
    if last == "stopped":
        return f"Stopped after step {done}{wanted}: {left.events[-1].get('why', 'no reason recorded')}."
    when = f" at {_when(left.records[-1].time)} UTC" if left.records and left.records[-1].time else ""
    if done:
        return f"Not finished: step {done}{wanted} is the last{when}. It still runs, or it was killed."
    return "Not finished: no step has ended yet."


def _notes(left: _Left) -> list[str]:
    # Means over steady steps, as the prediction is for a steady step.
    steady, predicted = _steady(left.records), _amounts(_table(left.prediction, "predicted"), "time_s")
    if not steady or not predicted:
        return []
    measured_s, predicted_s = statistics.fmean(record.step_s for record in steady), sum(predicted.values())
    waits_s = statistics.fmean(
        sum(spent for name, spent in record.time_s.items() if name.startswith("wait ")) for record in steady
    )
    notes = [
        f"A step takes {seconds(measured_s)} in the mean; predicted were {seconds(predicted_s)} "
        f"({100 * (predicted_s / measured_s - 1):+.0f} %). Rank 0 waits for messages for "
        f"{100 * waits_s / measured_s:.0f} % of it."
    ]
    if left.run is not None and left.run.plan.balance == "cost":
        notes.append("Messages of attention depend on the documents of a batch, and no prediction has them.")
    return notes


def _figures(left: _Left, first_steps: Sequence[int]) -> list[tuple[str, str]]:
    records, steady = left.records, _steady(left.records)
    if not records:
        return []
    # As `train.target_loss` judges a run: by the last tenth of its steps.
    newest = records[-max(1, len(records) // 10) :]
    figures = [
        (f"{statistics.fmean(record.loss for record in newest):.4g}", "loss, mean of the last tenth"),
        (quantity(statistics.fmean(record.tokens_per_s for record in steady), "tokens/s"), "over all ranks"),
    ]
    for name, words in (("mfu", "MFU"), ("hfu", "HFU")):
        values = [value for record in steady if (value := getattr(record, name)) is not None]
        if values:
            figures.append((f"{100 * statistics.fmean(values):.1f} %", words))
    figures.append((seconds(statistics.fmean(record.step_s for record in steady)), "a step"))
    figures.append((f"{records[-1].step:,}", "steps"))
    if len(first_steps) > 1:
        figures.append((str(len(first_steps)), "starts"))
    return figures


def _curves(left: _Left) -> list[Curve]:
    def line(value: Callable[[StepRecord], float | None]) -> list[tuple[int, float]]:
        found = ((record.step, value(record)) for record in left.records)
        return [(step, y) for step, y in found if y is not None]

    # A record may lack its utilisation.
    def percent(value: float | None) -> float | None:
        return None if value is None else 100 * value

    train = None if left.run is None else left.run.train
    target = (
        None if train is None or train.target_loss is None else (f"target {train.target_loss:g}", train.target_loss)
    )
    predicted_s = sum(_amounts(_table(left.prediction, "predicted"), "time_s").values())
    curves = [
        Curve(title="Loss", lines={"loss": line(lambda record: record.loss)}, smooth=True, level=target),
        Curve(
            title="Gradient norm before clipping", lines={"norm": line(lambda record: record.grad_norm)}, smooth=True
        ),
        Curve(title="Learning rate", lines={"rate": line(lambda record: record.learning_rate)}, from_zero=True),
        Curve(
            title="Throughput",
            unit="tokens/s over all ranks",
            lines={"tokens/s": line(lambda record: record.tokens_per_s)},
            smooth=True,
            from_zero=True,
        ),
        Curve(
            title="Utilisation",
            unit="%",
            lines={
                "MFU": line(lambda record: percent(record.mfu)),
                "HFU": line(lambda record: percent(record.hfu)),
            },
            from_zero=True,
        ),
        Curve(
            title="Seconds of a step",
            lines={"step": line(lambda record: record.step_s)},
            from_zero=True,
            level=("predicted", predicted_s) if predicted_s else None,
        ),
    ]
    # Only runs with balance = "cost" record a balance, only block formats a rounding error.
    balance = line(lambda record: record.balance)
    if balance:
        words = "busiest place over the mean one, predicted"
        curves.append(Curve(title="Balance of attention", unit=words, lines={"balance": balance}))
    messages = dict.fromkeys(name for record in left.records for name in record.quantisation_error)
    if messages:
        lines = {name: line(lambda record, name=name: record.quantisation_error.get(name)) for name in messages}  # type: ignore[misc]
        curves.append(Curve(title="Rounding error of messages", unit="relative", lines=lines, from_zero=True))
    return curves


def _picture(left: _Left, missing: list[str]) -> tuple[StepPicture | None, str]:
    # The newest readable trace, else the prediction above the mean measured seconds.
    # Newest first; a damaged trace is reported, and the next one is tried.
    for path in _traces(left.folder):
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            found = step_picture(table["traceEvents"], {0: "predicted", 1: "measured"})
            other = table["otherData"]
            passes = " for the passes of its stage" * (other["predicted"] == "passes")
            words = (
                f"Step {other['step']} of rank {other['rank']}: predicted {seconds(other['predicted_s'])}{passes}, "
                f"measured {seconds(other['measured_s'])}, both from their own beginning. A message stands on the lane "
                f"of the outermost tier it crosses. From {path.parent.name}/{path.name}, which Perfetto opens."
            )
        except (OSError, ValueError, TypeError, KeyError):
            missing.append(f"{path.parent.name}/{path.name} is damaged")
            continue
        if found is not None:
            return found, words
    # Without a trace the page still has the prediction, above the mean seconds.
    missing.append('the measured timeline: no step was traced; --train.profile "10-12" traces three')
    if left.run is None or not left.prediction:
        return None, ""
    measured = _totals(_means([record.time_s for record in _steady(left.records)]))
    words = "What was predicted of a steady step" + (", above the mean seconds measured by category." * bool(measured))
    headings = {0: "predicted", 1: "measured in the mean, without order"} if measured else {0: "predicted"}
    return step_picture([*_predicted_events(left.run, left.cluster), *measured], headings), words


def _predicted_events(run: RunConfig, cluster: Cluster | None) -> list[dict[str, Any]]:
    played = play_whole(step_of(run, cluster))
    if len(played.programs) == 1:
        return recording_events(record(played.programs[0], played.costs[0]), 0, "predicted")
    return passes_events(played.programs[0], played.passes[0], "predicted")


def _totals(time_s: Mapping[str, float]) -> list[dict[str, Any]]:
    # Trace events of the second process: categories one after the other, since means have no order.
    events: list[dict[str, Any]] = []
    # A mean has no order: categories are laid end to end.
    now_us = 0.0
    for name in time_categories(time_s):
        length_us = time_s[name] * _US
        events.append({"ph": "X", "pid": 1, "tid": 0, "name": name, "ts": now_us, "dur": length_us, "args": {}})
        now_us += length_us
    named = {"ph": "M", "pid": 1, "tid": 0, "name": "thread_name", "args": {"name": "compute"}}
    return [named, *events] if events else []


def _traces(folder: Path) -> list[Path]:
    def step(path: Path) -> int:
        number = path.name.split("-")[1]
        return int(number) if number.isdecimal() else -1

    return sorted((folder / "profile").glob("step-*-rank-0.json"), key=step, reverse=True)


def _event_row(event: Mapping[str, Any]) -> tuple[str, str, str]:
    name, when = event["event"], _when(event["time"])
    if name == "started":
        what = f"resumed after step {event['first_step']}" if event.get("first_step") else "started"
        return when, what, f"plan {event.get('plan')} on {event.get('cluster')}, {event.get('ranks')} ranks"
    if name == "saved":
        return when, f"saved after step {event.get('step')}", str(event.get("folder", ""))
    if name == "finished":
        return when, f"finished after step {event.get('step')}", ""
    return when, str(name), str(event.get("why") or event.get("text") or "")


def _checkpoints(folder: Path, missing: list[str]) -> list[tuple[str, int, str]]:
    found = []
    for path in sorted((folder / "checkpoints").glob("*")):
        if path.is_dir():
            # The manifest is written last: without it the checkpoint is incomplete.
            whole = (path / "manifest.json").is_file()
            size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
            found.append((path.name, size, "complete" if whole else "incomplete"))
    if not any(state == "complete" for _, _, state in found):
        missing.append("a checkpoint: none is complete, so this run cannot be resumed")
    return found


def _steady(records: Sequence[StepRecord]) -> Sequence[StepRecord]:
    # The first steps warm up caches.
    return records[min(len(records) // 4, 10) :]


def _means(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for table in tables:
        for name, value in table.items():
            total[name] += value
    return {name: value / len(tables) for name, value in total.items()}


def _medians(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    # A step that also counts the refreshes of its neighbour is no typical one, so no means.
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: statistics.median_low(table.get(name, 0) for table in tables) for name in names}


def _by_tier(sent: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for name, size in sent.items():
        # Keys are "message.tier"; the page shows sums by tier.
        found[name.rsplit(".", 1)[-1]] += size
    return dict(found)


def _table(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = table.get(name)
    return found if isinstance(found, Mapping) else {}


def _amounts(table: Mapping[str, Any], name: str) -> dict[str, float]:
    # Files may be damaged: values that are no numbers are left out.
    values = _table(table, name)
    return {str(key): value for key, value in values.items() if isinstance(value, (int, float))}


def _when(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[:_LONGEST_TEXT]
    except OSError:
        return ""
