"""The cycle of islands as a chart: a row of steps, and a row per fragment with its exchange on the link."""

import textwrap
from collections.abc import Mapping, Sequence

from terrace.base.words import seconds
from terrace.report.bars import Interval
from terrace.report.markup import ChartedSection, colour_entries, figure, html_table, legend, section
from terrace.report.svg import Row
from terrace.report.tables import bytes_words, time_categories
from terrace.report.timeline import TimelineChart
from terrace.simulate.cycle_timeline import Crossing, CycleTimeline, Stretch, in_cycle
from terrace.simulate.noting import WAIT_OUTER

_MAX_BARS = 1200
_STEPS, _FRAGMENT, _GAP, _HEADING = 30, 16, 8, 22
_SENT = "outer"  # the category of an exchange on its link

CAPTION = (
    "The first row has the steps of the cycle, the others the exchange of a fragment from its start to its arrival, "
    "grey where it is waited for. What reaches into the next cycle goes on at the left."
)

Measured = Sequence[Mapping[str, float]]  # mean seconds by category of each step of the cycle


def cycle_section(drawn: CycleTimeline, words: str, measured: Measured = ()) -> ChartedSection:
    """The chart with the lines of `words` as its caption, and a comparison table if `measured` is given."""
    chart = cycle_chart(drawn, measured)
    caption = " ".join([CAPTION, *(f"{each}." for each in words.split("\n"))])
    svg = figure(chart.svg(), legend(colour_entries(chart)), caption)
    table = _compared(drawn, measured) if measured else ""
    return ChartedSection(section("The cycle of islands", svg + table), chart.data(zooms=False))


def cycle_chart(drawn: CycleTimeline, measured: Measured = ()) -> TimelineChart:
    """The predicted rows, and below them the measured steps, if any, on the same time axis."""
    words: list[str] = []
    fragments = sorted({crossing.fragment for crossing in drawn.crossings})
    names = ["steps", *(f"fragment {fragment}" for fragment in fragments)]
    pieces = [_steps(drawn.steps, words)]
    pieces += [_crossings(drawn, fragment, words) for fragment in fragments]
    rows, headings, top = list[Row](), list[tuple[str, int]](), 0
    if measured:
        names, pieces = [*names, "steps"], [*pieces, _steps(measured, words)]
    for number, name in enumerate(names):
        if measured and name == "steps":
            headings.append(("measured in the mean" if number else "predicted", top + 15))
            top += _HEADING
        rows.append(Row(name, top, _STEPS if name == "steps" else _FRAGMENT))
        top += rows[-1].height + _GAP
    length_s = max(piece.end_s for row in pieces for piece in row)
    label, by_row = "The cycle of islands: steps, and exchanges on their link", dict(enumerate(pieces))
    return TimelineChart.joined(label, rows, by_row, length_s, words, _MAX_BARS, margin=_GAP, headings=headings)


def cycle_picture(drawn: CycleTimeline, width: int) -> str:
    """The chart as text with a legend: at most `width` characters per line, but at least 8 columns of time."""
    fragments = sorted({crossing.fragment for crossing in drawn.crossings})
    names = ["steps", *(f"fragment {fragment}" for fragment in fragments)]
    indent = 1 + max(map(len, names))
    columns = max(8, width - indent)
    column_s = drawn.cycle_s / columns
    ends = set[int]()
    if 3 * len(drawn.ends_s) <= columns:
        ends = {min(columns - 1, int(end_s / column_s)) for end_s in drawn.ends_s}
    steps = ["|" if column in ends else "-" for column in range(columns)]
    # Shorter waits are left out, since a whole column would overstate them.
    _fill(steps, [each for each in drawn.waits if each[1] - each[0] >= column_s / 2], drawn.cycle_s, "w")
    lines = [steps]
    for fragment in fragments:
        line = ["."] * columns
        own = (each for each in drawn.crossings if each.fragment == fragment)
        for crossing in own:
            for part in in_cycle(crossing.start_s, crossing.end_s, drawn.cycle_s):
                _fill(line, [part], drawn.cycle_s, "=")
                waited = [each for each in _waited(drawn, *part) if each[1] - each[0] >= column_s / 2]
                _fill(line, waited, drawn.cycle_s, "w")
        lines.append(line)
    text = [name.ljust(indent) + "".join(line) for name, line in zip(names, lines, strict=True)]
    end = ", | end of a step" if ends else ""
    key = f"= an exchange on its link, w waited for{end}; a column is {seconds(column_s)} of the cycle's"
    return "\n".join([*text, textwrap.fill(f"{key} {seconds(drawn.cycle_s)}", width)])


def _fill(line: list[str], stretches: Sequence[Stretch], cycle_s: float, mark: str) -> None:
    # Every stretch fills at least one column.
    column_s = cycle_s / len(line)
    for each in stretches:
        for start_s, end_s in in_cycle(*each, cycle_s):
            first = min(len(line) - 1, int(start_s / column_s))
            last = max(first + 1, min(len(line), round(end_s / column_s)))
            line[first:last] = mark * (last - first)


def _steps(steps: Measured, words: list[str]) -> list[Interval]:
    found, now_s = list[Interval](), 0.0
    for number, times in enumerate(steps, 1):
        # Waits for exchanges are at the end of a step.
        names = [name for name in time_categories(times) if name != WAIT_OUTER]
        for name in (*names, WAIT_OUTER):
            spent_s = times.get(name, 0.0)
            if spent_s > 0.0:
                words.append(f"step {number}: {name} {seconds(spent_s)}")
                found.append(Interval(now_s, now_s + spent_s, name, len(words) - 1))
                now_s += spent_s
    return found


def _crossings(drawn: CycleTimeline, fragment: int, words: list[str]) -> list[Interval]:
    found = []
    for crossing in drawn.crossings:
        if crossing.fragment == fragment:
            words.append(_crossing_words(crossing))
            for start_s, end_s in in_cycle(crossing.start_s, crossing.end_s, drawn.cycle_s):
                now_s = start_s
                for begin_s, stop_s in _waited(drawn, start_s, end_s):
                    found.append(Interval(now_s, begin_s, _SENT, len(words) - 1))
                    found.append(Interval(begin_s, stop_s, WAIT_OUTER, len(words) - 1))
                    now_s = stop_s
                found.append(Interval(now_s, end_s, _SENT, len(words) - 1))
    return sorted(each for each in found if each.end_s > each.start_s)


def _crossing_words(crossing: Crossing) -> str:
    sent = ", ".join(f"{bytes_words(size)} over {tier}" for tier, size in crossing.sent_bytes.items())
    return (
        f"fragment {crossing.fragment}: sent after step {crossing.sent}, {seconds(crossing.end_s - crossing.start_s)} "
        f"on its link, applied after step {crossing.applied}; a rank sends {sent}"
    )


def _waited(drawn: CycleTimeline, start_s: float, end_s: float) -> list[Stretch]:
    """The parts of a stretch of the cycle during which ranks wait for exchanges."""
    waits = [part for each in drawn.waits for part in in_cycle(*each, drawn.cycle_s)]
    both = ((max(start_s, begin_s), min(end_s, stop_s)) for begin_s, stop_s in sorted(waits))
    return [(begin_s, stop_s) for begin_s, stop_s in both if stop_s > begin_s]


def _compared(drawn: CycleTimeline, measured: Measured) -> str:
    def row(name: str, expected: float, found: float) -> list[str]:
        error = f"{100 * (expected / found - 1):+.0f} %" if found > 0.0 else ""
        return [name, seconds(expected), seconds(found), error]

    waited = [sum(times.get(WAIT_OUTER, 0.0) for times in steps) for steps in (drawn.steps, measured)]
    rows = [
        row("the cycle", drawn.cycle_s, sum(sum(times.values()) for times in measured)),
        row("of it, exchanges waited for", waited[0], waited[1]),
    ]
    return html_table(["", "predicted", "measured", "error"], rows, [""])
