"""A run as one self-contained HTML page, also for a run that did not finish: no network, no external files.

The data comes as plain values (`RunView`); missing parts are named on the page. Text from files is escaped, in the
markup and in the script's data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from terrace.report.markup import Markup, document, html_table, legend, meter, prose, tools
from terrace.report.palette import colour_key
from terrace.report.run_curves import COLOURS, Curve, curve_data, curve_svg, finite
from terrace.report.run_timeline import StepPicture
from terrace.report.svg import GUTTER, PLOT
from terrace.report.tables import quantity, seconds, time_categories

Amounts = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class RunView:
    """Data of a run. Mappings of amounts are of rank 0's step: `predicted_*` and `measured_*` by category.

    `plan`: (headings, rows) of the plan's table; `events`: (when, event, details); `checkpoints`: (name, bytes, state);
    `resumed`: steps after which the run resumed; `picture_words`: caption of the timeline.
    """

    title: str
    subtitle: str
    status: str
    figures: Sequence[tuple[str, str]] = ()
    missing: Sequence[str] = ()
    notes: Sequence[str] = ()
    curves: Sequence[Curve] = ()
    resumed: Sequence[int] = ()
    plan: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None
    predicted_time_s: Amounts = field(default_factory=dict)
    measured_time_s: Amounts = field(default_factory=dict)
    predicted_sent: Amounts = field(default_factory=dict)
    measured_sent: Amounts = field(default_factory=dict)
    predicted_memory: Amounts = field(default_factory=dict)
    measured_memory: Amounts = field(default_factory=dict)
    peak_memory: Amounts = field(default_factory=dict)
    picture: StepPicture | None = None
    picture_words: str = ""
    events: Sequence[tuple[str, str, str]] = ()
    checkpoints: Sequence[tuple[str, int, str]] = ()
    settings: str = ""
    sample: str = ""


def run_page(view: RunView) -> str:
    # A curve without a finite point has no scale.
    drawn = [curve for curve in view.curves if any(finite(points) for points in curve.lines.values())]
    # Empty sections return "" and leave no heading behind.
    sections = [
        f"<h1>{escape(view.title)}</h1><p class=quiet>{escape(view.subtitle)}</p>",
        f"<div class=lead><p>{prose(view.status)}</p>{''.join(f'<p>{prose(note)}</p>' for note in view.notes)}</div>",
        _figures(view),
        _missing(view),
        "<h2>Over the steps</h2>" if drawn else "",
        f"<div class=tiles>{''.join(_curve(curve, view.resumed) for curve in drawn)}</div>" if drawn else "",
        _timeline(view),
        _section("Where the time of a step goes", _time_table(view)),
        "<div class=columns>",
        _column("Bytes rank 0 sends in a step", _amounts_table(view.predicted_sent, view.measured_sent, "tier")),
        _column("Model state on rank 0 at its peak", _memory(view)),
        "</div>",
        _section("Tiers, axes and placements", _plan(view)),
        "<div class=columns>",
        _column("What happened", _table(("when (UTC)", "what", "details"), view.events)),
        _column("Checkpoints", _checkpoints(view)),
        "</div>",
        _details("Settings", view.settings),
        _details("The model continues the prompt", view.sample),
    ]
    # Curves have data of their own; a chart is a timeline.
    charts = [] if view.picture is None else [view.picture.data]
    data = {"gutter": GUTTER, "plot": PLOT, "charts": charts, "curves": [curve_data(curve) for curve in drawn]}
    return document(view.title, "\n".join(sections), data)


def _figures(view: RunView) -> str:
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(words)}</span></div>" for value, words in view.figures)
    return f"<div class=figures>{cells}</div>" if cells else ""


def _missing(view: RunView) -> str:
    if not view.missing:
        return ""
    items = "".join(f"<li>{prose(words)}</li>" for words in view.missing)
    return f"<h2>What is missing</h2><ul class=missing>{items}</ul>"


def _curve(curve: Curve, resumed: Sequence[int]) -> str:
    names = list(curve.lines)
    key = legend([(name, COLOURS[index % len(COLOURS)], "") for index, name in enumerate(names)]) if names[1:] else ""
    unit = f" <span class=quiet>{escape(curve.unit)}</span>" if curve.unit else ""
    return f"<figure><h3>{escape(curve.title)}{unit}</h3>{curve_svg(curve, resumed)}{key}</figure>"


def _timeline(view: RunView) -> str:
    if view.picture is None:
        return ""
    words = view.picture_words
    if view.picture.least_s:
        words += (
            f" Spans shorter than {seconds(view.picture.least_s)} that lie close are drawn as one bar, its height "
            "shared out by category."
        )
    return (
        f"<h2>Timeline of a step</h2>{tools()}"
        f"<figure><div class=scroll>{view.picture.svg}</div>"
        f"{legend([(name, f'--c-{name}', '') for name in view.picture.keys])}"
        f"<figcaption>{prose(words)}</figcaption></figure>"
    )


def _time_table(view: RunView) -> str:
    predicted, measured = view.predicted_time_s, view.measured_time_s
    if not predicted and not measured:
        return ""
    # One scale for all bars of the table.
    longest = max([*predicted.values(), *measured.values()], default=0.0) or 1.0
    rows: list[list[str]] = []
    # Categories of either side, so that one missing in the prediction is still shown.
    for name in time_categories({**measured, **predicted}):
        bars = _pair(f"--c-{colour_key(name)}", predicted.get(name, 0.0), measured.get(name, 0.0), longest)
        rows.append([name, *_three(predicted, measured, name, seconds), bars])
    total = _total(predicted, measured, seconds)
    headings = ["category", "predicted", "measured", "error", "predicted above measured"]
    return html_table(headings, rows, ["category", "predicted above measured"], total)


def _amounts_table(predicted: Amounts, measured: Amounts, heading: str) -> str:
    if not predicted and not measured:
        return ""

    # Small amounts are exact bytes, so that equality can be seen.
    def size(value: float) -> str:
        return f"{value:,.0f} B" if value < 1e5 else quantity(value, "B")

    names = [name for name in {**predicted, **measured} if predicted.get(name) or measured.get(name)]
    rows = [[name, *_three(predicted, measured, name, size)] for name in names]
    return html_table([heading, "predicted", "measured", "error"], rows, [heading], _total(predicted, measured, size))


def _three(predicted: Amounts, measured: Amounts, name: str, words: object) -> list[str]:
    assert callable(words), "a function of a number"
    expected, found = predicted.get(name), measured.get(name)
    # "-" is unknown, "0" is none.
    cells = ["-" if value is None else words(value) if value else "0" for value in (expected, found)]
    return [*cells, _error(expected, found)]


def _error(expected: float | None, found: float | None) -> str:
    # No relative error without a measured amount.
    if expected is None or not found:
        return ""
    return "equal" if expected == found else f"{100 * (expected - found) / found:+.0f} %"


def _total(predicted: Amounts, measured: Amounts, words: object) -> str:
    assert callable(words), "a function of a number"
    sums = [sum(each.values()) if each else None for each in (predicted, measured)]
    cells = "".join(f"<td>{'-' if value is None else escape(words(value))}</td>" for value in sums)
    return f"<tfoot><tr><td>all</td>{cells}<td>{_error(*sums)}</td></tr></tfoot>"


def _pair(colour: str, expected: float, found: float, longest: float) -> Markup:
    # Predicted above measured.
    return Markup(f"<div class=pair>{meter([(colour, expected)], longest)}{meter([(colour, found)], longest)}</div>")


def _memory(view: RunView) -> str:
    table = _amounts_table(view.predicted_memory, view.measured_memory, "category")
    named = ", ".join(f"{name} {quantity(size, 'B')}" for name, size in view.peak_memory.items())
    return f"{table}<p class=quiet>of the process or device at most: {escape(named)}</p>" if named else table


def _plan(view: RunView) -> str:
    if view.plan is None:
        return ""
    headings, rows = view.plan
    return html_table(headings, rows, left=("tier", "states placed here"))


def _checkpoints(view: RunView) -> str:
    rows = [(name, quantity(size, "B"), state) for name, size, state in view.checkpoints]
    return _table(("checkpoint", "size", "state"), rows)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return html_table(headings, rows, [each for each in headings if each != "size"]) if rows else ""


def _section(title: str, body: str) -> str:
    return f"<h2>{title}</h2>{body}" if body else ""


def _column(title: str, body: str) -> str:
    return f"<div>{_section(title, body)}</div>" if body else ""


def _details(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>" if text else ""
