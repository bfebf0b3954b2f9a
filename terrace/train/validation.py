"""Evaluates the hold-out and the sources of `data.eval` during a run, on its ranks and under its plan.

Every evaluation covers the same rows (`Engine.evaluate`), so a resumed run gets the same numbers. A loss is the mean
over all predicted tokens of a source.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from terrace.checkpoint.layout import folder_name, folder_of
from terrace.data.batches import Batches
from terrace.data.eval_batches import EvalBatches, EvalSource, eval_batches
from terrace.model.facts import vocabulary_size
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.train.config import RunConfig
from terrace.train.evaluated import Evaluated, evaluated
from terrace.train.keys import TrainConfig
from terrace.train.metrics import read_metrics
from terrace.train.micro_batches import MicroBatches

Passed = Callable[[int], None]  # receives the number of each pass


def eval_batches_of(run: RunConfig, batches: Batches, sources: tuple[EvalSource, ...]) -> list[EvalBatches]:
    """The evaluation data of a run, in batches of the size of its steps; empty if it does not evaluate."""
    train = run.train
    if not train.eval_every:
        return []
    return eval_batches(batches, sources, run.rows, train.eval_batches, vocabulary_size(run.model))


class Validation:
    """The evaluations of a run. Every rank calls the methods at the same points.

    `best_step` is the step with the lowest loss of `train.keep_best` so far. `is_new_best` tells whether the newest
    evaluation set it. A resumed run finds `best_step` in its metrics file.
    """

    def __init__(
        self,
        engine: Engine,
        train: TrainConfig,
        sources: Sequence[EvalBatches],
        make: Callable[[EvalBatches], MicroBatches],
    ) -> None:
        self._engine, self._train = engine, train
        self._sources = [(each, make(each)) for each in sources]
        self._best, self.is_new_best, self.is_first = math.inf, False, True
        self.best_step: int | None = None

    @property
    def words(self) -> str:
        """A line on the evaluated data; "" if there is none."""
        read = ", ".join(
            f"{each.num_rows:,} of {each.num_found:,} sequences of {each.name}" for each, _ in self._sources
        )
        return read and f"every {self._train.eval_every} steps and at the end it is evaluated on {read}"

    @property
    def best_words(self) -> str:
        """A line on the best checkpoint; "" if there is none."""
        if self.best_step is None:
            return ""
        kept = folder_name(self.best_step)
        return f"lowest loss of {self._train.keep_best}: {self._best:.4f} after step {self.best_step}, kept as {kept}"

    def resume(self, folder: Path, first_step: int) -> None:
        """Finds the best checkpoint of the earlier steps."""
        name = self._train.keep_best
        if not name or not first_step:
            return
        found: tuple[float, int] | None = None
        # Rank 0 reads for all: others may not see its disk.
        if self._engine.rank == 0 and (folder / "metrics.jsonl").is_file():
            losses = [
                (record.eval[name]["loss"], record.step)
                for record in read_metrics(folder / "metrics.jsonl")
                if record.step <= first_step and "loss" in record.eval.get(name, {})
            ]
            kept = [each for each in losses if not math.isnan(each[0]) and folder_of(folder, each[1]).is_dir()]
            found = min(kept, default=None)
        told = self._engine.comm.exchange(None if found is None else list(found))[0]
        if told is not None:
            self._best, self.best_step = told

    def is_due(self, num_done: int) -> bool:
        """Whether an evaluation follows step `num_done`."""
        every = self._train.eval_every
        return bool(every) and (num_done % every == 0 or num_done == self._train.steps)

    def after(self, num_done: int, passed: Passed) -> dict[str, Evaluated]:
        """Evaluates all sources after step `num_done`. Returns the results by source."""
        found, num_passes, device = dict[str, Evaluated](), 0, self._engine.device

        def micros(made: MicroBatches, step: int) -> list[Batch]:
            passed(num_passes + step)
            return [micro.to(device) for micro in made.step(step).micros]

        for batches, made in self._sources:
            passes = [partial(micros, made, step) for step in range(batches.num_batches)]
            found[batches.name] = evaluated(self._engine, passes)
            num_passes += len(passes)
        self.is_first, name = False, self._train.keep_best
        self.is_new_best = bool(name) and found[name].loss < self._best
        if self.is_new_best:
            self._best, self.best_step = found[name].loss, num_done
        return found
