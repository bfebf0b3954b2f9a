"""A page is a list of sections, each with sentences, charts and a table; the terminal shows the same sections."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from terrace.base.words import seconds
from terrace.program.timeline import Timeline
from terrace.report.markup import TOOLS, figure, legend
from terrace.report.run_curves import Curve
from terrace.report.table import Table
from terrace.report.timeline import MOST_BARS, DrawnTimeline
from terrace.report.timeline_text import timeline_text

_MERGED = "Spans shorter than {} that lie close are drawn as one bar, its height shared out by category."


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart over time: its figure, data for the page's script, and its text for a terminal of some width.

    `is_merged`: short spans were merged, so a close-up would show more.
    """

    figure: str
    data: Mapping[str, object]
    text: Callable[[int], str] | None = None
    is_merged: bool = False


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page; without content it is left out, its title too.

    `words` are sentences, `body` is further markup, `curves` are charts over the steps of a run, drawn side by side,
    `text` gives lines for a terminal of some width alone. Two `is_half` sections stand beside each other where there is
    room; an `is_folded` one is opened by a click.
    """

    title: str = ""
    words: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    curves: Sequence[Curve] = ()
    resumed: Sequence[int] = ()  # steps after which the run resumed, marked in the curves
    body: str = ""
    text: Callable[[int], str] | None = None
    table: Table | None = None
    is_half: bool = False
    is_folded: bool = False


@dataclass(frozen=True, kw_only=True)
class Page:
    """Title, key figures as (value, words), the sentences that matter most, and the sections below."""

    title: str
    subtitle: str = ""
    figures: Sequence[tuple[str, str]] = ()
    lead: Sequence[str] = ()
    sections: Sequence[Section] = field(default=())


def timeline_chart(
    timeline: Timeline,
    *,
    caption: str = "",
    zooms: bool = True,
    most: int = MOST_BARS,
    colours: Mapping[str, str] | None = None,
    said: Mapping[str, str] | None = None,
) -> Chart:
    """The chart of a timeline, with buttons that zoom it if `zooms`.

    `colours` are keys of the palette by category, where they differ from it; `said` are remarks on colours.
    """
    drawn = DrawnTimeline(timeline, most, colours or {})
    entries = [(words, f"--c-{key}", (said or {}).get(key, "")) for words, key in drawn.legend]
    words = " ".join(filter(None, (caption, _MERGED.format(seconds(drawn.least_s)) if drawn.least_s else "")))
    markup = figure(drawn.svg(), legend(entries, critical=bool(timeline.critical)), words)
    return Chart(
        figure=TOOLS * zooms + markup,
        data=drawn.data(zooms=zooms),
        text=lambda width: timeline_text(timeline, width),
        is_merged=drawn.least_s > 0,
    )
