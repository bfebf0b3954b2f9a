"""`terrace simulate`: simulates the programs that would run and shows a step from several sides; nothing runs."""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from terrace.base.errors import ConfigError
from terrace.base.words import filled, quantity
from terrace.cli.files import check_count, check_not_read, check_page, check_writable, write_file
from terrace.cli.options import check_task, resolve_run
from terrace.cli.overrides import take_word
from terrace.cli.sections import print_sections
from terrace.cli.task import software_words
from terrace.cluster.named_software import run_by, software_named
from terrace.plan.as_software import run_as
from terrace.plan.gaps import gaps_words
from terrace.program.schedules.csv_form import to_csv
from terrace.report import step_sections as show
from terrace.report.page import page_html
from terrace.report.sections import Section
from terrace.report.step_view import StepView
from terrace.sequence.lengths import NO_LENGTHS, read_lengths
from terrace.simulate.trace import steps_trace_json
from terrace.train.config import RunConfig
from terrace.train.prediction import check_passes, checked_programs, resolved_run

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

_SECTIONS = ("model", "cluster", "plan")  # options that may name a file
_FILES = ("page", "trace", "csv")  # options that name a file to write
_WITH_PROGRAM = ("program", "all")  # views that print a program


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the view and writes the files; returns 0."""
    plan, rest = take_word(rest)
    if plan is not None:
        if options.plan is not None:
            raise ConfigError(f"two plans are given, {plan!r} and --plan {options.plan!r}: leave one out")
        options.plan = plan
    check_count("--lines", options.lines)
    # An option without effect is an error, so that a mistyped view does not pass unnoticed.
    if options.view not in _WITH_PROGRAM:
        for name, default in (("lines", None), ("stage", 0)):
            if getattr(options, name) != default:
                raise ConfigError(f"--{name} has no effect on --view {options.view}: add --view program")
    # All outputs are checked before anything is computed.
    outputs = _outputs(options)
    check_task(options, rest)
    run = _as_software(resolve_run(options, rest), options.software)
    lengths = NO_LENGTHS if options.lengths is None else read_lengths(options.lengths, run.train.sequence)
    view = replace(step_view(resolved_run(run), options), lengths=lengths)
    # Before anything is printed.
    if outputs or draws(view, options.view):
        check_passes(view.run, "drawn (without a pipeline, --view program draws nothing)")
    written = []  # before anything is printed, so that a file that cannot be written is all there is to read
    if "csv" in outputs:
        written.append(write_csv(view, outputs["csv"]))
    if "page" in outputs:
        written.append(_write("page", outputs["page"], step_page(view)))
    if "trace" in outputs:
        written.append(_write("trace", outputs["trace"], step_trace(view)))
    print(f"{filled(view.subtitle + software_words(run.cluster))}\n")
    if lengths:
        print(f"{filled(view.lengths_words)}\n")
    if said := gaps_words(run.plan, view.run.plan):
        print(f"{filled(said)}\n")
    print_sections(section for part in VIEWS[options.view] for section in part(view))
    if written:
        print("\n".join(written))
    return 0


def _as_software(run: RunConfig, name: str) -> RunConfig:
    cluster = run_by(run.cluster, software_named(name))
    return replace(run, cluster=cluster, plan=run_as(cluster, run.plan))


def _outputs(options: argparse.Namespace) -> dict[str, Path]:
    outputs = {name: Path(getattr(options, name)) for name in _FILES if getattr(options, name) is not None}
    for name, path in outputs.items():
        if os.path.isdir(path):
            raise ConfigError(f"--{name} {str(path)!r} is a folder: name a file")
        check_writable(f"--{name}", path)
        if path.exists() and not options.force:
            raise ConfigError(f"--{name} {path} is there already: name a new file, or add --force to replace it")
        # With --force an output could otherwise overwrite the command's own input.
        check_not_read(f"--{name}", path, {each: getattr(options, each) for each in ("config", "lengths", *_SECTIONS)})
    names = list(outputs)
    for index, name in enumerate(names):
        for other in names[:index]:
            # Resolved, since two paths may name one file.
            if outputs[name].resolve() == outputs[other].resolve():
                raise ConfigError(f"--{other} and --{name} both name {outputs[other]}: name two files")
    if "page" in outputs:
        check_page("--page", outputs["page"])
    return outputs


def _write(name: str, path: Path, content: str) -> str:
    write_file(f"--{name}", path, content)
    return f"wrote {path}: {quantity(len(content.encode()), 'B')}"


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
