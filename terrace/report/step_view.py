"""A step of a run with a fully resolved plan, ready to be shown; each part is computed where it is first needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from terrace.base.words import counted, quantity, seconds
from terrace.cluster.cluster import Cluster
from terrace.model.facts import family_of
from terrace.plan.members import shares_words
from terrace.planner.advice import Change, best_change, best_changes, changes, hiding
from terrace.planner.verdicts import lack_words
from terrace.program.program import Program
from terrace.program.schedules.orders import Orders
from terrace.program.stages import plan_orders
from terrace.report.plans import hidden_words
from terrace.report.sections import Page, Section
from terrace.report.tables import model_size, plan_title
from terrace.sequence.lengths import NO_LENGTHS, Lengths
from terrace.simulate.bands import Band, band_of
from terrace.simulate.critical import critical_words, path_words
from terrace.simulate.fullest import Job, fullest_stage
from terrace.simulate.hidden import hidden_between_nodes
from terrace.simulate.masks import core_shares, work_in
from terrace.simulate.recorded import RecordedStep, record_predicted
from terrace.simulate.step import Prediction, Step, idle_s, predict_step
from terrace.simulate.work import Work
from terrace.train.config import RunConfig
from terrace.train.prediction import job_of, step_of


@dataclass(frozen=True)
class StepView:
    """Computes only what is shown: `predicted` predicts, `recorded` also records, `candidates` try changes."""

    run: RunConfig
    programs: Sequence[Program]
    stage: int = 0  # the one with its program printed
    lines: int | None = None  # of it, at most
    lengths: Lengths = NO_LENGTHS  # of the documents

    @cached_property
    def step(self) -> Step:
        return step_of(self.run, lengths=self.lengths)

    @cached_property
    def predicted(self) -> Prediction:
        return predict_step(self.step, self.programs)

    @cached_property
    def recorded(self) -> RecordedStep:
        return record_predicted(self.predicted)

    @cached_property
    def candidates(self) -> list[Change]:
        """Single changes of the plan, shortest step first."""
        return changes(self.step, base=self.predicted)

    @cached_property
    def hiding(self) -> Change | None:
        """The nearest cycle that hides the exchanges of islands."""
        return hiding(self.predicted)

    @property
    def band(self) -> Band:
        return band_of(self.run.cluster, self.run.plan)

    @property
    def is_pipelined(self) -> bool:
        return len(self.programs) > 1

    @property
    def job(self) -> Job:
        return job_of(self.run)

    @cached_property
    def orders(self) -> Orders:
        run = self.run
        return plan_orders(run.plan, run.blocks(), len(self.programs), run.num_micros(), run.train.sequence)

    @property
    def subtitle(self) -> str:
        """Model and batch in one line."""
        size = model_size(self.run.model)
        return f"{family_of(self.run.model)} decoder, {size}; a step of {step_words(self.run)}"

    @property
    def lengths_words(self) -> str:
        """What documents leave of whole rows' attention, on the slowest rank and in the mean; "" without lengths."""
        work, device, lengths = self.step.work, self.run.cluster.device, self.lengths
        if not lengths or not isinstance(work, Work):
            return ""
        attends = next((each for each in self.step.blocks if each.attends and not each.operations.delta.heads), None)
        if attends is None:
            return f"Documents of {lengths.name} change nothing: all layers are linear, so no attention is priced."
        shares = core_shares(device, work_in(work, attends, device.type))
        meets = "step" if work.balance == "tokens" and work.ragged.together > 1 else "micro-batch"
        return (
            f"Documents of {lengths.name} ({counted(len(lengths.documents), 'length', ',')}), each attended to by "
            f"itself: attention computes {100 * shares.slowest:.3g} % of whole rows' on the slowest rank, "
            f"{100 * shares.mean:.3g} % in the mean; from {meets} to {meets} the slowest varies by "
            f"{100 * shares.spread:.2g} % (standard deviation)."
        )

    @cached_property
    def misfit(self) -> str:
        """A line on the memory that a rank lacks under the plan; "" if it fits."""
        run, device = self.run, self.run.cluster.device
        stage, memory = fullest_stage(self.job, run.blocks(), run.train.sequence)
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
        found = vars(self).get("candidates") or best_changes(self.step, self.predicted)
        return advice_words(found, self.recorded.step_s, self.band)

    @cached_property
    def path_words(self) -> str:
        """The critical path in words, what it leaves out, and of a pipeline how long stages wait for other stages."""
        recorded, before = self.recorded, _beside_words(self.recorded.prediction)
        if not self.is_pipelined:
            return f"{critical_words(recorded.path)}{before}"
        path, reports = recorded.path, recorded.prediction.reports
        idle = [idle_s(report) / (report.step_s or 1.0) for report in reports]
        # The busiest stage is the one that waits least for others.
        most, least = max(range(len(idle)), key=idle.__getitem__), recorded.prediction.busiest
        return (
            f"{path_words(path.seconds, path.step_s)}. Stages wait for other stages for "
            f"{100 * recorded.prediction.bubble:.1f} % of the step in the mean, stage {most} most "
            f"({100 * idle[most]:.1f} %), stage {least} least ({100 * idle[least]:.1f} %).{before}"
        )

    @property
    def played_words(self) -> str:
        predicted, micros = self.predicted, self.run.num_micros()
        if not self.is_pipelined:
            count = len(self.programs[0].instructions)
            return f"Predicted by playing the {count:,} instructions of a rank on the cluster's figures."
        words = f"Played are the programs of all {len(self.programs)} stages, as they run"
        # Long steps are simulated in part and extrapolated linearly.
        if predicted.is_whole:
            return f"{words}."
        return (
            f"{words}, with up to {predicted.played_micros} of the {micros} micro-batches; each further one adds the "
            "same. The timeline shows all of them, and may end some thousandths earlier or later."
        )

    def page(self, sections: Sequence[Section]) -> Page:
        """The page of the step, with its key figures above `sections`."""
        predicted, subtitle = self.predicted, self.subtitle
        if predicted.cycle is not None:
            mean = f"the mean of a cycle is {seconds(predicted.step_s)}"
            subtitle += f"; drawn without the exchanges of islands, {mean}"
        hidden = f"{self.hidden}." if self.hidden else ""
        foot = Section(words=[f"{self.played_words} {sources_words(self.run.cluster)}"])
        return Page(
            title=plan_title(self.run.cluster, self.run.plan),
            subtitle=subtitle,
            figures=self._figures(),
            lead=[self.path_words, " ".join(filter(None, (self.misfit, hidden, self.advice)))],
            sections=[*sections, foot],
        )

    def _figures(self) -> list[tuple[str, str]]:
        recorded, room = self.recorded, self.run.cluster.device.room_words
        peak = quantity(recorded.curves[recorded.fullest].peak[0], "B")
        step = (seconds(recorded.step_s), f"step, {self.band}")
        if self.is_pipelined:
            exposed = 100 * sum(recorded.exposed_s.values()) / recorded.step_s
            return [
                step,
                (f"{100 * recorded.prediction.bubble:.1f} %", "of the stages' time idle (bubble)"),
                (f"{exposed:.1f} %", "messages that nothing hides, busiest stage"),
                (peak, f"on stage {recorded.fullest} at most, of {room}"),
            ]
        # Only waits on the critical path count: others are hidden.
        waits = round(100 * recorded.path.waits_s / (recorded.step_s or 1.0))
        sent = sum(self.predicted.reports[0].sent_bytes.values())
        return [
            step,
            (f"{waits} %", "of it waiting for messages"),
            (peak, f"memory at its peak, of {room}"),
            (quantity(sent, "B"), "sent by a rank"),
        ]


def advice_words(candidates: Sequence[Change], step_s: float, band: Band) -> str:
    """The best change of the plan and of the cluster, each with its step time and the prediction's error band."""
    found = {kind: best_change(candidates, step_s, kind) for kind in ("plan", "cluster")}
    if not any(found.values()):
        return "No change of one thing makes it shorter."
    # The change with the shorter step comes first.
    parts = []
    for kind, best in sorted(found.items(), key=lambda item: item[1].step_s if item[1] else float("inf")):
        if best is not None:
            change = 100 * (best.step_s / step_s - 1)
            gain = f"{seconds(best.step_s)} {band}, {change:.{0 if change <= -1 else 1}f} %"
            note = f"; {best.note}" if best.note else ""
            parts.append(f"in the {kind}, {best.words} (step {gain}{note})")
    return f"Best next change: {'; '.join(parts)}."


def step_words(run: RunConfig) -> str:
    shares = run.plan.shares
    micros = counted(run.num_micros(), "micro-batch") if not shares else f"{shares_words(shares)} micro-batches"
    return (
        f"{run.batch_words} x {counted(run.train.sequence, 'token')}, "
        f"{micros} of {run.plan.micro_batch} per rank{' of each member' if shares else ''}"
        f"{f', in units of {run.plan.unit}' if run.plan.unit > 1 else ''}"
    )


def sources_words(cluster: Cluster) -> str:
    named = {cluster.device.name: cluster.device.source, **{tier.name: tier.source for tier in cluster.tiers}}
    known = "; ".join(f"{name}: {source}" for name, source in named.items() if source)
    return f"Sources: {known}." if known else ""


def _beside_words(prediction: Prediction) -> str:
    """A sentence on what runs before the step, which recordings leave out; "" for nothing."""
    if not prediction.step.beside:
        return ""
    beside_s = max(sum(each.time_s.values()) for each in prediction.step.beside)
    return f" Neither path nor timeline has the teacher's forward before the step ({seconds(beside_s)})."
