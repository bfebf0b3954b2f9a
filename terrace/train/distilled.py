"""Training from a teacher: its forward beside every step, or its most probable tokens from a file in the run folder.

Online, the teacher is a second model on the ranks of the run, under a plan of its own (terrace.runtime.beside). Its
forward runs between two steps, when the student's parameters have been refreshed: both engines use the same process
groups. Offline, it runs once over every sample of the run, before the first step, and is freed
(terrace.train.top_tokens).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

import numpy as np
import torch

from terrace.data.batches import Batches, micros_of_rank
from terrace.model.decoder import build_blocks
from terrace.program.report import StepReport, together
from terrace.runtime.batch import Batch
from terrace.runtime.beside import NAME, ForwardBeside
from terrace.runtime.distilled import HIDDEN, IDS, LOG_PROBS, Blend, distilled
from terrace.runtime.engine import Engine
from terrace.runtime.hidden import hidden_reader
from terrace.runtime.objective import Objective
from terrace.runtime.setup import Blocks, RankSetup, Workload
from terrace.train.config import RunConfig
from terrace.train.job import RunJob
from terrace.train.micro_batches import MicroBatches, StepBatches
from terrace.train.pairs import Learning
from terrace.train.teacher import num_teacher_micros, teacher_blocks, teacher_plan
from terrace.train.teacher_keys import DISTILL, teacher_model
from terrace.train.top_tokens import TopTokens, top_tokens_of
from terrace.train.weights import values_in

_TIMEOUTS = 2  # as that of a step: longer than the watchdog's, which names the culprit


def learning_of(run: RunConfig, batches: Batches) -> Learning:
    return Taught(run, batches) if run.train.objective == DISTILL else Learning(run, batches)


def teacher_engine(run: RunConfig, engine: Engine) -> Engine:
    """The engine of the teacher, on the ranks of `engine`, with the values in its folder. Every rank calls this."""
    plan, specs, model = teacher_plan(run), teacher_blocks(run), teacher_model(run.teacher.model)
    return Engine(
        Blocks(
            build_blocks(model),
            names=[spec.name for spec in specs],
            declared=specs,
            freeze=("*",),
            initial=values_in(run.teacher.model, model),
        ),
        Workload(
            cluster=run.cluster,
            plan=plan,
            num_micros=num_teacher_micros(run, plan),
            sequence=run.train.sequence,
            is_verified=True,
        ),
        hidden_reader(),
        setup=RankSetup(
            rank=engine.rank,
            device=engine.device,
            timeout=timedelta(seconds=_TIMEOUTS * run.train.timeout_s),
            pacer=engine.comm.pacer,
        ),
    )


class Taught(Learning):
    """A run's objective with a teacher. Every rank calls the methods at the same points."""

    def __init__(self, run: RunConfig, batches: Batches) -> None:
        super().__init__(run, batches)
        blend = Blend(weight=run.teacher.weight, temperature=run.teacher.temperature)
        self._loss = distilled(blend, run.teacher.num_labels)
        self._beside: list[ForwardBeside] = []  # online
        self._kept: list[TopTokens] = []  # offline

    @property
    def objective(self) -> Objective:
        return self._loss

    def begin(
        self,
        engine: Engine,
        job: RunJob,
        note: Callable[[str], None],
        idle: Callable[[str], None],
        *,
        keeps: bool = True,
    ) -> None:
        """Make the teacher; offline, let it find the most probable tokens of every sample unless they are kept already.

        Raises `TrainingError` if they cannot be written, and as reading the teacher does.
        """
        run, batches = self._run, self._batches
        layout = engine.program.layout
        self._place = layout.data_rank(engine.rank), layout.data_degree
        idle("reading the teacher")
        if run.teacher.is_online:
            self._beside = [
                ForwardBeside(
                    teacher_engine(run, engine), engine.program, timedelta(seconds=_TIMEOUTS * run.train.timeout_s)
                )
            ]
            return
        self._kept = [top_tokens_of(run, batches, job, lambda: teacher_engine(run, engine), note, idle, engine, keeps)]

    def fed(self, made: MicroBatches) -> Callable[[int], StepBatches]:
        """Returns the function that makes the batches of a step: of both models, or with the most probable tokens."""
        if self._kept:
            return lambda step: self._with_top_tokens(step, made.step(step))
        (beside,) = self._beside
        own = MicroBatches(self._batches, beside.engine.program, beside.engine.rank, pinned=False)
        degree, size = beside.engine.program.layout.data_degree, beside.engine.program.plan.micro_batch
        place = beside.engine.program.layout.data_rank(beside.engine.rank)

        def both(step: int) -> StepBatches:
            mine, its = made.step(step), own.step(step).micros
            micros = self._mixed(step, mine.micros, *self._place, self._run.plan.micro_batch)
            return mine._replace(micros=micros, beside=self._mixed(step, its, place, degree, size))

        return both

    def _mixed(self, step: int, micros: Sequence[Batch], place: int, degree: int, size: int) -> list[Batch]:
        """The micro-batches of a data rank, with the shares in which their rows are mixed: equal under every plan."""
        run = self._run
        if not run.teacher.mix:
            return list(micros)
        drawn = np.random.default_rng((run.train.seed, step)).beta(run.teacher.mix, run.teacher.mix, run.rows // 2)
        shares = torch.split(torch.from_numpy(drawn).repeat_interleave(2), size)
        numbers = micros_of_rank(run.rows // size, place, degree)
        return [replace(micro, mix=shares[at]) for micro, at in zip(micros, numbers.tolist(), strict=True)]

    def _with_top_tokens(self, step: int, batches: StepBatches) -> StepBatches:
        (kept,), size = self._kept, self._run.plan.micro_batch
        sources, samples = self._batches.places_of(step, *self._place, size)
        ids, log_probs = (torch.split(each, size) for each in kept.of(sources, samples))
        micros = [
            replace(micro, columns={IDS: at, LOG_PROBS: values})
            for micro, at, values in zip(batches.micros, ids, log_probs, strict=True)
        ]
        return batches._replace(micros=micros)

    def ready(self, batches: StepBatches, engine: Engine) -> StepBatches:
        """Batches on the engine's device, with the teacher's hidden states on ranks that read them."""
        found = super().ready(batches, engine)
        for beside in self._beside:
            # Before the teacher gathers over groups on which the student's refreshes are still under way.
            drain_s = time.perf_counter()
            engine.drain()
            begin_s = time.perf_counter()
            hidden, matrix = beside.run([micro.to(engine.device) for micro in batches.beside])
            self._loss.matrix.take(matrix)
            micros = list[Batch](found.micros)
            if hidden:
                micros = [replace(micro, columns={HIDDEN: own}) for micro, own in zip(micros, hidden, strict=True)]
            time_s = {"wait refresh": begin_s - drain_s, NAME: time.perf_counter() - begin_s}
            found = found._replace(micros=micros, time_s=time_s)
        return found

    def figures(self, step: int, engine: Engine) -> dict[str, dict[str, float]]:
        """Fields of the step's record: mean cross entropy and divergence since they were last reported."""
        if not self._reports(step):
            return {}
        entropy, divergence, tokens = (
            sum(each) for each in zip(*engine.comm.exchange(self._loss.sums.take()), strict=True)
        )
        tokens = max(1.0, tokens)
        return {"teacher": {"cross_entropy": entropy / tokens, "divergence": divergence / tokens}}

    def report(self, measured: StepReport) -> StepReport:
        """The measured step, with the bytes of the teacher; its seconds are among the step's already."""
        return together(measured, *(replace(each.report(), time_s={}) for each in self._beside))

    def close(self) -> None:
        """Stop the teacher's lanes. Raises `ProgramError` if it sent other bytes than its program declares."""
        for each in self._beside:
            each.close()
