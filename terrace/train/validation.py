"""Evaluates the hold-out and the sources of `data.eval` during a run, on its ranks and under its plan.

Every evaluation covers the same rows (`Engine.evaluate`), so a resumed run gets the same numbers. A loss is the mean
over all predicted tokens of a source.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from terrace.checkpoint.layout import folder_name, folder_of
from terrace.data.eval_batches import EvalBatches
from terrace.runtime.batch import Batch
from terrace.train.evaluated import Evaluated, eval_batches_of, evaluated
from terrace.train.hooks import Hook, StepDone
from terrace.train.metrics import read_metrics
from terrace.train.micro_batches import MicroBatches

if TYPE_CHECKING:
    from terrace.train.rank import RankOfRun


_NONE = (math.inf, -1)  # loss and step of a best checkpoint that there is not yet


class Validation(Hook):
    """The evaluations of a run. A resumed run finds its best step in the metrics file.

    The best step is the one with the lowest loss of `train.keep_best` so far.
    """

    raises_together = True

    def __init__(self, rank: "RankOfRun", make: Callable[[EvalBatches], MicroBatches], first_step: int) -> None:
        self._rank, self._train, self._is_first = rank, rank.run.train, True
        self._sources = [(each, make(each)) for each in eval_batches_of(rank.run, rank.batches, rank.job.eval_sources)]
        self._best = self._found(first_step)

    def begin(self) -> None:
        read = ", ".join(
            f"{each.num_rows:,} of {each.num_found:,} sequences of {each.name}" for each, _ in self._sources
        )
        if read:
            self._rank.observer.note(f"every {self._train.eval_every} steps and at the end it is evaluated on {read}")

    def stepped(self, done: StepDone) -> None:
        every = self._train.eval_every
        if every and done.problem is None and (done.number % every == 0 or done.number == self._train.steps):
            found, name = self._evaluated(), self._train.keep_best
            rows = {each: {"loss": row.loss, "tokens": float(row.num_tokens)} for each, row in found.items()}
            done.made = replace(done.record, eval=rows)
            if name and found[name].loss < self._best[0]:
                self._best, done.is_new_best = (found[name].loss, done.number), True
        done.best_step = self._best[1]

    def ended(self) -> None:
        loss, step = self._best
        if step >= 0:
            kept = f"lowest loss of {self._train.keep_best}: {loss:.4f} after step {step}, kept as {folder_name(step)}"
            self._rank.observer.note(kept)

    def _found(self, first_step: int) -> tuple[float, int]:
        """(Loss, step) of the best checkpoint of the earlier steps."""
        name, folder, engine = self._train.keep_best, self._rank.job.folder, self._rank.engine
        if not name or not first_step:
            return _NONE
        found = _NONE
        # Rank 0 reads for all: others may not see its disk.
        if engine.rank == 0 and (folder / "metrics.jsonl").is_file():
            losses = [
                (record.eval[name]["loss"], record.step)
                for record in read_metrics(folder / "metrics.jsonl")
                if record.step <= first_step and "loss" in record.eval.get(name, {})
            ]
            kept = [each for each in losses if not math.isnan(each[0]) and folder_of(folder, each[1]).is_dir()]
            found = min(kept, default=_NONE)
        loss, step = engine.comm.exchange(list(found))[0]
        return loss, step

    def _evaluated(self) -> dict[str, Evaluated]:
        reporter, engine = self._rank.reporter, self._rank.engine
        reporter.is_compiling = bool(self._train.compile) and self._is_first
        if reporter.is_compiling:
            self._rank.dog.idle("compiling the blocks, in its first evaluation")
        found, num_passes, num_instructions = dict[str, Evaluated](), 0, len(engine.program.instructions)

        def micros(made: MicroBatches, step: int) -> list[Batch]:
            # A rank in an evaluation is ahead of one in the step.
            reporter.num_before = (num_passes + step + 1) * num_instructions
            return [micro.to(engine.device) for micro in made.step(step).micros]

        for batches, made in self._sources:
            passes = [partial(micros, made, step) for step in range(batches.num_batches)]
            found[batches.name] = evaluated(engine, passes)
            num_passes += len(passes)
        self._is_first, reporter.num_before, reporter.is_compiling = False, 0, False
        return found
