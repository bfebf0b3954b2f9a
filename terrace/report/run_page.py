"""A run, finished or not, as one self-contained HTML page: no network, no external files.

The data are plain values (`RunView`); the page names missing parts. Text from files is escaped, in the markup and in
the script's data.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from terrace.base.printable import escape
from terrace.base.words import quantity
from terrace.report.compared import Amounts, ComparedAmounts, bytes_table, time_table
from terrace.report.loads import LOAD_TITLE, heat_maps
from terrace.report.markup import (
    MERGED,
    ChartedSection,
    colour_entries,
    column,
    details,
    document,
    figures_row,
    heading,
    lead,
    missing_list,
    plan_html,
    section,
    timelines,
    words_table,
)
from terrace.report.run_curves import Curve, curve_data, curve_tiles, drawable
from terrace.report.timeline import TimelineChart
from terrace.train.loads import LoadsOfSteps

_UNKNOWN = ComparedAmounts({}, {})


@dataclass(frozen=True, kw_only=True)
class RunView:
    """Data of a run.

    `plan`: (headings, rows) of the plan's table; `events`: (when, event, details); `checkpoints`: (name, bytes, state);
    `resumed`: steps after which the run resumed; `timeline_words`: caption of the timeline.
    """

    title: str
    subtitle: str
    status: str
    figures: Sequence[tuple[str, str]] = ()
    missing: Sequence[str] = ()
    notes: Sequence[str] = ()
    curves: Sequence[Curve] = ()
    resumed: Sequence[int] = ()
    loads: Sequence[LoadsOfSteps] = ()
    plan: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None
    time_s: ComparedAmounts = _UNKNOWN  # of rank 0
    slowest: tuple[str, ComparedAmounts] | None = None  # seconds of the slowest rank, unless it is rank 0
    sent_bytes: ComparedAmounts = _UNKNOWN  # by tier
    memory_bytes: ComparedAmounts = _UNKNOWN
    peak_memory: Amounts = field(default_factory=dict)
    timeline: TimelineChart | None = None
    timeline_words: str = ""
    cycle: ChartedSection | None = None  # of islands
    events: Sequence[tuple[str, str, str]] = ()
    checkpoints: Sequence[tuple[str, int, str]] = ()
    settings: str = ""
    sample: str = ""


def run_page(view: RunView, numbers: str = "") -> str:
    """The page; `numbers` is markup with download links (terrace.report.downloads)."""
    drawn = drawable(view.curves)
    timeline, charts = "", list[dict[str, object]]()
    if view.timeline is not None:
        entries, headings = colour_entries(view.timeline), ("Timeline of a step", "")
        timeline, charts = timelines(
            view.timeline, entries, None, headings=headings, caption=view.timeline_words, merged=MERGED
        )
    charts += [] if view.cycle is None else [view.cycle.chart]
    checkpoints = [(name, quantity(size, "B"), state) for name, size, state in view.checkpoints]
    # Empty sections leave no heading behind.
    sections = [
        heading(view.title, view.subtitle),
        lead([view.status, *view.notes]),
        figures_row(view.figures),
        missing_list(view.missing),
        section("Over the steps", curve_tiles(drawn, view.resumed)),
        numbers,
        section(LOAD_TITLE, heat_maps(view.loads)),
        timeline,
        "" if view.cycle is None else view.cycle.markup,
        section("Where the time of a step goes, on rank 0", time_table(view.time_s)),
        "" if view.slowest is None else section(_slowest_title(view.slowest[0]), time_table(view.slowest[1])),
        "<div class=columns>",
        column("Bytes rank 0 sends in a step", bytes_table(view.sent_bytes, "tier")),
        column("Model state on rank 0, each category at its own peak", _memory(view)),
        "</div>",
        "" if view.plan is None else plan_html(*view.plan),
        "<div class=columns>",
        column("What happened", words_table(("when (UTC)", "what", "details"), view.events)),
        column("Checkpoints", words_table(("checkpoint", "size", "state"), checkpoints)),
        "</div>",
        details("Settings", view.settings),
        details("The model continues the prompt", view.sample),
    ]
    # `charts` are timelines; curves are passed separately.
    page = document(view.title, sections, charts, curves=[curve_data(curve) for curve in drawn])
    # JSON escapes and folder names may contain lone surrogates, which UTF-8 cannot encode.
    return page.encode(errors="replace").decode()


def _slowest_title(rank: str) -> str:
    return f"Where it goes on {escape(rank)}, which has most work of its own"


def _memory(view: RunView) -> str:
    table = bytes_table(view.memory_bytes, "category")
    named = ", ".join(f"{name} {quantity(size, 'B')}" for name, size in view.peak_memory.items())
    return f"{table}<p class=quiet>of the process or device at most: {escape(named)}</p>" if named else table
