"""Terminal output of `terrace train`, and the result files in the run folder."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Any

from terrace.base.errors import TrainingError
from terrace.base.files import write_atomic
from terrace.base.words import quantity, seconds
from terrace.cli.checks import slow_warning
from terrace.cli.output import outlive_output
from terrace.cli.step_progress import ProgressLine, utilisation_words
from terrace.cli.terminal import Terminal
from terrace.cluster.cluster import Cluster
from terrace.comm.process_group import rank_device
from terrace.data.chat_tokens import holds_conversations
from terrace.model.facts import family_of, has_scalar_head, is_causal
from terrace.program.report import StepReport, plain, why_no_verdict
from terrace.report.inside import ASSIGNED
from terrace.report.loads import load_words
from terrace.report.plot import loss_svg
from terrace.report.run_curves import finite
from terrace.report.stage_tables import stage_comparison_table
from terrace.report.tables import band_words, comparison_tables, largest_miss
from terrace.simulate.bands import band_of
from terrace.train.job import RunJob
from terrace.train.metrics import Outcome, SlowestRank, StepRecord, eval_lines, own_seconds, read_metrics
from terrace.train.prediction import utilisation_of
from terrace.train.recorder import append_event


class Screen:
    """Observer on rank 0: a progress line, then the comparison, the result files, the verdict and the next commands.

    `verbose` adds the constants behind prediction and utilisation, and details of the start.
    """

    def __init__(self, job: RunJob, verbose: bool = False) -> None:
        self._job, self._verbose, self._next = job, verbose, next_commands(job)
        self._step = 0
        outlive_output(self._note_lost)
        self._console = Terminal()
        self._progress = ProgressLine(self._console, job.run.train.steps, job.run.train.log_every)

    def started(self, predicted: StepReport, cluster: Cluster, first_step: int) -> None:
        run, is_own = self._job.run, cluster is self._job.run.cluster
        # A file's peak is multiplied by the share that large products reach; a measured rate has that already.
        rate = cluster.device.peak_flops_per_s[run.plan.compute] * (cluster.device.kernels.gemm if is_own else 1.0)
        step = f"predicted step: {seconds(predicted.step_s)} {band_of(cluster, run.plan)}"
        resumed = f"; resuming after step {first_step}" * bool(first_step)
        compiles = "; the first one compiles" * bool(run.train.compile)
        if self._verbose:
            self._say_figures(cluster, rate, is_own)
            print(f"{step}{resumed}{compiles}")
            if run.plan.balance == "cost":
                print(ASSIGNED)
            print(utilisation_words(utilisation_of(run, cluster, rank_device().type)))
        else:
            origin = "by the cluster's file" if is_own else "as measured here"
            print(f"{step}, at {quantity(rate, 'FLOP/s')} per rank {origin}{resumed}{compiles}")
        # Last, since it may search for a plan for some tenths of a second.
        warning = slow_warning(run, cluster)
        print(f"warning: {warning}\n" if warning else "", end="", flush=True)

    def _say_figures(self, cluster: Cluster, rate: float, is_own: bool) -> None:
        told = self._job.run.cluster.tiers
        links = ", ".join(
            f"{tier.name} {quantity(tier.bandwidth_bytes_per_s, 'B/s')} after {seconds(tier.latency_s)}"
            + " (by its file)" * (tier in told and not is_own)  # no message crosses it
            for tier in cluster.tiers
        )
        origin, where = "measured on this machine", "a layer"
        if is_own:
            origin, where = f"as the cluster's file says, by {cluster.device.source}", "large products"
        print(f"{origin}: {quantity(rate, 'FLOP/s')} per rank in {where}\n  {links}")

    def _note_lost(self, words: str) -> None:
        # Both failures may come from the same full disk.
        with suppress(OSError):
            append_event(self._job.folder, "note", step=self._step, text=words)

    def stepped(self, record: StepRecord, seconds_left: float) -> None:
        self._step = record.step
        self._progress.show(record, seconds_left)

    def saved(self, folder: Path) -> None:
        self._progress.above(f"saved {folder}")

    def note(self, text: str) -> None:
        self._progress.above(text)

    def detail(self, text: str) -> None:
        if self._verbose:
            self._progress.above(text)

    def finished(self, outcome: Outcome) -> None:
        folder = self._job.folder
        print()
        self._console.print("predicted and measured", style="bold underline")
        if outcome.stages:
            print("rank 0, of stage 0\n")
        for table in comparison_tables(outcome.predicted, outcome.measured):
            self._console.print(table)
        if outcome.stages:
            self._console.print(stage_comparison_table(outcome.stages))
        pairs = outcome.stages or [(outcome.predicted, outcome.measured)]
        why_not = why_no_verdict(outcome.num_timed, outcome.busy)
        print(f"{band_words(pairs, why_not)}\n")
        miss = "" if why_not else largest_miss(pairs)
        if miss:
            print(f"{miss}; {self._to_do()}\n")
        if outcome.slowest is not None:
            print(f"{slowest_words(outcome.slowest, outcome.measured.time_s, len(outcome.stages))}\n")
        if outcome.quantisation_error:
            words = ", ".join(f"{name} {error:.3g}" for name, error in outcome.quantisation_error.items())
            print(f"relative rounding error of messages in the last step: {words}\n")
        for stage, (_, measured) in enumerate(pairs):
            if measured.load:
                print(f"{f'stage {stage}: ' if outcome.stages else ''}{load_words(measured.load)}\n")
        # After the tables: a full disk must not hide the results.
        with _written_in(folder):
            self._write_files(outcome)
        if outcome.sample is not None:
            self._console.print("the model continues the prompt", style="bold underline")
            print(f"{outcome.sample}\n")
        problem = self._judge(outcome)
        # The path is shown below the run folder, which the line already names.
        checkpoint = os.path.relpath(outcome.checkpoint, folder)
        print(
            f"run folder {folder}: config.toml, metrics.jsonl, report.json, loss.svg, {checkpoint}\n"
            f"next: {self._next[0]}\n      {self._next[1]}",
            flush=True,
        )
        if problem is not None:
            raise problem

    def _to_do(self) -> str:
        # Constants are measured at the start of a run, in a moment, or by the probe that wrote the cluster's file.
        page = f"{self._next[0]} draws a step of both"
        if self._job.run.cluster.is_measured:
            return f"the cluster's file was probed: if the machine was busy then or now, probe again; {page}"
        return (
            "if the machine was busy at the start or has other jobs, run again; terrace probe measures longer than a "
            f"start does, for --cluster FILE; {page}"
        )

    def _write_files(self, outcome: Outcome) -> None:
        folder, run = self._job.folder, self._job.run
        write_atomic(folder / "report.json", json.dumps(_report(outcome), indent=1) + "\n")
        # Lines of an earlier start may be damaged, so there may be no finite loss.
        records = [each for each in read_metrics(folder / "metrics.jsonl") if math.isfinite(each.loss)]
        title = f"{family_of(run.model)} under {run.plan.name}"
        steps, losses = [record.step for record in records], [record.loss for record in records]
        if records:
            lines = {name: finite(line) for name, line in eval_lines(records).items()}
            svg = loss_svg(steps, losses, title=title, target=run.train.target_loss, evaluated=lines)
            write_atomic(folder / "loss.svg", svg)
        if outcome.sample is not None:
            write_atomic(folder / "sample.txt", outcome.sample + "\n")

    def _judge(self, outcome: Outcome) -> TrainingError | None:
        target, words = self._job.run.train.target_loss, f"final loss {outcome.final_loss:.3f}"
        if target is not None and not outcome.final_loss < target:
            return TrainingError(f"the {words} is not below the target {target:g}")
        print(words if target is None else f"{words}, below the target {target:g}")
        return None


def slowest_words(slowest: SlowestRank, of_rank_0: Mapping[str, float], num_stages: int) -> str:
    """The rank with the most own work, compared with rank 0, whose seconds the table above shows."""
    own_s = own_seconds(slowest.measured_s)
    if slowest.rank == 0:
        return f"rank 0 has most work of its own, {seconds(own_s)} of a step; every other waits longer"
    where = f" (stage {slowest.stage})" if num_stages else ""
    return (
        f"rank {slowest.rank}{where} has most work of its own, {seconds(own_s)} of a step; rank 0 has "
        f"{seconds(own_seconds(of_rank_0))}, and waits longer"
    )


@contextmanager
def _written_in(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"cannot write the results into {folder}: {error.strerror}; the last checkpoint there is complete"
        ) from error


def _report(outcome: Outcome) -> dict[str, Any]:
    save_names = ("num_bytes", "stalled_s", "write_s")
    table = {
        "final_loss": outcome.final_loss,
        "num_steps": outcome.num_steps,
        "num_timed": outcome.num_timed,
        "no_verdict": why_no_verdict(outcome.num_timed, outcome.busy),
        "quantisation_error": outcome.quantisation_error,
        "predicted": plain(outcome.predicted),
        "measured": plain(outcome.measured),
        "saves": [
            {"folder": each.folder.name, **{name: getattr(each, name) for name in save_names}} for each in outcome.saves
        ],
    }
    if outcome.slowest is not None:
        table["slowest"] = asdict(outcome.slowest)
    if outcome.stages:
        table["stages"] = [
            {"predicted": plain(predicted), "measured": plain(measured)} for predicted, measured in outcome.stages
        ]
    return table


_LONGEST = 40  # characters of a prompt in a command


def next_commands(job: RunJob) -> tuple[str, str]:
    """Two commands for the user: the run's page, and a use of its model."""
    run, folder = job.run, quote(str(job.folder))
    report = f"{job.command} report {folder}"
    # A model with a score in place of logits generates no text, nor does one whose experts depend on later tokens.
    if has_scalar_head(run.model) or not is_causal(run.model):
        return report, f"{job.command} export {folder} {quote(f'{job.folder}-model')}"
    spec, prompt = run.data.sources()[0], run.train.prompt or ""
    is_chat = spec.format == "chat" and holds_conversations(spec.path, spec.split)
    if not prompt or len(prompt) > _LONGEST or not prompt.isprintable():
        prompt = "Hello" if is_chat else "The "
    return report, f"{job.command} generate {folder} {'--chat ' * is_chat}--prompt {quote(prompt)}"
