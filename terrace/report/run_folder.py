"""Reads a run folder of `terrace train` to a `RunView`: everything readable, and a sentence on each missing part.

A run may be unfinished, killed, or damaged: no content of a file raises here. Values are checked by
`terrace.base.fitting`, so types are right, and numbers are finite except losses, norms and rounding errors.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

from terrace.base.errors import TerraceError
from terrace.base.fitting import numbers
from terrace.base.schema import read_table
from terrace.base.words import counted, quantity, seconds
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import parse_cluster
from terrace.model.facts import family_of
from terrace.program.verdict import why_no_verdict
from terrace.report.compared import ComparedAmounts
from terrace.report.folder_parts import checkpoint_rows, steady, text_of
from terrace.report.load_curves import load_curves
from terrace.report.markup import ChartedSection
from terrace.report.run_curves import Curve
from terrace.report.run_cycle import check_length, predicted_events, run_cycle, totals
from terrace.report.run_page import RunView
from terrace.report.run_timeline import read_trace, run_timeline
from terrace.report.slowest import slowest_note, slowest_points, slowest_times
from terrace.report.tables import model_size, plan_rows, plan_title, utilisation
from terrace.report.timeline import TimelineChart
from terrace.simulate.bands import band_of
from terrace.train.config import RunConfig
from terrace.train.loads import read_loads
from terrace.train.metrics import StepRecord, eval_lines, num_final, read_sound_metrics
from terrace.train.recorder import PREDICTION, RunEvent, read_events, read_prediction
from terrace.train.resolve import parse_run

_FILES = ("config.toml", "metrics.jsonl", "events.jsonl")


@dataclass(frozen=True, kw_only=True)
class _Left:
    # Parsed files of a run; None or empty if missing or unreadable.
    folder: Path
    run: RunConfig | None
    records: Sequence[StepRecord]
    events: Sequence[RunEvent]
    predicted: Mapping[str, Mapping[str, float]]  # name of an amount -> category -> value
    cluster: Cluster | None  # with the constants that were measured at the start, if they were

    @property
    def steady(self) -> Sequence[StepRecord]:
        """Records without the first steps, which warm up caches."""
        return steady(self.records)


def is_run_folder(folder: Path) -> bool:
    """Whether a folder has any of a run's files."""
    return any((folder / name).is_file() for name in _FILES)


def run_view(folder: Path, draws: bool = True) -> RunView:
    """The view of a run. Without `draws` it has no timeline and no cycle, which need a simulated step."""
    # The readers below append a sentence for each part that they cannot read.
    missing: list[str] = []
    left = _read(folder, missing)
    timeline, timeline_words = _timeline(left, missing) if draws else (None, "")
    run, steady, last = left.run, left.steady, left.records[-1] if left.records else None
    sent_bytes: dict[str, float] = defaultdict(float)
    for name, size in left.predicted["sent_bytes"].items():
        # Keys are "message.tier"; the page shows sums by tier.
        sent_bytes[name.rsplit(".", 1)[-1]] += size
    first_steps = [event.first_step for event in left.events if event.event == "started"]
    return RunView(
        title=folder.resolve().name,
        subtitle="" if run is None else _subtitle(run),
        status=_status(left),
        figures=_figures(left, len(first_steps)) if steady else (),
        missing=missing,
        notes=_notes(left) if steady and left.predicted["time_s"] else (),
        curves=_curves(left),
        resumed=[step for step in first_steps if step],
        loads=read_loads(folder),
        plan=_plan(left, missing),
        time_s=ComparedAmounts(
            left.predicted["time_s"], _by_category([record.time_s for record in steady], statistics.fmean)
        ),
        slowest=slowest_times(left.events, run),
        sent_bytes=ComparedAmounts(
            sent_bytes,
            # Medians, since a step may also count the refreshes of an adjacent one.
            _by_category([record.sent_bytes for record in steady], statistics.median_low),
        ),
        cycle=_cycle(left, missing) if draws else None,
        memory_bytes=ComparedAmounts(left.predicted["memory_bytes"], last.memory_bytes if last else {}),
        peak_memory=last.peak_memory_bytes if last else {},
        timeline=timeline,
        timeline_words=timeline_words,
        events=[_event_row(event) for event in left.events],
        checkpoints=checkpoint_rows(folder, missing),
        settings=text_of(folder, "config.toml"),
        sample=text_of(folder, "sample.txt"),
    )


def _read(folder: Path, missing: list[str]) -> _Left:
    run: RunConfig | None = None
    try:
        run = parse_run(read_table(folder / "config.toml", folder))
    except TerraceError as error:
        missing.append(f"settings and plan: {error}")
    records: list[StepRecord] = []
    num_unsound = 0
    try:
        records, num_unsound = read_sound_metrics(folder / "metrics.jsonl")
    except OSError as error:
        missing.append(f"curves and times: metrics.jsonl cannot be read ({error.strerror})")
    else:
        if not records:
            missing.append("curves and times: no step has ended")
    amounts: dict[str, Any] = {}
    cluster: Cluster | None = None
    try:
        prediction = read_prediction(folder)
        amounts = prediction.predicted
        # The prediction's cluster differs from the run's only where the start measured constants.
        cluster = parse_cluster(prediction.cluster) if prediction.is_measured else None
    except FileNotFoundError:
        missing.append(f"predictions: there is no {PREDICTION}, which a run writes once it has measured its machine")
    except OSError as error:
        missing.append(f"predictions: {PREDICTION} cannot be read ({error.strerror})")
    except (ValueError, TerraceError):
        amounts = {}
        missing.append(f"predictions: {PREDICTION} is damaged")
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
    predicted = {name: numbers(amounts.get(name)) for name in ("time_s", "sent_bytes", "memory_bytes")}
    return _Left(folder=folder, run=run, records=records, events=events, predicted=predicted, cluster=cluster)


def _subtitle(run: RunConfig) -> str:
    return (
        f"{family_of(run.model)} decoder of {model_size(run.model)}; a step of "
        f"{run.batch_words} x {counted(run.train.sequence, 'token')}; "
        f"{plan_title(run.cluster, run.plan)}"
    )


def _status(left: _Left) -> str:
    # The last event decides: a killed run has neither "finished" nor "stopped".
    last = left.events[-1] if left.events else RunEvent(event="")
    done = left.records[-1].step if left.records else 0
    wanted = f" of {left.run.train.steps}" if left.run is not None else ""
    if last.event == "finished":
        return f"Finished after {counted(done, 'step')}, with a loss of {last.final_loss:.4g}."
    if last.event == "stopped":
        return f"Stopped after step {done}{wanted}: {last.why or 'no reason recorded'}."
    when = _when(left.records[-1].time) if left.records and left.records[-1].time else ""
    when = f" at {when} UTC" if when else ""
    if done:
        return f"Not finished: step {done}{wanted} is the last{when}. It still runs, or it was killed."
    return "Not finished: no step has ended yet."


def _open_words(left: _Left) -> str:
    # Prefer the "finished" event, which also records whether the machine was busy at the start.
    told = [event.no_verdict for event in left.events if event.event == "finished" and event.no_verdict]
    why_not = told[-1] if told else why_no_verdict(len(left.steady))
    return f", no verdict: {why_not}" if why_not else ""


def _notes(left: _Left) -> list[str]:
    # Means over steady steps, as the prediction is for a steady step.
    predicted_s, measured_s = sum(left.predicted["time_s"].values()), _mean(left.steady, attrgetter("step_s"))
    waits_s = statistics.fmean(
        sum(spent for name, spent in record.time_s.items() if name.startswith("wait ")) for record in left.steady
    )
    notes = []
    # A damaged file may have steps of 0 seconds.
    if measured_s > 0:
        notes.append(
            f"A step takes {seconds(measured_s)} in the mean; predicted were {seconds(predicted_s)}{_band(left)} "
            f"({100 * (predicted_s / measured_s - 1):+.0f} %{_open_words(left)}). Rank 0 waits for messages for "
            f"{100 * waits_s / measured_s:.0f} % of it."
        )
    slow = [(rank, factor) for record in left.steady for rank, factor in record.slow_ranks.items()]
    for rank in sorted({rank for rank, _ in slow}):
        factors = [factor for each, factor in slow if each == rank]
        notes.append(
            f"Rank {rank} was slow in {len(factors)} of {counted(len(left.steady), 'step')}: its own work took "
            f"{statistics.median(factors):.1f} times its peers'."
        )
    notes += filter(None, [slowest_note(left.steady, left.run)])
    if left.run is not None and left.run.plan.balance == "cost":
        notes.append("Messages of attention depend on the documents of a batch, and no prediction has them.")
    return notes


def _band(left: _Left) -> str:
    if left.run is None:
        return ""
    try:
        return f" {band_of(left.cluster or left.run.cluster, left.run.plan)}"
    except TerraceError:  # a plan that does not suit its cluster, in settings that were changed
        return ""


def _figures(left: _Left, num_starts: int) -> list[tuple[str, str]]:
    records, steady = left.records, left.steady
    # The same steps by which `train.target_loss` judges a run.
    newest = records[-num_final(len(records)) :]
    figures = [
        (f"{_mean(newest, attrgetter('loss')):.4g}", f"loss, mean of the last {counted(len(newest), 'step')}"),
        (quantity(_mean(steady, attrgetter("tokens_per_s")), "tokens/s"), "over all ranks"),
    ]
    for name in ("mfu", "hfu"):
        values = [value for record in steady if (value := getattr(record, name)) is not None]
        if values:
            figures.append((utilisation(statistics.fmean(values)), name.upper()))
    figures.append((seconds(_mean(steady, attrgetter("step_s"))), "a step"))
    figures.append((f"{records[-1].step:,}", "step" if records[-1].step == 1 else "steps"))
    if num_starts > 1:
        figures.append((str(num_starts), "starts"))
    return figures


def _curves(left: _Left) -> list[Curve]:
    def line(value: Callable[[StepRecord], float | None], factor: float = 1.0) -> list[tuple[int, float]]:
        found = ((record.step, value(record)) for record in left.records)
        return [(step, factor * y) for step, y in found if y is not None]

    target = None if left.run is None else left.run.train.target_loss
    aim = None if target is None else (f"target {target:g}", target)
    predicted_s, own = sum(left.predicted["time_s"].values()), slowest_points(left.records)
    rate = {"tokens/s": line(attrgetter("tokens_per_s"))}
    shares = {name.upper(): line(attrgetter(name), 100.0) for name in ("mfu", "hfu")}
    curves = [
        Curve(
            title="Loss", lines={"loss": line(attrgetter("loss"))} | eval_lines(left.records), smooth=True, level=aim
        ),
        Curve(title="Gradient norm before clipping", lines={"norm": line(attrgetter("grad_norm"))}, smooth=True),
        Curve(title="Learning rate", lines={"rate": line(attrgetter("learning_rate"))}, from_zero=True),
        Curve(title="Throughput", unit="tokens/s over all ranks", lines=rate, smooth=True, from_zero=True),
        Curve(title="Utilisation", unit="%", lines=shares, from_zero=True),
        Curve(
            title="Seconds of a step",
            lines={"step": line(attrgetter("step_s"))} | ({"own work of the slowest rank": own} if own else {}),
            from_zero=True,
            level=("predicted", predicted_s) if predicted_s else None,
        ),
    ]
    # Only runs with balance = "cost" record a balance, only block formats a rounding error.
    balance = line(attrgetter("balance"))
    if balance:
        words = "busiest place over the mean one, predicted"
        curves.append(Curve(title="Balance of attention", unit=words, lines={"balance": balance}))
    tables = (
        ("quantisation_error", "Rounding error of messages", "relative"),
        ("router_losses", "Losses of routers", "beside the loss"),
        ("pairs", "Pairs: right ones of all, mean margin of rewards", ""),
    )
    for key, title, unit in tables:
        names = dict.fromkeys(name for record in left.records for name in getattr(record, key))
        if names:
            lines = {name: line(lambda record, key=key, name=name: getattr(record, key).get(name)) for name in names}  # type: ignore[misc]
            curves.append(Curve(title=title, unit=unit, lines=lines, from_zero=True))
    curves += load_curves(left.records, line)
    return curves


def _plan(left: _Left, missing: list[str]) -> tuple[Sequence[str], Sequence[Sequence[str]]] | None:
    if left.run is None:
        return None
    try:
        return plan_rows(left.cluster or left.run.cluster, left.run.plan)
    except TerraceError as error:
        missing.append(f"the plan's table: {error}")
        return None


def _timeline(left: _Left, missing: list[str]) -> tuple[TimelineChart | None, str]:
    # The newest readable trace, else the prediction and the mean measured seconds. Damaged traces are reported.
    for path in sorted((left.folder / "profile").glob("step-*-rank-0.json"), key=_step_of_trace, reverse=True):
        try:
            trace, compared = read_trace(path, left.folder)
        except (OSError, ValueError):
            missing.append(f"{path.parent.name}/{path.name} is damaged")
            continue
        found = run_timeline(trace, {0: "predicted", 1: "measured"})
        if found is not None:
            passes = " for the passes of its stage" * (compared.predicted == "passes")
            return found, (
                f"Step {compared.step} of rank {compared.rank}: predicted {seconds(compared.predicted_s)}{passes}, "
                f"measured {seconds(compared.measured_s)}, both from their own beginning. A message stands on the lane "
                f"of the outermost tier it crosses. From {path.parent.name}/{path.name}, which Perfetto opens."
            )
    # Without a trace the page still has the prediction, above the mean seconds.
    missing.append('the measured timeline: no step was traced; --train.profile "10-12" traces three')
    if left.run is None or not any(left.predicted.values()):
        return None, ""
    measured = totals(_by_category([record.time_s for record in left.steady], statistics.fmean))
    words = "What was predicted of a steady step" + (", above the mean seconds measured by category." * bool(measured))
    headings = {0: "predicted", 1: "measured in the mean, without order"} if measured else {0: "predicted"}
    try:
        expected = predicted_events(left.run, left.cluster)
    except TerraceError as error:
        missing.append(f"the predicted timeline: {error}")
        return None, ""
    return run_timeline([*expected, *measured], headings), words


def _cycle(left: _Left, missing: list[str]) -> ChartedSection | None:
    if left.run is None or not left.run.plan.outer.has_islands:
        return None
    try:
        check_length(left.run)
        return run_cycle(left.run, left.cluster, left.steady)
    except TerraceError as error:
        missing.append(f"the cycle of islands: {error}")
        return None


def _step_of_trace(path: Path) -> int:
    number = path.name.split("-")[1]
    return int(number) if number.isdecimal() else -1


def _event_row(event: RunEvent) -> tuple[str, str, str]:
    name, when = event.event, "-" if event.time is None else _when(event.time) or "-"
    if name == "started":
        what = f"resumed after step {event.first_step}" if event.first_step else "started"
        ranks = "" if event.ranks is None else f", {counted(event.ranks, 'rank')}"
        return when, what, f"plan {event.plan} on {event.cluster}{ranks}"
    if name == "saved":
        return when, f"saved after step {event.step}", event.folder
    if name == "finished":
        return when, f"finished after step {event.step}", ""
    return when, name, event.why or event.text or ""


def _mean(records: Sequence[StepRecord], value: Callable[[StepRecord], float]) -> float:
    values = list(map(value, records))
    # Losses may be NaN or infinite.
    return statistics.fmean(values) if all(map(math.isfinite, values)) else math.nan


def _by_category(
    tables: Sequence[Mapping[str, float]], typical: Callable[[Iterable[float]], float]
) -> dict[str, float]:
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: typical(table.get(name, 0) for table in tables) for name in names}


def _when(time_s: float) -> str:
    # Empty for a number that is not a valid date.
    with suppress(ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return ""
