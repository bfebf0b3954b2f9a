"""A timeline: rows of bars over a time window, as an SVG chart and as data for the page's script."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from terrace.report.bars import Bar, Interval, Window, join_bars
from terrace.report.palette import colour_key
from terrace.report.svg import PLOT, Row, box, rows_svg

_SEPARATED = 4  # units; narrower bars have no outline, which would hide them

Stretch = tuple[int, float, float]  # row, start and end in seconds


@dataclass(frozen=True, kw_only=True)
class TimelineChart:
    """Bars of each row. `least_s` is the threshold in seconds below which spans were merged, 0 if none were.

    `critical` stretches are underlined `gap` units below their row. `headings` are (text, baseline) of groups of rows.
    """

    label: str  # for screen readers
    rows: Sequence[Row]
    bars: Sequence[Sequence[Bar]]
    window: Window
    least_s: float
    critical: Sequence[Stretch] = ()
    gap: int = 3
    margin: int = 8  # below the last row
    headings: Sequence[tuple[str, int]] = ()

    @classmethod
    def joined(
        cls,
        label: str,
        rows: Sequence[Row],
        pieces: Mapping[int, Sequence[Interval]],
        length_s: float,
        words: Sequence[str],
        most: int,
        *,
        margin: int,
        headings: Sequence[tuple[str, int]],
    ) -> Self:
        """Chart of pieces by row from 0 to `length_s`, merged into at most `most` bars; their keys index `words`."""
        bars, least_s = join_bars(pieces, length_s, lambda _, key: words[key], most)
        window, of_rows = (0.0, length_s), list(bars.values())
        return cls(
            label=label, rows=rows, bars=of_rows, window=window, least_s=least_s, margin=margin, headings=headings
        )

    @property
    def categories(self) -> set[str]:
        return {category for row in self.bars for bar in row for category, _ in bar.shares}

    def svg(self) -> str:
        shapes: list[str] = []
        for row, bars in zip(self.rows, self.bars, strict=True):
            # One path per colour instead of one per bar keeps pages with thousands of bars small.
            outlines: dict[tuple[str, bool], list[str]] = defaultdict(list)
            for bar in bars:
                start, end = self._share(bar.start_s), self._share(bar.end_s)
                is_wide, below = (end - start) * PLOT >= _SEPARATED, float(row.top + row.height)
                # Shares of a merged bar are stacked from the bottom.
                for category, share in bar.shares:
                    below -= share * row.height
                    outlines[colour_key(category), is_wide].append(box(start, end, below, share * row.height))
            for (key, is_wide), boxes in outlines.items():
                kind = ' class="wide"' if is_wide else ""
                shapes.append(f'<path{kind} fill="var(--c-{key})" d="{"".join(boxes)}"/>')
        for number, start_s, end_s in self.critical:
            row, start, end = self.rows[number], max(0.0, self._share(start_s)), min(1.0, self._share(end_s))
            if end > start:
                below = row.top + row.height + self.gap
                shapes.append(f'<path class="critical" d="{box(start, end, below, self.gap + 1)}"/>')
        return rows_svg(self.label, self.rows, self.window, shapes, margin=self.margin, headings=self.headings)

    def data(self, *, zooms: bool = True) -> dict[str, object]:
        """Data for the page's script; with `zooms` the chart zooms together with the others of the whole step."""

        def unit(moment_s: float) -> float:
            # Two decimals are far below a pixel and keep pages small.
            return round(self._share(moment_s) * PLOT, 2)

        # In units of the plot, so that the script can find the bar under the pointer without converting times.
        bars = [[[unit(bar.start_s), unit(bar.end_s), bar.words] for bar in row] for row in self.bars]
        return chart_data(self.window, zooms, rows=[(row.top, row.height) for row in self.rows], bars=bars)

    def _share(self, moment_s: float) -> float:
        first_s, last_s = self.window
        return (moment_s - first_s) / ((last_s - first_s) or 1.0)


def chart_data(window: Window, zooms: bool = True, **content: object) -> dict[str, object]:
    """Data of one chart for the page's script."""
    return {"start_s": window[0], "length_s": window[1] - window[0], "zooms": zooms, **content}


def joined(pieces: Iterable[Stretch], gap_s: float) -> list[Stretch]:
    """Merge stretches of a row with gaps of at most `gap_s`, since each becomes an SVG element."""
    newest: dict[int, int] = {}
    found: list[Stretch] = []
    for row, start_s, end_s in pieces:
        at = newest.get(row)
        if at is not None and start_s - found[at][2] <= gap_s:
            found[at] = (row, found[at][1], end_s)
        else:
            newest[row] = len(found)
            found.append((row, start_s, end_s))
    return found
