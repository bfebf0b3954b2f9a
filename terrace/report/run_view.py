"""The page of a run of any command: what every record has, and between it the sections of the command.

A product names the function of its runs' part (`terrace.base.products.RunKind`), and may add sections to the page of
every run.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from terrace.base.errors import TerraceError, first_line
from terrace.base.parsing import parse_toml
from terrace.base.products import load_reference, products
from terrace.base.words import counted, quantity, seconds
from terrace.cluster.cluster import Cluster
from terrace.plan.plan import Plan
from terrace.report.downloads import downloads
from terrace.report.markup import prose
from terrace.report.record import RunRecord, checkpoint_rows, read_record
from terrace.report.run_curves import Curve
from terrace.report.sections import Page, Section
from terrace.report.table import Table
from terrace.report.tables import plan_table
from terrace.train.recorder import RunEvent
from terrace.train.runs import kind_of

_TRAIN = "terrace.report.train_part:train_part"


class Figure(NamedTuple):
    """A final figure of a run: in plain units, and formatted for a table."""

    value: float
    words: str


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a command says of its run.

    `steps` are those that were asked for, `saves` the folders with checkpoints, the first of which decides whether the
    run can be resumed. `final` are the figures by which runs are compared.
    """

    subtitle: str = ""
    steps: int | None = None
    figures: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    curves: Sequence[Curve] = ()
    sections: Sequence[Section] = ()
    plan: tuple[Cluster, Plan] | None = None
    saves: Sequence[str] = ("",)
    final: Mapping[str, Figure] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run as shown: alone on a page, or beside others. `settings` are by dotted key, None if they cannot be read."""

    name: str
    status: str
    subtitle: str = ""
    notes: Sequence[str] = ()
    figures: Sequence[tuple[str, str]] = ()
    curves: Sequence[Curve] = ()
    resumed: Sequence[int] = ()  # steps after which the run resumed
    sections: Sequence[Section] = ()  # below the curves
    final: Mapping[str, Figure] = field(default_factory=dict)
    settings: Mapping[str, Any] | None = None
    missing: Sequence[str] = ()


def run_view(folder: Path, draws: bool = True) -> RunView:
    """The view of a run. Without `draws` it has no timelines, which need a simulated step."""
    record = read_record(folder)
    part = _part_of(record, draws)
    settings = record.text("config.toml")
    sections = [
        *part.sections,
        *_product_sections(record),
        _plan_section(record, part),
        _events_section(record.events),
        _checkpoints_section(record, part.saves),
        Section(title="Settings", words=[settings], is_folded=True),
        Section(title="The model continues the prompt", words=[record.text("sample.txt")], is_folded=True),
    ]
    return RunView(
        name=folder.resolve().name,
        status=_status(record, part),
        subtitle=part.subtitle,
        notes=part.notes,
        figures=part.figures,
        curves=part.curves,
        resumed=[event.first_step for event in record.events if event.event == "started" and event.first_step],
        sections=sections,
        final=part.final,
        settings=flat_settings(settings),
        missing=record.missing,
    )


def run_page(view: RunView) -> Page:
    missing = "".join(f"<li>{prose(words)}</li>" for words in view.missing)
    before = [
        Section(title="What is missing", body=f"<ul class=missing>{missing}</ul>" if missing else ""),
        Section(title="Over the steps", curves=view.curves, resumed=view.resumed),
        Section(body=downloads([view])),
    ]
    return Page(
        title=view.name,
        subtitle=view.subtitle,
        figures=view.figures,
        lead=[view.status, *view.notes],
        sections=[*before, *view.sections],
    )


def _part_of(record: RunRecord, draws: bool) -> Part:
    kind = kind_of(record.settings)
    if kind is not None and not kind.page:
        return Part()
    found: Part = load_reference(_TRAIN if kind is None else kind.page)(record, draws)
    return found


def _product_sections(record: RunRecord) -> list[Section]:
    found = list[Section]()
    for product in products():
        for reference in product.sections:
            try:
                found += load_reference(reference)(record)
            except Exception as error:  # whatever a foreign function raises, the rest of the page is shown
                record.missing.append(f"sections of product {product.name!r}: {first_line(error)}")
    return found


def _status(record: RunRecord, part: Part) -> str:
    # The last event decides: a killed run has neither "finished" nor "stopped".
    last = record.events[-1] if record.events else RunEvent(event="")
    done = record.records[-1].step if record.records else 0
    wanted = f" of {part.steps}" if part.steps is not None else ""
    if last.event == "finished":
        loss = "" if last.final_loss is None else f", with a loss of {last.final_loss:.4g}"
        return f"Finished after {counted(done, 'step')}{loss}."
    if last.event == "stopped":
        return f"Stopped after step {done}{wanted}: {last.why or 'no reason recorded'}."
    when = when_words(record.records[-1].time) if record.records and record.records[-1].time else ""
    when = f" at {when} UTC" if when else ""
    if done:
        return f"Not finished: step {done}{wanted} is the last{when}. It still runs, or it was killed."
    return "Not finished: no step has ended yet."


def _plan_section(record: RunRecord, part: Part) -> Section:
    table = None
    if part.plan is not None:
        try:
            table = plan_table(*part.plan)
        except TerraceError as error:
            record.missing.append(f"the plan's table: {error}")
    return Section(title="Tiers, axes and placements", table=table)


def _events_section(events: Sequence[RunEvent]) -> Section:
    headings = ("when (UTC)", "what", "details")
    table = Table(headings=headings, rows=[_event_row(event) for event in events], left=headings)
    return Section(title="What happened", table=table, is_half=True)


def _checkpoints_section(record: RunRecord, saves: Sequence[str]) -> Section:
    rows = []
    for place, name in enumerate(saves):
        # Only the first decides whether the run can be resumed.
        for checkpoint, size, state in checkpoint_rows(record.folder / name, [] if place else record.missing):
            rows.append([f"{name}/{checkpoint}".removeprefix("/"), quantity(size, "B"), state])
    headings = ("checkpoint", "size", "state")
    return Section(title="Checkpoints", table=Table(headings=headings, rows=rows, left=headings[::2]), is_half=True)


def _event_row(event: RunEvent) -> tuple[str, str, str]:
    name, when = event.event, "-" if event.time is None else when_words(event.time) or "-"
    if name == "started":
        what = f"resumed after step {event.first_step}" if event.first_step else "started"
        ranks = "" if event.ranks is None else f", {counted(event.ranks, 'rank')}"
        return when, what, f"plan {event.plan} on {event.cluster}{ranks}"
    if name == "saved":
        return when, f"saved after step {event.step}", event.folder
    if name == "finished":
        return when, f"finished after step {event.step}", ""
    return when, name, event.why or event.text or ""


def flat_settings(text: str) -> dict[str, Any] | None:
    """Settings by dotted key; None for text that is no TOML, and without settings."""
    with suppress(ValueError):
        return _flat(parse_toml(text)) or None
    return None


def _flat(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{before}{key}.")
        elif _is_named(value):  # such as tiers: flat by name, so that one key that differs is one row
            for each in value:
                found |= _flat(each, f"{before}{key}.{each['name']}.")
        else:
            found[f"{before}{key}"] = value
    return found


def _is_named(value: object) -> bool:
    """Whether a value is a list of tables with distinct names."""
    if not isinstance(value, list) or not all(isinstance(each, Mapping) and "name" in each for each in value):
        return False
    return len({str(each["name"]) for each in value}) == len(value) > 0


def when_words(time_s: float) -> str:
    """A time since 1970 as date and time; empty for a number that is no valid date."""
    with suppress(ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return ""


def beside_prediction(step_s: float, record: RunRecord, band: str = "", verdict: str = "") -> Sequence[str]:
    """A sentence on the mean measured step beside the predicted one; none without both."""
    # A damaged file may have steps of 0 seconds.
    if not (math.isfinite(step_s) and step_s > 0 and record.predicted_s > 0):
        return []
    error = 100 * (record.predicted_s / step_s - 1)
    return [
        f"A step takes {seconds(step_s)} in the mean; predicted were {seconds(record.predicted_s)}{band} "
        f"({error:+.0f} %{verdict})."
    ]
