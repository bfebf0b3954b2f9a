"""What the page of a run says of a run of `terrace train`."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from terrace.base.errors import TerraceError
from terrace.base.words import counted, quantity, seconds
from terrace.model.facts import family_of
from terrace.program.report import why_no_verdict
from terrace.program.timeline import TimedSpan, Timeline, TimelineRow
from terrace.report.compared import ComparedAmounts, bytes_table, time_table
from terrace.report.loads import LOAD_TITLE, heat_maps
from terrace.report.predicted_run import check_length, cycle_of_run, predicted_rows
from terrace.report.record import RunRecord, mean_by_name, steady
from terrace.report.run_curves import Curve, Point, finite
from terrace.report.run_view import Figure, Part, beside_prediction
from terrace.report.sections import Chart, Section, timeline_chart
from terrace.report.slowest import slowest_note, slowest_points, slowest_times
from terrace.report.tables import model_size, plan_title, time_categories, utilisation
from terrace.report.traced import read_trace
from terrace.simulate.bands import band_of
from terrace.train.config import RunConfig
from terrace.train.loads import read_loads
from terrace.train.metrics import StepRecord, eval_lines, num_final
from terrace.train.resolve import parse_run

# (Column, title, unit) of tables by name, a line for each.
_TABLES = (
    ("quantisation_error", "Rounding error of messages", "relative"),
    ("router_losses", "Losses of routers", "beside the loss"),
    ("pairs", "Pairs: right ones of all, mean margin of rewards", ""),
)
T = TypeVar("T")

_LOADS = {"busiest expert": "busiest_expert", "busiest rank": "busiest_rank", "MaxVio": "max_vio"}


def train_part(record: RunRecord, draws: bool) -> Part:
    """Curves, times, bytes and memory, predicted beside measured; a timeline and a cycle of islands if `draws`."""
    run = _run_of(record)
    curves = _curves(record, run)
    time_s = ComparedAmounts(record.predicted.get("time_s", {}), mean_by_name([each.time_s for each in record.steady]))
    sent_bytes = _sent_bytes(record)
    slowest = slowest_times(record.events, run)
    sections = [Section(title=LOAD_TITLE, body=heat_maps(read_loads(record.folder)))]
    if draws:
        sections.append(Section(title="Timeline of a step", charts=_timeline(record, run)))
        sections += _cycle(record, run)
    sections.append(Section(title="Where the time of a step goes, on rank 0", table=time_table(time_s)))
    if slowest is not None:
        rank, amounts = slowest
        title = f"Where it goes on {rank}, which has most work of its own"
        sections.append(Section(title=title, table=time_table(amounts)))
    sections += [
        Section(title="Bytes rank 0 sends in a step", table=bytes_table(sent_bytes, "tier"), is_half=True),
        _memory(record),
    ]
    return Part(
        subtitle="" if run is None else _subtitle(run),
        steps=None if run is None else run.train.steps,
        figures=_figures(record) if record.steady else (),
        notes=_notes(record, run) if record.steady and time_s.predicted else (),
        curves=curves,
        sections=sections,
        plan=None if run is None else (record.cluster or run.cluster, run.plan),
        final=_final(record, curves, time_s, sent_bytes),
    )


def _run_of(record: RunRecord) -> RunConfig | None:
    if not record.settings:
        return None
    try:
        return parse_run(record.settings)
    except TerraceError as error:
        record.missing.append(f"settings and plan: {error}")
        return None


def _subtitle(run: RunConfig) -> str:
    return (
        f"{family_of(run.model)} decoder of {model_size(run.model)}; a step of "
        f"{run.batch_words} x {counted(run.train.sequence, 'token')}; "
        f"{plan_title(run.cluster, run.plan)}"
    )


def _sent_bytes(record: RunRecord) -> ComparedAmounts:
    predicted = defaultdict[str, float](float)
    for name, size in record.predicted.get("sent_bytes", {}).items():
        predicted[name.rsplit(".", 1)[-1]] += size  # names are "message.tier"
    tables = [each.sent_bytes for each in record.steady]
    # Medians, since a step may also count the refreshes of an adjacent one.
    names = dict.fromkeys(name for table in tables for name in table)
    measured = {name: statistics.median_low(table.get(name, 0) for table in tables) for name in names}
    return ComparedAmounts(predicted, measured)


def _memory(record: RunRecord) -> Section:
    last = record.records[-1] if record.records else None
    amounts = ComparedAmounts(record.predicted.get("memory_bytes", {}), last.memory_bytes if last else {})
    peaks = ", ".join(
        f"{name} {quantity(size, 'B')}" for name, size in (last.peak_memory_bytes if last else {}).items()
    )
    return Section(
        title="Model state on rank 0, each category at its own peak",
        table=bytes_table(amounts, "category"),
        words=[f"of the process or device at most: {peaks}"] if peaks else (),
        is_half=True,
    )


def _notes(record: RunRecord, run: RunConfig | None) -> list[str]:
    # Means over steady steps, as the prediction is for a steady step.
    step_s = _mean(record.steady, attrgetter("step_s"))
    notes = []
    for words in beside_prediction(step_s, record, _band(record, run), _open_words(record)):
        waits_s = statistics.fmean(_waits_s(each.time_s) for each in record.steady)
        notes.append(f"{words} Rank 0 waits for messages for {100 * waits_s / step_s:.0f} % of it.")
    slow: dict[str, list[float]] = defaultdict(list)
    for each in record.steady:
        for rank, factor in each.slow_ranks.items():
            slow[rank].append(factor)
    for rank, factors in sorted(slow.items()):
        notes.append(
            f"Rank {rank} was slow in {len(factors)} of {counted(len(record.steady), 'step')}: its own work took "
            f"{statistics.median(factors):.1f} times its peers'."
        )
    notes += filter(None, [slowest_note(record.steady, run)])
    if run is not None and run.plan.balance == "cost":
        notes.append("Messages of attention depend on the documents of a batch, and no prediction has them.")
    return notes


def _waits_s(time_s: Mapping[str, float]) -> float:
    return sum(spent for name, spent in time_s.items() if name.startswith("wait "))


def _band(record: RunRecord, run: RunConfig | None) -> str:
    if run is None:
        return ""
    try:
        return f" {band_of(record.cluster or run.cluster, run.plan)}"
    except TerraceError:  # a plan that does not suit its cluster, in settings that were changed
        return ""


def _open_words(record: RunRecord) -> str:
    # Prefer the "finished" event, which also records whether the machine was busy at the start.
    told = [event.no_verdict for event in record.events if event.event == "finished" and event.no_verdict]
    why_not = told[-1] if told else why_no_verdict(len(record.steady))
    return f", no verdict: {why_not}" if why_not else ""


def _figures(record: RunRecord) -> list[tuple[str, str]]:
    records, starts = record.records, [event for event in record.events if event.event == "started"]
    # The same steps by which `train.target_loss` judges a run.
    newest = records[-num_final(len(records)) :]
    figures = [
        (f"{_mean(newest, attrgetter('loss')):.4g}", f"loss, mean of the last {counted(len(newest), 'step')}"),
        (quantity(_mean(record.steady, attrgetter("tokens_per_s")), "tokens/s"), "over all ranks"),
    ]
    for name in ("mfu", "hfu"):
        values = [value for each in record.steady if (value := getattr(each, name)) is not None]
        if values:
            figures.append((utilisation(statistics.fmean(values)), name.upper()))
    figures.append((seconds(_mean(record.steady, attrgetter("step_s"))), "a step"))
    figures.append((f"{records[-1].step:,}", "step" if records[-1].step == 1 else "steps"))
    if len(starts) > 1:
        figures.append((str(len(starts)), "starts"))
    return figures


def _curves(record: RunRecord, run: RunConfig | None) -> list[Curve]:
    records = record.records

    def line(value: Callable[[StepRecord], float | None], factor: float = 1.0) -> list[Point]:
        found = ((each.step, value(each)) for each in records)
        return [(step, factor * y) for step, y in found if y is not None]

    target = None if run is None else run.train.target_loss
    aim = None if target is None else (f"target {target:g}", target)
    shares = {name.upper(): line(attrgetter(name), 100.0) for name in ("mfu", "hfu")}
    step_s = {"step": line(attrgetter("step_s"))}
    if own := slowest_points(records):
        step_s["own work of the slowest rank"] = own
    predicted = ("predicted", record.predicted_s) if record.predicted_s else None
    curves = [
        Curve(title="Loss", lines={"loss": line(attrgetter("loss"))} | eval_lines(records), smooth=True, level=aim),
        Curve(title="Gradient norm before clipping", lines={"norm": line(attrgetter("grad_norm"))}, smooth=True),
        Curve(title="Learning rate", lines={"rate": line(attrgetter("learning_rate"))}, from_zero=True),
        Curve(
            title="Throughput",
            unit="tokens/s over all ranks",
            lines={"tokens/s": line(attrgetter("tokens_per_s"))},
            smooth=True,
            from_zero=True,
        ),
        Curve(title="Utilisation", unit="%", lines=shares, from_zero=True),
        Curve(title="Seconds of a step", lines=step_s, from_zero=True, level=predicted),
    ]
    # Only runs with balance = "cost" record a balance, only block formats a rounding error.
    if balance := line(attrgetter("balance")):
        words = "busiest place over the mean one, predicted"
        curves.append(Curve(title="Balance of attention", unit=words, lines={"balance": balance}))
    for key, title, unit in _TABLES:
        lines = _named_lines(records, key)
        if lines:
            curves.append(Curve(title=title, unit=unit, lines=lines, from_zero=True))
    loads = _named_lines(records, "load")
    if loads:
        lines = {words: loads[name] for words, name in _LOADS.items() if name in loads}
        curves.append(Curve(title=LOAD_TITLE, unit="over the mean", lines=lines, smooth=True, from_zero=True))
    if dropped := line(attrgetter("dropped")):
        curves.append(Curve(title="Choices of experts dropped", unit="in a step", lines={"dropped": dropped}))
    return curves


def _named_lines(records: Sequence[StepRecord], key: str) -> dict[str, list[Point]]:
    lines = defaultdict[str, list[Point]](list)
    for record in records:
        for name, value in getattr(record, key).items():
            lines[name].append((record.step, value))
    return dict(lines)


def _timeline(record: RunRecord, run: RunConfig | None) -> list[Chart]:
    # The newest readable trace, else the prediction and the mean measured seconds. Damaged traces are reported.
    for path in sorted((record.folder / "profile").glob("step-*-rank-0.json"), key=_step_of_trace, reverse=True):
        try:
            timeline, compared = read_trace(path, record.folder)
        except (OSError, ValueError):
            record.missing.append(f"{path.parent.name}/{path.name} is damaged")
            continue
        if timeline is not None:
            passes = " for the passes of its stage" * (compared.predicted == "passes")
            words = (
                f"Step {compared.step} of rank {compared.rank}: predicted {seconds(compared.predicted_s)}{passes}, "
                f"measured {seconds(compared.measured_s)}, both from their own beginning. A message stands on the lane "
                f"of the outermost tier it crosses. From {path.parent.name}/{path.name}, which Perfetto opens."
            )
            return [timeline_chart(timeline, caption=words)]
    # Without a trace the page still has the prediction, above the mean seconds.
    record.missing.append('the measured timeline: no step was traced; --train.profile "10-12" traces three')
    if run is None or not any(record.predicted.values()):
        return []
    measured = _end_to_end(mean_by_name([each.time_s for each in record.steady]))
    words = "What was predicted of a steady step" + (", above the mean seconds measured by category." * bool(measured))
    try:
        check_length(run)
        rows = predicted_rows(run, record.cluster, "predicted")
    except TerraceError as error:
        record.missing.append(f"the predicted timeline: {error}")
        return []
    if measured:
        rows.append(TimelineRow("compute", measured, "measured in the mean, without order"))
    end_s = max(span.end_s for row in rows for span in row.spans)
    return [timeline_chart(Timeline(title="Timeline of a step, predicted", rows=rows, end_s=end_s), caption=words)]


def _end_to_end(time_s: Mapping[str, float]) -> list[TimedSpan]:
    # Means have no order.
    spans, now_s = list[TimedSpan](), 0.0
    for name in time_categories(time_s):
        spans.append(TimedSpan(now_s, now_s + time_s[name], name))
        now_s += time_s[name]
    return spans


def _step_of_trace(path: Path) -> int:
    number = path.name.split("-")[1]
    return int(number) if number.isdecimal() else -1


def _cycle(record: RunRecord, run: RunConfig | None) -> list[Section]:
    if run is None or not run.plan.outer.has_islands:
        return []
    try:
        check_length(run)
        return cycle_of_run(run, record.cluster, record.steady)
    except TerraceError as error:
        record.missing.append(f"the cycle of islands: {error}")
        return []


def _final(
    record: RunRecord, curves: Sequence[Curve], time_s: ComparedAmounts, sent_bytes: ComparedAmounts
) -> dict[str, Figure]:
    lines = {curve.title: curve.lines for curve in curves}
    found = dict[str, Figure]()

    def add(words: str, value: float, shown: str) -> None:
        if math.isfinite(value):
            found[words] = Figure(value, shown)

    losses = dict(lines["Loss"])
    if own := losses.pop("loss"):
        end = final_mean(own)
        add("steps", own[-1][0], f"{own[-1][0]:,}")
        add("loss, mean of the last tenth", end, f"{end:.4g}")
    for source, points in losses.items():
        if known := finite(points):
            step, lowest = min(known, key=lambda point: point[1])
            add(f"{source}: last loss", known[-1][1], f"{known[-1][1]:.4g}")
            add(f"{source}: lowest loss", lowest, f"{lowest:.4g} (step {step})")
    shown: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
        ("Throughput", "tokens/s", "tokens/s", lambda value: quantity(value, "").strip()),
        ("Utilisation", "MFU", "MFU", lambda value: utilisation(value / 100)),
        ("Utilisation", "HFU", "HFU", lambda value: utilisation(value / 100)),
        ("Seconds of a step", "step", "step", seconds),
    )
    for title, line, words, form in shown:
        if known := finite(steady(lines[title][line])):
            mean = statistics.fmean(value for _, value in known)
            add(words, mean, form(mean))
    predicted_s, measured_s = sum(time_s.predicted.values()), sum(time_s.measured.values())
    if time_s.predicted:
        add("predicted step", predicted_s, seconds(predicted_s))
    if measured_s > 0:
        share = _waits_s(time_s.measured) / measured_s
        add("waits of rank 0", share, f"{100 * share:.0f} %")
    for tier, size in sent_bytes.measured.items():
        add(f"sent by rank 0 on {tier}", size, quantity(size, "B"))
    for kind, size in (record.records[-1].peak_memory_bytes if record.records else {}).items():
        add(f"memory of rank 0, {kind}", size, quantity(size, "B"))
    return found


def final_mean(points: Sequence[Point]) -> float:
    """The mean of the last tenth of the steps, by which `train.target_loss` judges a run."""
    return _mean(points[-num_final(len(points)) :], lambda point: point[1])


def _mean(records: Sequence[T], value: Callable[[T], float]) -> float:
    values = list(map(value, records))
    # Losses may be NaN or infinite.
    return statistics.fmean(values) if values and all(map(math.isfinite, values)) else math.nan
