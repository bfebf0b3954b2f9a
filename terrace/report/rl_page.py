"""A `terrace rl` run as one self-contained HTML page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from terrace.base.words import quantity, seconds
from terrace.report.compared import ComparedAmounts, bytes_table, time_table
from terrace.report.markup import (
    MERGED,
    column,
    details,
    document,
    figures_row,
    heading,
    html_table,
    lead,
    meter,
    missing_list,
    plan_html,
    section,
    timelines,
    words_table,
)
from terrace.report.rl_samples import SamplesOfStep, samples_html
from terrace.report.rl_timeline import Iteration, call_entries, calls_chart
from terrace.report.run_curves import Curve, curve_data, curve_tiles, drawable

_UNKNOWN = ComparedAmounts({}, {})
_STEP, _REST = "step", "rest"
# Phases and stages have the colours of their calls.
_COLOURS = {
    "reshard": "hand_over",
    "generate": "generate",
    "reward": "rewards",
    "old_log_prob": "logprobs",
    "ref": "logprobs",
    "prepare": "logprobs",
    "values": "values",
    "update": "updates",
    "train": "updates",
}


@dataclass(frozen=True, kw_only=True)
class RlView:
    """Data of a run: `phases` are mean seconds by phase of steps of `step_s`, `stages` predicted and measured seconds.

    `hand_over`: bytes of one hand-over, over all ranks; `plan`: (headings, rows); `checkpoints`: (name, bytes, state).
    """

    title: str
    subtitle: str
    status: str
    figures: Sequence[tuple[str, str]] = ()
    missing: Sequence[str] = ()
    notes: Sequence[str] = ()
    curves: Sequence[Curve] = ()
    iteration: Iteration | None = None
    phases: Mapping[str, float] | None = None
    step_s: float = 0.0
    predicted_s: float = 0.0
    stages: ComparedAmounts = _UNKNOWN
    hand_over: ComparedAmounts = _UNKNOWN
    samples: Sequence[SamplesOfStep] = ()
    plan: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None
    checkpoints: Sequence[tuple[str, int, str]] = ()
    settings: str = ""


def rl_page(view: RlView, numbers: str = "") -> str:
    """The page; sections without data are left out. `numbers` is markup (terrace.report.downloads)."""
    curves = drawable(view.curves)
    timeline, charts = "", list[dict[str, object]]()
    if view.iteration is not None:
        chart = calls_chart(view.iteration)
        timeline, charts = timelines(
            chart,
            call_entries(chart),
            None,
            headings=("Timeline of one iteration", ""),
            caption=_timeline_words(view.iteration),
            merged=MERGED,
        )
    checkpoints = [(name, quantity(size, "B"), state) for name, size, state in view.checkpoints]
    sections = [
        heading(view.title, view.subtitle),
        lead([view.status, *view.notes]),
        figures_row(view.figures),
        missing_list(view.missing),
        section("Over the steps", curve_tiles(curves)),
        numbers,
        timeline,
        section("Samples", samples_html(view.samples)),
        section("Seconds of a step by phase", _phases(view)),
        section(
            "Seconds of a step by stage, predicted and measured",
            time_table(
                view.stages, "stage", list(view.stages.predicted or view.stages.measured), _colour, _whole(view)
            ),
        ),
        "<div class=columns>",
        column("Bytes of a hand-over, all ranks together", bytes_table(view.hand_over, "over")),
        column("Checkpoints", words_table(("checkpoint", "size", "state"), checkpoints)),
        "</div>",
        "" if view.plan is None else plan_html(*view.plan),
        details("Settings", view.settings),
    ]
    page = document(view.title, sections, charts, curves=[curve_data(curve) for curve in curves])
    # Prompts and folder names may contain lone surrogates, which UTF-8 cannot encode.
    return page.encode(errors="replace").decode()


def _colour(name: str) -> str:
    return _COLOURS.get(name, "other")


def _whole(view: RlView) -> ComparedAmounts:
    # Stages of different pools overlap, so a step is not their sum.
    sides = (view.predicted_s, view.step_s)
    return ComparedAmounts(*({_STEP: side} if side > 0 else {} for side in sides))


def _timeline_words(drawn: Iteration) -> str:
    words = (
        f"Step {drawn.step}, of the median length of steady steps: {seconds(drawn.step_s)}. A bar is a call of a role, "
        "from its begin on the first rank to its end on the last, by their clocks; gaps are waits for the controller "
        "or for another pool. What reaches in or out is cut."
    )
    return f"{words} {drawn.left_out} further calls of the step were not recorded." if drawn.left_out else words


def _phases(view: RlView) -> str:
    if not view.phases:
        return ""
    # Calls of different pools overlap, so phases may add up to more than the step.
    rest_s = view.step_s - sum(view.phases.values())
    rows = dict(sorted(view.phases.items(), key=lambda item: -item[1])) | ({_REST: rest_s} if rest_s > 0 else {})
    longest, whole_s = max(rows.values()) or 1.0, view.step_s or 1.0
    cells = [
        [
            name,
            seconds(spent_s),
            f"{100 * spent_s / whole_s:.1f} %",
            meter([(f"--c-{_colour(name)}", spent_s)], longest),
        ]
        for name, spent_s in rows.items()
    ]
    total = f"<tfoot><tr><td>{_STEP}</td><td>{seconds(view.step_s)}</td><td></td><td></td></tr></tfoot>"
    return html_table(["phase", "seconds", "of the step", ""], cells, ["phase", ""], total)
