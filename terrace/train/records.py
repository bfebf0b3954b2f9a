"""Makes the record of every step, sums them up, writes them to `metrics.jsonl` and shows them."""

import time
from typing import TYPE_CHECKING

from terrace.train.hooks import Hook, StepDone
from terrace.train.metrics import MetricsFile, StepRecord, Summary, outer_figures, outer_words

if TYPE_CHECKING:
    from terrace.train.rank import RankOfRun


class StepFigures(Hook):
    """Measures the step with the hooks before it, and adds the figures of its result."""

    def __init__(self, rank: "RankOfRun") -> None:
        self._rank = rank

    def stepped(self, done: StepDone) -> None:
        self._rank.reporter.is_compiling = False
        result, step_s = done.result, time.perf_counter() - done.started_s
        # The clock's categories cover the engine's step; the rest of the wall time is `other`.
        time_s = {**result.time_s, **done.batches.time_s, **done.figures.pop("time_s", {}), "data": done.data_s}
        time_s["other"] = time_s.get("other", 0.0) + step_s - sum(time_s.values())
        num_tokens = done.batches.num_tokens
        done.figures.update(
            step=done.number,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=done.rate,
            num_tokens=result.num_tokens if num_tokens is None else num_tokens,
            step_s=step_s,
            outer=outer_figures(result.outer),
            loss_scale=result.loss_scale,
            skipped=result.skipped,
            quantisation_error=result.quantisation_error,
            router_losses=result.router_losses,
            **self._rank.learning.figures(done.step, self._rank.engine),
            dropped=result.dropped,
            time_s=time_s,
            balance=done.batches.balance,
        )


class Records(Hook):
    """Makes the record of a step of the figures of all hooks before, and sums records up."""

    raises_together = True

    def __init__(self, rank: "RankOfRun", first_step: int) -> None:
        self._rank = rank
        self.summary = Summary(rank.run.train.steps - first_step, rank.run.plan.outer.every)

    def stepped(self, done: StepDone) -> None:
        done.made = StepRecord(**done.figures)
        self.summary.add(done.made)
        if done.number == self._rank.run.train.steps and done.problem is None:
            results = self._rank.engine.finish()
            if results:
                self.summary.finish(results)
                self._rank.observer.note(f"islands have agreed on all parameters: {outer_words(results)}")


class Shown(Hook):
    def __init__(self, rank: "RankOfRun", first_step: int) -> None:
        self._rank, self._first_step, self._begin_s = rank, first_step, 0.0
        self._file: MetricsFile | None = None

    def begin(self) -> None:
        if self._rank.world.rank != 0:
            return
        self._file = MetricsFile(self._rank.job.folder / "metrics.jsonl", self._first_step)
        if self._file.num_lost:
            lost = f"metrics.jsonl lacks {self._file.num_lost} of the first {self._first_step} steps"
            self._rank.observer.note(lost)

    def before(self, step: int) -> None:
        if step == self._first_step:
            self._begin_s = time.perf_counter()

    def stepped(self, done: StepDone) -> None:
        if self._file is not None:
            self._file.write(done.record)
        per_step_s = (time.perf_counter() - self._begin_s) / (done.number - self._first_step)
        self._rank.observer.stepped(done.record, per_step_s * (self._rank.run.train.steps - done.number))

    def ended(self) -> None:
        if self._file is not None:
            self._file.close()
