"""Per-step measurements of a rank beyond the step's result: throughput, utilisation, bytes, memory."""

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from terrace.accelerator import has_streams
from terrace.cluster.cluster import Cluster
from terrace.plan.dims import has_routers
from terrace.plan.members import tokens_over_own
from terrace.train.hooks import Hook, StepDone
from terrace.train.loads import LoadsFile, cut_other_stages
from terrace.train.prediction import utilisation_of

if TYPE_CHECKING:
    from terrace.train.rank import RankOfRun


_DISAGREE = 2.0  # times the predicted step, or a part of it, after which the peak is measured again


class Gauges(Hook):
    """Reads the engine's counters, and writes the expert loads.

    If the second step differs from `predicted_s` by more than a factor of two, and the peak behind MFU was measured at
    the start, rank 0 measures it again with `measure` and keeps the higher value. A note has both.
    """

    def __init__(
        self, rank: "RankOfRun", cluster: Cluster, first_step: int, predicted_s: float, measure: Callable[[], float]
    ) -> None:
        engine, job, self._note = rank.engine, rank.job, rank.observer.note
        self._engine, self._used = engine, utilisation_of(job.run, cluster, engine.device.type)
        self._second, self._predicted_s, self._measure = first_step + 2, predicted_s, measure
        program, stage = engine.program, engine.program.stage.index
        writes = bool(engine.load.layers) and program.mesh.at_stage(0, stage) == engine.rank
        train = job.run.train
        if engine.rank == 0 and has_routers(program.blocks):
            cut_other_stages(job.folder, program.stage.num_stages, first_step)
        self._loads = None
        if writes:
            self._loads = LoadsFile(job.folder, stage, first_step, train.steps)
        self._newest: list[StepDone] = []  # none or one
        self._before: dict[str, int] = {}
        self._sent()

    def before(self, step: int) -> None:
        if self._loads is not None and any(done.is_saved for done in self._newest):
            self._loads.end()

    def ended(self) -> None:
        self.before(0)  # a stop leaves a checkpoint, too

    def stepped(self, done: StepDone) -> None:
        self._newest[:] = [done]
        result, step_s, num_tokens = done.result, done.figures["step_s"], done.figures["num_tokens"]
        if self._loads is not None and result.loads is not None:
            self._loads.add(done.number, result.loads)
        if done.number == self._second and self._engine.rank == 0 and self._used.is_measured_here:
            self._check_peak(step_s)
        # Each island runs its own steps, and `num_tokens` are those of one.
        program = self._engine.program
        over_own = tokens_over_own(program.cluster, program.plan, program.layout, self._engine.rank)
        tokens_per_s = over_own * num_tokens / step_s
        done.figures.update(
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_device=tokens_per_s / self._used.num_devices,
            load={} if result.loads is None else result.loads.figures,
            mfu=self._used.mfu(step_s),
            hfu=self._used.hfu(step_s),
            sent_bytes=self._sent(),
            memory_bytes=self._engine.comm.meter.peak(),
            peak_memory_bytes=self._peak(),
            time=time.time(),
        )

    def _check_peak(self, step_s: float) -> None:
        if max(step_s / self._predicted_s, self._predicted_s / step_s) <= _DISAGREE:
            return
        before = self._used.peak_flops_per_s
        peak = max(before, self._measure())
        self._used = replace(self._used, peak_flops_per_s=peak)
        self._note(
            f"the second step took {step_s:.3g} s, predicted {self._predicted_s:.3g} s: the machine is busy, or was "
            f"when it was measured, or a step is more than its layers. The peak behind MFU, measured again: "
            f"{before:.3g} -> {peak:.3g} FLOP/s"
        )

    def _sent(self) -> dict[str, int]:
        total: dict[str, int] = defaultdict(int)
        for (_, tier), size in self._engine.bytes.of_steps.items():
            total[tier] += size
        # The ledger counts from the start; a record has the bytes since the line before.
        new = {tier: total[tier] - self._before.get(tier, 0) for tier in self._engine.program.layout.tiers}
        self._before = dict(total)
        return {tier: size for tier, size in new.items() if size}

    def _peak(self) -> dict[str, int]:
        device = self._engine.device
        if has_streams(device):
            return {
                "allocated": torch.accelerator.max_memory_allocated(device),
                "reserved": torch.accelerator.max_memory_reserved(device),
            }
        unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss: getrusage(2)
        return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
