"""Tables that compare predicted and measured amounts by category, for the pages of runs."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from terrace.base.words import quantity, seconds
from terrace.report.markup import meter
from terrace.report.palette import colour_key
from terrace.report.table import Markup, Table
from terrace.report.tables import time_categories

Amounts = Mapping[str, float]


class ComparedAmounts(NamedTuple):
    """Amounts by category; an unknown side is empty."""

    predicted: Amounts
    measured: Amounts


def time_table(
    time_s: ComparedAmounts,
    heading: str = "category",
    categories: Sequence[str] = (),
    colour: Callable[[str], str] = colour_key,
    whole: ComparedAmounts | None = None,
) -> Table:
    """Seconds by category, restricted to `categories` if given; `colour` maps a category to the key of its colour.

    If categories overlap in time, pass the seconds of the step as `whole`: the footer shows them instead of the sum.
    """
    predicted, measured = time_s
    # One scale for all bars of the table.
    longest = max([*predicted.values(), *measured.values()], default=0.0) or 1.0
    rows: list[list[str]] = []
    # The union of both sides, so that categories without a prediction are shown.
    for name in categories or time_categories({**measured, **predicted}):
        ink = f"--c-{colour(name)}"
        bars = (meter([(ink, each.get(name, 0.0))], longest) for each in time_s)
        rows.append([name, *_cells(time_s, name, seconds), Markup(f"<div class=pair>{''.join(bars)}</div>")])
    headings = [heading, "predicted", "measured", "error", "predicted above measured"]
    total = _total(time_s, seconds) if whole is None else _total(whole, seconds, "step")
    return Table(headings=headings, rows=rows, left=[heading, headings[-1]], total=[*total, Markup()])


def bytes_table(amounts: ComparedAmounts, heading: str) -> Table:
    # Small amounts are shown in exact bytes, so that equality is visible.
    def size(value: float) -> str:
        return f"{value:,.0f} B" if value < 1e5 else quantity(value, "B")

    predicted, measured = amounts
    names = [name for name in {**predicted, **measured} if predicted.get(name) or measured.get(name)]
    rows = [[name, *_cells(amounts, name, size)] for name in names]
    total = _total(amounts, size) if len(rows) > 1 else ()
    return Table(headings=[heading, "predicted", "measured", "error"], rows=rows, left=[heading], total=total)


def _cells(amounts: ComparedAmounts, name: str, words: Callable[[float], str]) -> list[str]:
    values = [each.get(name) for each in amounts]
    # "-" is unknown, "0" is none.
    return [*("-" if value is None else words(value) if value else "0" for value in values), _error(*values)]


def _error(expected: float | None, found: float | None) -> str:
    # No relative error without a measured amount.
    if expected is None or not found:
        return ""
    return "equal" if expected == found else f"{100 * (expected - found) / found:+.0f} %"


def _total(amounts: ComparedAmounts, words: Callable[[float], str], name: str = "all") -> list[str]:
    sums = [sum(each.values()) if each else None for each in amounts]
    return [name, *("-" if value is None else words(value) for value in sums), _error(*sums)]
