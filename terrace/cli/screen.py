"""Terminal output of `terrace train`, and the result files of the run folder."""

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

from terrace.base.errors import TrainingError
from terrace.base.files import write_atomic
from terrace.base.words import counted
from terrace.cli import views
from terrace.cli.checks import slow_warning
from terrace.cli.data_words import data_words
from terrace.cli.programs import checked_programs, forget_programs
from terrace.cli.progress import ProgressLine, utilisation_words
from terrace.cli.terminal import Terminal
from terrace.cluster.cluster import Cluster
from terrace.launch.start import pace
from terrace.probe.products import bf16_slowdown
from terrace.program.report import StepReport, plain
from terrace.report.inside import ASSIGNED
from terrace.report.loads import load_words
from terrace.report.plot import loss_svg
from terrace.report.run_curves import finite
from terrace.report.stage_tables import stage_comparison_table
from terrace.report.tables import comparison_tables, largest_miss, quantity, seconds, stage_band_words
from terrace.simulate.bands import band_of
from terrace.train.config import RunConfig
from terrace.train.folder import start_words
from terrace.train.job import RunJob, device_of
from terrace.train.metrics import Outcome, StepRecord, eval_lines, read_metrics
from terrace.train.prediction import utilisation_of
from terrace.train.rates import rate_words

_WARM_STEPS = 10  # a run of fewer says little about a steady step


def show_plan(job: RunJob) -> None:
    """Print the plan and its predicted cost, before any process is started."""
    run, blocks = job.run, job.run.blocks()
    count = sum(block.num_trainable + block.num_frozen for block in blocks)
    print(
        f"{run.model.family} decoder, {count / 1e6:.2f} M parameters in {counted(len(blocks), 'block')}; "
        f"{data_words(job)}\n{counted(run.train.steps, 'step')} of {views.step_words(run)}\n"
    )
    if job.resume is None and start_words(run):
        print("\n".join(filter(None, (start_words(run), rate_words(run)))) + "\n")
    view = views.StepView(run, checked_programs(run))
    forget_programs()
    for section in (views.show_plan, views.show_blocks, views.show_memory, views.show_bytes):
        section(view)
    print(_dtype_words(run), end="")
    # A paced run is slower on purpose: the screen must say so.
    rate = pace()
    if rate is not None:
        print(f"paced: every link at {rate:g} times the rate of the cluster's file (TERRACE_PACE)\n")
    sys.stdout.flush()


def _dtype_words(run: RunConfig) -> str:
    plan, device = run.plan, run.cluster.device
    if plan.products is not None and device.backend == "cpu":
        return (
            f"warning: plan.products = {plan.products!r} is emulated on a CPU: operands are rounded to 8 bits and "
            "multiplied in fp32, so a step learns as on a GPU and takes longer than without\n\n"
        )
    if plan.compute == "bf16" and device.backend == "cpu":
        slowdown = bf16_slowdown()
        if slowdown > 1:
            return (
                f'warning: plan.compute = "bf16": products take {slowdown:.1f} times as long as in fp32 on this CPU '
                '(measured); plan.compute = "fp32" with plan.messages = "bf16" sends as few bytes\n\n'
            )
    if device.backend == "cuda":
        return _peak_words(run)
    sends = run.cluster.world_size > 1
    if sends and plan.compute == "fp32" and plan.messages == "bf16" and device.bf16_slowdown > 1:
        return (
            f"computes in fp32, sends parameters and gradients in bf16: by the cluster's file the CPU takes "
            f"{device.bf16_slowdown:.1f} times as long for products in bf16\n\n"
        )
    return ""


def _peak_words(run: RunConfig) -> str:
    plan, peaks = run.plan, run.cluster.device.peak_flops_per_s
    other = {"bf16": "fp32", "fp32": "bf16"}.get(plan.compute)
    if other is None or not {plan.compute, other} <= peaks.keys():
        return ""
    own, times = quantity(peaks[plan.compute], "FLOP/s"), peaks[plan.compute] / peaks[other]
    gain = f"{times:.1f} times as long" if times >= 1 else f"{1 / times:.1f} times as fast"
    rounds = "rounds less, in twice the bytes of parameters and activations" if other == "fp32" else "halves the bytes"
    return (
        f"computes in {plan.compute}, at up to {own} by the cluster's file, with {plan.master} masters\n"
        f"  --plan.compute {other} {rounds}: products at {quantity(peaks[other], 'FLOP/s')}, {gain}\n\n"
    )


class Screen:
    """Observer on rank 0: a progress line, then the comparison, the run folder's files, the verdict."""

    def __init__(self, job: RunJob) -> None:
        self._job = job
        self._console = Terminal()
        self._progress = ProgressLine(self._console, job.run.train.steps, job.run.train.log_every)

    def started(self, predicted: StepReport, cluster: Cluster, first_step: int) -> None:
        rate = cluster.device.peak_flops_per_s[self._job.run.plan.compute]
        told = self._job.run.cluster.tiers
        links = ", ".join(
            f"{tier.name} {quantity(tier.bandwidth_bytes_per_s, 'B/s')} after {seconds(tier.latency_s)}"
            + " (by its file)" * (tier in told and cluster is not self._job.run.cluster)  # no message crosses it
            for tier in cluster.tiers
        )
        origin, where = "measured on this machine", "a layer"
        # Not measured: the file's peak, times the share that large products reach.
        if cluster is self._job.run.cluster:
            origin, where = f"as the cluster's file says, by {cluster.device.source}", "large products"
            rate *= cluster.device.kernels.gemm
        print(
            f"{origin}: {quantity(rate, 'FLOP/s')} per rank in {where}\n"
            f"  {links}\n"
            f"predicted step: {seconds(predicted.step_s)} {band_of(cluster, self._job.run.plan)}"
            + (f"; resuming after step {first_step}" * bool(first_step))
        )
        if self._job.run.plan.balance == "cost":
            print(ASSIGNED)
        print(utilisation_words(utilisation_of(self._job.run, cluster, device_of().type)))
        # Last, since it may search for a plan for some tenths of a second.
        warning = slow_warning(self._job.run, cluster)
        print(f"warning: {warning}\n" if warning else "", end="", flush=True)

    def stepped(self, record: StepRecord, seconds_left: float) -> None:
        self._progress.show(record, seconds_left)

    def saved(self, folder: Path) -> None:
        self._progress.above(f"saved {folder}")

    def note(self, text: str) -> None:
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
        print(f"{stage_band_words(pairs)}\n")
        miss = largest_miss(pairs)
        if miss:
            print(f"{miss}; {self._to_do(outcome.num_steps)}\n")
        if outcome.quantisation_error:
            words = ", ".join(f"{name} {error:.3g}" for name, error in outcome.quantisation_error.items())
            print(f"relative rounding error of messages in the last step: {words}\n")
        for stage, (_, measured) in enumerate(pairs):
            if measured.load:
                print(f"{f'stage {stage}: ' if outcome.stages else ''}{load_words(measured.load)}\n")
        # After the tables: a full disk must not hide the results.
        with _written_in(folder):
            self._write_files(outcome)
        if self._job.run.model.scalar_head:
            print(f"terrace export {quote(str(folder))} FOLDER writes the model with its score\n")
        elif outcome.sample is None:
            print(f"the model is large: terrace generate {quote(str(folder))} --prompt TEXT samples from it\n")
        else:
            self._console.print("the model continues the prompt", style="bold underline")
            print(f"{outcome.sample}\n")
        # The path is shown below the run folder, which the line already names.
        checkpoint = os.path.relpath(outcome.checkpoint, folder)
        print(
            f"run folder {folder}: config.toml, metrics.jsonl, report.json, loss.svg, {checkpoint}\n"
            f"as a page: {self._page()}"
        )
        self._judge(outcome)

    def _page(self) -> str:
        return f"terrace report {quote(str(self._job.folder))}"

    def _to_do(self, num_steps: int) -> str:
        # Constants are measured at the start of a run, in a moment, or by the probe that wrote the cluster's file.
        page = f"{self._page()} draws a step of both"
        if num_steps < _WARM_STEPS:
            return f"the first steps take longer: judge by at least {_WARM_STEPS}; {page}"
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
        title = f"{run.model.family} under {run.plan.name}"
        steps, losses = [record.step for record in records], [record.loss for record in records]
        if records:
            lines = {name: finite(line) for name, line in eval_lines(records).items()}
            svg = loss_svg(steps, losses, title=title, target=run.train.target_loss, evaluated=lines)
            write_atomic(folder / "loss.svg", svg)
        if outcome.sample is not None:
            write_atomic(folder / "sample.txt", outcome.sample + "\n")

    def _judge(self, outcome: Outcome) -> None:
        target = self._job.run.train.target_loss
        if target is None:
            print(f"final loss {outcome.final_loss:.3f}", flush=True)
        elif outcome.final_loss < target:
            print(f"final loss {outcome.final_loss:.3f}, below the target {target:g}", flush=True)
        else:
            raise TrainingError(f"the final loss {outcome.final_loss:.3f} is not below the target {target:g}")


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
        "quantisation_error": outcome.quantisation_error,
        "predicted": plain(outcome.predicted),
        "measured": plain(outcome.measured),
        "saves": [
            {"folder": each.folder.name, **{name: getattr(each, name) for name in save_names}} for each in outcome.saves
        ],
    }
    if outcome.stages:
        table["stages"] = [
            {"predicted": plain(predicted), "measured": plain(measured)} for predicted, measured in outcome.stages
        ]
    return table
