"""Samples of a `terrace rl` run, one table per step, from its `samples.jsonl`. All text is escaped."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from terrace.base.fitting import MaybeNaN, fitting
from terrace.base.printable import escape
from terrace.report.markup import html_table
from terrace.report.table import Markup, Table

_MOST_STEPS, _MOST_ROWS = 40, 40  # steps per page, rows per step; runs write fewer rows
_TITLES = {
    "drawn": "Drawn responses that the step learned from",
    "held out": "Likeliest responses to held-out prompts, after the step",
}


@dataclass(frozen=True, kw_only=True)
class ReadSample:
    """A response as recorded by the run (`terrace.rl.samples.ShownSample`)."""

    kind: str
    prompt: str
    response: str
    finish: str
    reward: MaybeNaN
    parts: dict[str, MaybeNaN] = field(default_factory=dict)
    cost: MaybeNaN | None = None
    advantage: MaybeNaN | None = None
    turns: list[list[str]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class SamplesOfStep:
    """A line of `samples.jsonl`; step 0 is the start."""

    step: int
    samples: Sequence[ReadSample]


def samples_of(line: Mapping[str, Any]) -> SamplesOfStep:
    """Parse a line; raises `ValueError` if it has no samples."""
    step, samples = line.get("step"), line.get("samples")
    if type(step) is not int or not isinstance(samples, list) or not all(isinstance(each, dict) for each in samples):
        raise ValueError("not the samples of a step")
    return SamplesOfStep(step=step, samples=[fitting(ReadSample, each) for each in samples])


def samples_html(steps: Sequence[SamplesOfStep]) -> str:
    """One table per step, with the newest shown and controls to select another; empty without samples."""
    shown = _spread([step for step in steps if step.samples])
    if not shown:
        return ""
    options = "".join(
        f'<option value="{step.step}"{" selected" * (step is shown[-1])}>{_name(step)}</option>' for step in shown
    )
    choice = (
        f"<div class=picks><button data-pick=-1>Earlier</button><select aria-label=step>{options}</select>"
        "<button data-pick=1>Later</button></div>"
    )
    tables = "".join(
        f'<details class=step data-step="{step.step}"{" open" * (step is shown[-1])}>'
        f"<summary>{_name(step)}</summary>{_tables(step)}</details>"
        for step in shown
    )
    left = len(steps) - len(shown)
    words = "The first responses of a step, not chosen by their rewards; long texts are cut in the middle."
    words += f" {left} further steps are in samples.jsonl." if left else ""
    return f"<p class=quiet>{escape(words)}</p>{choice}{tables}"


def _name(step: SamplesOfStep) -> str:
    return f"step {step.step}" if step.step else "before step 1"


def _spread(steps: Sequence[SamplesOfStep]) -> list[SamplesOfStep]:
    """At most `_MOST_STEPS` evenly spaced steps, including the first and the last."""
    if len(steps) <= _MOST_STEPS:
        return list(steps)
    return [steps[round(at * (len(steps) - 1) / (_MOST_STEPS - 1))] for at in range(_MOST_STEPS)]


def _tables(step: SamplesOfStep) -> str:
    kinds = dict.fromkeys(sample.kind for sample in step.samples)
    return "".join(
        f"<h3>{escape(_TITLES.get(kind, kind))}</h3>"
        + _table([sample for sample in step.samples if sample.kind == kind][:_MOST_ROWS])
        for kind in kinds
    )


def _table(samples: Sequence[ReadSample]) -> str:
    parts = list(dict.fromkeys(name for sample in samples for name in sample.parts))
    # Columns that no sample has are left out.
    extra = [name for name in ("cost", "advantage") if any(getattr(sample, name) is not None for sample in samples)]
    rows = [
        [
            _text(sample.prompt),
            _response(sample),
            sample.finish,
            _number(sample.reward),
            *(_number(sample.parts.get(name)) for name in parts),
            *(_number(getattr(sample, name)) for name in extra),
        ]
        for sample in samples
    ]
    left = ["prompt", "response", "finish"]
    return html_table(Table(headings=[*left, "reward", *map(_breaking, parts), *extra], rows=rows, left=left))


def _breaking(name: str) -> Markup:
    # Number columns are as wide as their headings, so allow breaks of long names at punctuation.
    return Markup(re.sub("([.:/_])", r"\1<wbr>", escape(name)))


def _response(sample: ReadSample) -> Markup:
    """The response, turn by turn where an environment answered."""
    if not sample.turns:
        return _text(sample.response)
    said = (": ".join(each) for each in sample.turns)
    return Markup("".join(f"<div class=text>{escape(text)}</div>" for text in said))


def _text(text: str) -> Markup:
    return Markup(f"<div class=text>{escape(text)}</div>")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
