"""Views of a step: sections that `terrace simulate` prints, and files that it writes."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from terrace.base.errors import ConfigError
from terrace.base.words import counted, quantity, seconds
from terrace.cli.files import write_file
from terrace.cli.terminal import Terminal
from terrace.model.facts import family_of
from terrace.plan.context import is_context_parallel
from terrace.plan.few_exchanges import few_exchanges
from terrace.planner.verdicts import lack_words
from terrace.program.program import Program
from terrace.program.schedules.csv_form import to_csv
from terrace.program.schedules.orders import Orders
from terrace.program.stages import plan_orders
from terrace.program.text import program_text
from terrace.report.advice import advice_words, timeline_text
from terrace.report.cycle_chart import cycle_picture, cycle_section
from terrace.report.cycles import cycle_table, cycle_words
from terrace.report.inside import ASSIGNED, attention_table, inside_table
from terrace.report.markup import ChartedSection
from terrace.report.page import page_html
from terrace.report.plans import hidden_words
from terrace.report.routing import alternatives_words, division_words, mean_words, routed_table
from terrace.report.stage_tables import (
    order_text,
    parts_words,
    stage_bytes_tables,
    stage_memory_table,
    stage_time_table,
    stages_table,
)
from terrace.report.stages import exposed_table, path_sentence, played_words, stages_page
from terrace.report.tables import bytes_table, memory_table, model_size, plan_table, time_table, wire_words
from terrace.report.uncertainty import filled, predicted_words
from terrace.simulate.advice import Job, fullest_stage
from terrace.simulate.bands import Band, band_of
from terrace.simulate.change import Change
from terrace.simulate.critical import critical_words
from terrace.simulate.cycle_timeline import cycle_timeline
from terrace.simulate.hidden import hidden_between_nodes
from terrace.simulate.hiding_cycle import hiding
from terrace.simulate.recorded import RecordedStep, record_predicted
from terrace.simulate.small_changes import best_changes, changes
from terrace.simulate.step import Prediction, predict_step
from terrace.simulate.timeline_picture import memory_picture, passes_picture
from terrace.simulate.trace import stages_trace_json, trace_json
from terrace.simulate.worst_load import worst_words
from terrace.train.config import RunConfig
from terrace.train.prediction import checked_programs, kept_activations, step_of


@dataclass(frozen=True)
class StepView:
    """A step of a run with a fully resolved plan, ready to print and write.

    Computes only what a view needs: `program` predicts, `step` also records and tries changes.
    """

    run: RunConfig
    programs: Sequence[Program]
    stage: int = 0  # the one with its program printed
    lines: int | None = None  # of it, at most

    @staticmethod
    def of(run: RunConfig, options: argparse.Namespace) -> "StepView":
        """View of a run. Raises the `TerraceError` of a step that cannot run."""
        programs = checked_programs(run)
        # Checked here, since the number of stages comes from the programs.
        if not 0 <= options.stage < len(programs):
            last = len(programs) - 1
            held = f"stages 0 to {last}" if last else "no pipeline, so one stage: leave --stage out"
            raise ConfigError(f"--stage {options.stage}: the plan has {held}")
        return StepView(run, programs, options.stage, options.lines)

    @cached_property
    def console(self) -> Terminal:
        return Terminal()

    @cached_property
    def predicted(self) -> Prediction:
        return predict_step(step_of(self.run), self.programs)

    @cached_property
    def recorded(self) -> RecordedStep:
        """The predicted step, with a recording of each stage."""
        return record_predicted(self.predicted)

    @cached_property
    def candidates(self) -> list[Change]:
        """Single changes of the plan, shortest step first."""
        return changes(step_of(self.run), base=self.predicted)

    @property
    def band(self) -> Band:
        return band_of(self.run.cluster, self.run.plan)

    @property
    def is_pipelined(self) -> bool:
        return len(self.programs) > 1

    @cached_property
    def orders(self) -> Orders:
        run = self.run
        return plan_orders(run.plan, run.blocks(), len(self.programs), run.num_micros(), run.train.sequence)

    def draws(self, section: "Section") -> bool:
        """Whether a section of this view needs every pass of the step."""
        return section in _DRAWN and (self.is_pipelined or section is not show_order)

    @property
    def subtitle(self) -> str:
        """Model and batch in one line."""
        size = model_size(self.run.model)
        return f"{family_of(self.run.model)} decoder, {size}; a step of {step_words(self.run)}"

    @cached_property
    def misfit(self) -> str:
        """A line on the memory that a rank lacks under the plan; "" if it fits."""
        run = self.run
        job, device = Job(cluster=run.cluster, plan=run.plan, num_micros=run.num_micros()), run.cluster.device
        stage, memory = fullest_stage(job, run.blocks(), run.train.sequence)
        if sum(memory.values()) <= device.usable_bytes:
            return ""
        of_stage = f" on stage {stage}" if self.is_pipelined else ""
        return f"This plan does not fit{of_stage}: {lack_words(device, memory)}."

    @cached_property
    def hidden(self) -> str:
        """A line on messages between nodes that the step relies on hiding; "" if there are none."""
        return hidden_words(hidden_between_nodes(self.predicted, self.recorded.recordings))

    @cached_property
    def advice(self) -> str:
        # A page shows all candidates, and is written first.
        found = vars(self).get("candidates") or best_changes(step_of(self.run), self.predicted)
        return advice_words(found, self.recorded.step_s, self.band)

    def page(self) -> str:
        """HTML page of the step."""
        recorded, found, title = self.recorded, self.candidates, self.subtitle
        advice = " ".join(filter(None, (self.misfit, self.hidden and f"{self.hidden}.", self.advice)))
        if self.predicted.cycle is not None:
            mean = f"the mean of a cycle is {seconds(self.predicted.step_s)}"
            title += f"; drawn without the exchanges of islands, {mean}"
        if self.is_pipelined:
            # One rank represents the step, and stages send different amounts.
            sent = max(self.predicted.expected_bytes, key=lambda each: sum(each.values()))
            return stages_page(recorded, sent, found, subtitle=title, advice=advice, cycle=self._cycle)
        recording, curve = recorded.recordings[0], recorded.curves[0]
        return page_html(recording, curve, recorded.path, found, subtitle=title, advice=advice, cycle=self._cycle)

    @property
    def _cycle(self) -> ChartedSection | None:
        cycle = self.predicted.cycle
        if cycle is None:
            return None
        return cycle_section(cycle_timeline(cycle), cycle_words(cycle, hiding(self.predicted)))

    def trace(self) -> str:
        """Trace of the step as JSON."""
        recorded = self.recorded
        if not self.is_pipelined:
            return trace_json(recorded.recordings[0], recorded.curves[0])
        name = f"plan {self.run.plan.name} on {self.run.cluster.name}"
        return stages_trace_json(recorded.recordings, recorded.curves, name=name, step_s=recorded.step_s)

    def csv(self, path: Path) -> str:
        """Writes the task order of a pipeline as CSV. Returns a line for the user."""
        if not self.is_pipelined:
            raise ConfigError(f"--csv {path}: the plan has no pipeline axis, so there is no order; leave --csv out")
        write_file("--csv", path, to_csv(self.orders))
        return f"wrote {path}: the order of {self.orders.num_stages} stages"


def step_words(run: RunConfig) -> str:
    """Batch and micro-batches of a step."""
    return (
        f"{run.batch_words} x {counted(run.train.sequence, 'token')}, "
        f"{counted(run.num_micros(), 'micro-batch')} of {run.plan.micro_batch} per rank"
        f"{f', in units of {run.plan.unit}' if run.plan.unit > 1 else ''}"
    )


def _paragraph(text: str) -> None:
    """Prints a text and an empty line, unless the text is empty."""
    if text:
        print(f"{filled(text)}\n")


def show_plan(view: StepView) -> None:
    """Axes and placements."""
    view.console.print(plan_table(view.run.cluster, view.run.plan))
    _paragraph(division_words(view.run.plan))


def show_alternatives(view: StepView) -> None:
    """Predicted steps of other divisions of stacks."""
    _paragraph(alternatives_words(view.predicted))


def show_blocks(view: StepView) -> None:
    if view.is_pipelined:
        view.console.print(stages_table(view.programs, view.run.blocks()))
        print(f"{filled(parts_words(view.programs, view.run.blocks()))}\n")


def show_memory(view: StepView) -> None:
    """Memory of a rank, for each stage."""
    room = view.run.cluster.device.room_words
    held = [report.memory_bytes for report in view.predicted.reports]
    if view.is_pipelined:
        kept = [kept_activations(view.run, program) for program in view.programs]
        view.console.print(stage_memory_table(held, kept, room))
    else:
        view.console.print(memory_table(held[0], room))
    run = view.run
    job = Job(cluster=run.cluster, plan=run.plan, num_micros=run.num_micros())
    _paragraph(worst_words(job, run.blocks(), run.train.sequence))


def show_bytes(view: StepView) -> None:
    """Bytes sent by a rank, for each stage."""
    tiers, sent = view.programs[0].layout.tiers, view.predicted.expected_bytes
    for table in stage_bytes_tables(sent, tiers) if view.is_pipelined else [bytes_table(sent[0], tiers)]:
        view.console.print(table)
    if mean := mean_words(view.programs[0]):
        print(f"{mean}\n")
    _paragraph(wire_words(view.programs[0].plan))
    _paragraph(few_exchanges(view.run.cluster, view.run.plan, view.run.train.steps))


def show_inside(view: StepView) -> None:
    """Messages inside blocks."""
    program = view.programs[view.stage]
    if program.model.tensor.degree > 1:
        view.console.print(inside_table(program))
    if is_context_parallel(program.mesh, program.plan):
        # These messages depend on the documents of each batch, so the plan alone does not determine them.
        if program.plan.balance == "cost":
            print(f"{filled(ASSIGNED)}\n")
        else:
            view.console.print(attention_table(program))
    routed = routed_table(program)
    if routed.row_count:
        view.console.print(routed)


def show_time(view: StepView) -> None:
    """Seconds by category, for each stage."""
    reports = view.predicted.reports
    view.console.print(stage_time_table(reports) if view.is_pipelined else time_table(reports[0]))
    print(f"{predicted_words(view.predicted.step_s, view.band)}\n")


def show_cycle(view: StepView) -> None:
    """The steps of a cycle of islands, and how much of their exchanges is hidden."""
    cycle = view.predicted.cycle
    if cycle is not None:
        view.console.print(cycle_table(cycle))
        print(f"{cycle_picture(cycle_timeline(cycle), view.console.width)}\n")
        print(f"{filled(cycle_words(cycle, hiding(view.predicted)))}\n")


def show_exposed(view: StepView) -> None:
    """Messages that nothing hides."""
    exposed, tiers = view.recorded.exposed_s, view.programs[0].layout.tiers
    which = f"stage {view.predicted.busiest}, the busiest" if view.is_pipelined else "no pipeline, so no bubble"
    if exposed:
        title = f"messages that nothing hides ({which})"
        view.console.print(exposed_table(exposed, tiers, view.recorded.step_s, title))
    if view.hidden:
        print(f"{filled(view.hidden)}\n")


def show_order(view: StepView) -> None:
    """The task order of each stage, as a list and over time."""
    if not view.is_pipelined:
        return
    view.console.print(f"schedule {view.orders.schedule}: the tasks of every stage in order", style="bold")
    print("a cell: virtual stage, F forward, B backward or its halves I input and W weight, micro-batch")
    print(f"{order_text(view.orders, view.console.width)}\n")
    show_stages_over_time(view)


def show_stages_over_time(view: StepView) -> None:
    stages, recorded = [program.stage for program in view.programs], view.recorded
    view.console.print("the same over time, as the programs play it: stages down, time across", style="bold")
    print(f"{passes_picture(stages, recorded.passes, recorded.end_s, view.console.width)}\n")


def show_timeline(view: StepView) -> None:
    if view.is_pipelined:
        show_stages_over_time(view)
    else:
        view.console.print("a steady step of one rank", style="bold")
        print(f"{timeline_text(view.recorded.recordings[0], view.console.width)}\n")


def show_memory_over_time(view: StepView) -> None:
    """Memory over the step, and its peak."""
    curves = view.recorded.curves
    size, moment_s = curves[view.recorded.fullest].peak
    if view.is_pipelined:
        highest = quantity(size, "B")
        view.console.print(f"memory meanwhile, 9 standing for more than nine tenths of {highest}", style="bold")
        print(f"{memory_picture(curves, view.recorded.end_s, view.console.width)}\n")
    of_stage = f" (stage {view.recorded.fullest})" if view.is_pipelined else ""
    words = (
        f"over the step, memory is highest at {seconds(moment_s)}{of_stage}: {quantity(size, 'B')} with activations, "
        "without the device's context and what its allocator loses, which terrace plan adds"
    )
    print(filled(words))


def show_misfit(view: StepView) -> None:
    """The memory that a rank lacks, if any."""
    if view.misfit:
        print(f"{filled(view.misfit)}\n")


def show_advice(view: StepView) -> None:
    """The critical path and the best next change."""
    if not view.is_pipelined:
        print(filled(f"{critical_words(view.recorded.path)}\n{view.advice}") + "\n")
        return
    predicted = view.predicted
    print(f"step {seconds(predicted.step_s)} {view.band}; bubble {100 * predicted.bubble:.1f} % of the stages' time")
    print(filled(f"{path_sentence(view.recorded)}\n{view.advice}\n{played_words(view.recorded)}") + "\n")


def show_program(view: StepView) -> None:
    program, num_micros = view.programs[view.stage], view.run.num_micros()
    whose = f"every rank of stage {view.stage}" if view.is_pipelined else "every rank"
    view.console.print(f"program of {whose}, {counted(num_micros, 'micro-batch')}:", style="bold")
    print(program_text(program, max_lines=view.lines))
    print(f"\nverified: {len(program.instructions)} instructions keep every rule of the instruction set")


Section = Callable[[StepView], None]
_DRAWN: tuple[Section, ...] = (show_exposed, show_order, show_timeline, show_advice, show_memory_over_time)
_FIGURES: tuple[Section, ...] = (show_memory, show_bytes, show_inside, show_time, show_cycle, show_alternatives)
VIEWS: dict[str, tuple[Section, ...]] = {
    "step": (show_plan, *_FIGURES, show_exposed, show_timeline, show_misfit, show_advice, show_memory_over_time),
    "program": (show_plan, show_blocks, *_FIGURES, show_misfit, show_order, show_program),
    "stages": (show_plan, show_blocks, show_order, show_time, show_misfit),
    "memory": (show_plan, show_memory, show_misfit, show_memory_over_time),
    "all": (
        show_plan,
        show_blocks,
        *_FIGURES,
        show_exposed,
        show_order,
        show_misfit,
        show_advice,
        show_memory_over_time,
        show_program,
    ),
}
