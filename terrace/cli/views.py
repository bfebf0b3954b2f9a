"""Views of a step: the sections that `terrace simulate` prints, and the files that it writes."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from terrace.base.errors import ConfigError
from terrace.cli.files import write_file
from terrace.program.schedules.csv_form import to_csv
from terrace.report import step_sections as show
from terrace.report.page import page_html
from terrace.report.sections import Section
from terrace.report.step_view import StepView
from terrace.simulate.trace import steps_trace_json
from terrace.train.config import RunConfig
from terrace.train.prediction import checked_programs

Part = Callable[[StepView], Sequence[Section]]  # of a step
_FIGURES: tuple[Part, ...] = (
    show.memory_section,
    show.bytes_section,
    show.inside_section,
    show.time_section,
    show.cycle_sections,
    show.alternatives_section,
)
_PLAN, _BLOCKS, _FITS, _ORDER = show.plan_section, show.blocks_section, show.misfit_section, show.order_section
_ENDS: tuple[Part, ...] = (show.advice_section, show.memory_over_time_section)
VIEWS: dict[str, tuple[Part, ...]] = {
    "step": (_PLAN, *_FIGURES, show.exposed_section, show.timeline_section, _FITS, *_ENDS),
    "program": (_PLAN, _BLOCKS, *_FIGURES, _FITS, _ORDER, show.program_section),
    "stages": (_PLAN, _BLOCKS, _ORDER, show.time_section, _FITS),
    "memory": (_PLAN, show.memory_section, _FITS, show.memory_over_time_section),
    "all": (_PLAN, _BLOCKS, *_FIGURES, show.exposed_section, _ORDER, _FITS, *_ENDS, show.program_section),
}
_PAGE: tuple[Part, ...] = (
    _PLAN,
    _BLOCKS,
    show.timeline_section,
    show.memory_over_time_section,
    show.cycle_sections,
    show.time_section,
    show.exposed_section,
    show.bytes_section,
    show.changes_section,
)
# Parts that need every pass of the step; the order does in a pipeline alone.
_DRAWN: tuple[Part, ...] = (show.exposed_section, _ORDER, show.timeline_section, *_ENDS)


def step_view(run: RunConfig, options: argparse.Namespace) -> StepView:
    """View of a run. Raises the `TerraceError` of a step that cannot run."""
    programs = checked_programs(run)
    # Checked here, since the number of stages comes from the programs.
    if not 0 <= options.stage < len(programs):
        last = len(programs) - 1
        held = f"stages 0 to {last}" if last else "no pipeline, so one stage: leave --stage out"
        raise ConfigError(f"--stage {options.stage}: the plan has {held}")
    return StepView(run, programs, options.stage, options.lines)


def draws(view: StepView, name: str) -> bool:
    return any(part in _DRAWN and (view.is_pipelined or part is not _ORDER) for part in VIEWS[name])


def step_page(view: StepView) -> str:
    return page_html(view.page([section for part in _PAGE for section in part(view)]))


def step_trace(view: StepView) -> str:
    recorded, plan, cluster = view.recorded, view.run.plan, view.run.cluster
    names = [f"a rank of {cluster.world_size}: plan {plan.name} on {cluster.name}"]
    if view.is_pipelined:
        names = [f"stage {stage} of plan {plan.name} on {cluster.name}" for stage in range(len(view.programs))]
    # With islands a step of the prediction is a mean of steps with and without an exchange; drawn is one without.
    step_s = recorded.step_s if view.is_pipelined else recorded.recordings[0].report.step_s
    return steps_trace_json(recorded.recordings, recorded.curves, names, step_s)


def write_csv(view: StepView, path: Path) -> str:
    """Writes the task order of a pipeline as CSV. Returns a line for the user."""
    if not view.is_pipelined:
        raise ConfigError(f"--csv {path}: the plan has no pipeline axis, so there is no order; leave --csv out")
    write_file("--csv", path, to_csv(view.orders))
    return f"wrote {path}: the order of {view.orders.num_stages} stages"
