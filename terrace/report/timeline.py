"""A timeline on a page: its SVG, and data for the page's script.

Short adjacent spans are merged where there are many. The height of a merged bar is divided among its categories and
idle time by their share of its time, so no time is hidden at any scale.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from terrace.base.printable import escape
from terrace.program.timeline import Stretch, TimedSpan, Timeline
from terrace.report.palette import colour_key, known_order
from terrace.report.svg import PLOT, Row, box, rows_svg

MOST_BARS = 1000
_MAIN, _LANE, _GAP, _HEADING, _TOP = 30, 20, 8, 22, 4
_LOWER = ((40, 12), (16, 16))  # (more rows than this, height of each), so that a chart of many rows fits a screen
_SEPARATED = 4  # units; narrower bars have no outline, which would hide them
_UNDERLINE = 3


class Bar(NamedTuple):
    """Bar from `start_s` to `end_s`; `shares` gives each category's fraction of its height, at most 1 in total."""

    start_s: float
    end_s: float
    shares: tuple[tuple[str, float], ...]
    words: str


@dataclass(frozen=True)
class DrawnTimeline:
    """A timeline as at most `most` bars, but at least one in each row.

    `colours` are keys of the palette by category, where they differ from the palette's own.
    """

    timeline: Timeline
    most: int = MOST_BARS
    colours: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def least_s(self) -> float:
        """The length below which spans were merged; 0 if none were."""
        return self._merged[1]

    @property
    def bars(self) -> Sequence[Sequence[Bar]]:
        return self._merged[0]

    @cached_property
    def _merged(self) -> tuple[list[list[Bar]], float]:
        rows = [list(self.timeline.inside(row)) for row in self.timeline.rows]
        least_s = 0.0
        while True:
            bars = [_bars(spans, least_s) for spans in rows]
            if sum(map(len, bars)) <= max(self.most, len(rows)):
                return bars, least_s
            # Start at 1/4096 of the picture, about a screen pixel at full zoom out, and coarsen by 30 %.
            least_s = 1.3 * least_s or self.timeline.length_s / 4096

    @cached_property
    def _rows(self) -> tuple[list[Row], list[tuple[str, int]]]:
        """The places of the rows and of the headings of their groups."""
        rows, headings = list[Row](), list[tuple[str, int]]()
        lower = next((height for most, height in _LOWER if len(self.timeline.rows) > most), _MAIN)
        top, group = _TOP, ""
        for row in self.timeline.rows:
            if row.group != group:
                group = row.group
                headings.append((escape(group), top + 15))
                top += _HEADING
            rows.append(Row(row.name, top, min(lower, _MAIN if row.is_main else _LANE)))
            top += rows[-1].height + _GAP
        return rows, headings

    def colour(self, category: str) -> str:
        return self.colours.get(category) or colour_key(category)

    @property
    def legend(self) -> list[tuple[str, str]]:
        """(Words, key of the palette) of each colour: its own name, or those of the categories that have it."""
        names = defaultdict[str, set[str]](set)
        for category in self.timeline.categories:
            key = self.colour(category)
            is_own = category not in self.colours and key != "other"
            names[key].add(key if is_own else category)
        return [(", ".join(sorted(names[key])), key) for key in sorted(names, key=known_order)]

    def svg(self) -> str:
        rows, headings = self._rows
        shapes: list[str] = []
        for row, bars in zip(rows, self.bars, strict=True):
            shapes += self._shapes(row, bars)
        for stretch in _joined_stretches(self.timeline.critical, max(self.least_s, self.timeline.length_s / 2000)):
            row, start, end = rows[stretch.row], max(0.0, self._share(stretch.start_s)), self._share(stretch.end_s)
            if min(1.0, end) > start:
                below = row.top + row.height + 2
                shapes.append(f'<path class="critical" d="{box(start, min(1.0, end), below, _UNDERLINE)}"/>')
        window = self.timeline.start_s, self.timeline.end_s
        return rows_svg(self.timeline.title, rows, window, shapes, headings=headings)

    def _shapes(self, row: Row, bars: Sequence[Bar]) -> Iterable[str]:
        # One path per colour instead of one per bar keeps pages with thousands of bars small.
        outlines = defaultdict[tuple[str, bool], list[str]](list)
        for bar in bars:
            start, end = self._share(bar.start_s), self._share(bar.end_s)
            is_wide, below = (end - start) * PLOT >= _SEPARATED, float(row.top + row.height)
            # Shares of a merged bar are stacked from the bottom.
            for category, share in bar.shares:
                below -= share * row.height
                outlines[self.colour(category), is_wide].append(box(start, end, below, share * row.height))
        for (key, is_wide), boxes in outlines.items():
            kind = ' class="wide"' if is_wide else ""
            yield f'<path{kind} fill="var(--c-{key})" d="{"".join(boxes)}"/>'

    def data(self, *, zooms: bool = True) -> dict[str, object]:
        """Data for the page's script; with `zooms` the chart zooms together with the others of the whole step."""

        def unit(moment_s: float) -> float:
            # Two decimals are far below a pixel and keep pages small.
            return round(self._share(moment_s) * PLOT, 2)

        # In units of the plot, so that the script can find the bar under the pointer without converting times.
        bars = [[[unit(bar.start_s), unit(bar.end_s), bar.words] for bar in row] for row in self.bars]
        places = [(row.top, row.height) for row in self._rows[0]]
        return chart_data(self.timeline.start_s, self.timeline.end_s, zooms=zooms, rows=places, bars=bars)

    def _share(self, moment_s: float) -> float:
        return (moment_s - self.timeline.start_s) / self.timeline.length_s


def chart_data(start_s: float, end_s: float, *, zooms: bool = True, **content: object) -> dict[str, object]:
    """Data of one chart over time for the page's script."""
    return {"start_s": start_s, "length_s": end_s - start_s, "zooms": zooms, **content}


def _bars(spans: Sequence[TimedSpan], least_s: float) -> list[Bar]:
    bars: list[Bar] = []
    group: list[TimedSpan] = []
    for span in spans:
        is_long = span.end_s - span.start_s >= least_s
        # A group ends before a long span and is at most twice the threshold wide.
        if group and (is_long or span.end_s - group[0].start_s > 2 * least_s):
            bars.append(_bar(group))
            group = []
        if is_long:
            bars.append(_bar([span]))
        else:
            group.append(span)
    return [*bars, _bar(group)] if group else bars


def _bar(group: Sequence[TimedSpan]) -> Bar:
    first, last = group[0], group[-1]
    if len(group) == 1:
        return Bar(first.start_s, first.end_s, ((first.category, 1.0),), str(first.what))
    spent = defaultdict[str, float](float)
    for span in group:
        spent[span.category] += span.end_s - span.start_s
    # Avoid 0 / 0 for spans without length at one moment.
    length_s = last.end_s - first.start_s or 1.0
    shares = tuple((category, seconds / length_s) for category, seconds in sorted(spent.items()))
    # Shares are of the bar's length, so idle time is the missing rest.
    named = ", ".join(f"{category} {round(100 * share)} %" for category, share in shares)
    return Bar(first.start_s, last.end_s, shares, f"{len(group)} together: {named}")


def _joined_stretches(stretches: Iterable[Stretch], gap_s: float) -> list[Stretch]:
    """Merge stretches of a row with gaps of at most `gap_s`, since each becomes an SVG element."""
    newest: dict[int, int] = {}
    found: list[Stretch] = []
    for each in stretches:
        at = newest.get(each.row)
        if at is not None and each.start_s - found[at].end_s <= gap_s:
            found[at] = found[at]._replace(end_s=each.end_s)
        else:
            newest[each.row] = len(found)
            found.append(each)
    return found
