"""What a run learns by: the next token, or pairs of responses (a reward model, DPO).

DPO's reference is the model as it began. Its log-probabilities of all responses are computed before the first step, by
the engine itself, and kept in the run folder: no rank holds a second model, and a resumed run reads the same bits.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor

from terrace.base.errors import CheckpointError, TrainingError
from terrace.base.files import write_atomic
from terrace.base.sealed import checksum
from terrace.data.batches import Batches
from terrace.model.decoder import token_loss
from terrace.plan.dims import has_routers
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.objective import Objective
from terrace.runtime.pairs import PairFigures, dpo_batch, dpo_objective, reward_batch, reward_objective
from terrace.runtime.step_sums import StepResult
from terrace.train.config import RunConfig
from terrace.train.job import RunJob
from terrace.train.micro_batches import MicroBatches, StepBatches

REFERENCE = "reference.safetensors"  # in the run folder of DPO

Ids = npt.NDArray[np.int64]


class Learning:
    """The objective of a run, and what pairs need beside it. Every rank calls the methods at the same points."""

    def __init__(self, run: RunConfig) -> None:
        self._run, self._seen = run, PairFigures()
        self._batches: Batches | None = None
        self._reference = torch.zeros(0, dtype=torch.float64)
        self._place = (0, 1)

    @property
    def objective(self) -> Objective:
        """Loss of the engine."""
        match self._run.train.objective:
            case "reward":
                return reward_objective(self._seen)
            case "dpo":
                return dpo_objective(self._seen, self._run.train.beta)
            case _:
                return token_loss

    def begin(self, engine: Engine, batches: Batches, job: RunJob, *, keeps: bool = True) -> None:
        """Before the first step; computes the reference of DPO, and keeps it if asked, or reads it if the run goes on.

        Raises `CheckpointError` where it is gone, and `TrainingError` where the starting weights give none.
        """
        self._batches, layout = batches, engine.program.layout
        self._place = layout.data_place(engine.rank), layout.data_degree
        if self._run.train.objective != "dpo":
            return
        file, rows = job.folder / REFERENCE, batches.pairs
        assert rows is not None, "DPO runs on pairs"
        if job.resume is None:
            self._reference = reference_of(engine, batches, self._run.plan.micro_batch)
            if engine.rank == 0 and keeps:
                _write(file, self._reference, job.sources[0].tokens.digest)
        else:
            # Rank 0 reads for all: others may not see its disk.
            digest = job.sources[0].tokens.digest
            own = [_read(file, digest, rows.num_samples)] if engine.rank == 0 else []
            self._reference = engine.comm.exchange_tensors(own)[0][0]

    def fed(self, made: MicroBatches) -> Callable[[int], StepBatches]:
        """The micro-batches of a step as the objective takes them."""
        match self._run.train.objective:
            case "reward":
                return lambda step: StepBatches([reward_batch(micro) for micro in made.step(step).micros], None)
            case "dpo":
                return lambda step: StepBatches(self._with_reference(step, made.step(step).micros), None)
            case _:
                return made.step

    def _with_reference(self, step: int, micros: list[Batch]) -> list[Batch]:
        assert self._batches is not None, "`begin` comes first"
        size = self._run.plan.micro_batch
        samples = self._batches.samples_of(step, *self._place, size)
        references = torch.split(self._reference[torch.from_numpy(samples)], size)
        return [dpo_batch(micro, reference) for micro, reference in zip(micros, references, strict=True)]

    def num_tokens(self, step: int, result: StepResult) -> int:
        """Tokens that a step trained on; of pairs, all of their texts."""
        rows = None if self._batches is None else self._batches.pairs
        if self._batches is None or rows is None:
            return result.num_tokens
        return int(rows.lengths[self._batches.samples_of(step, 0, 1, self._run.rows)].sum())

    def figures(self, step: int, engine: Engine) -> dict[str, float]:
        """Part of the pairs that are right and mean margin of rewards, since the last steps that had them.

        They are told every `train.log_every` steps: they are summed over the ranks.
        """
        train = self._run.train
        if not self._run.on_pairs or ((step + 1) % train.log_every and step + 1 < train.steps):
            return {}
        # Tensor ranks count the same pairs, all equally often; only the last stage counts any.
        right, margin, pairs = (sum(each) for each in zip(*engine.comm.exchange(self._seen.take()), strict=True))
        return {"accuracy": right / pairs, "margin": margin / pairs}


def reference_of(engine: Engine, batches: Batches, micro_batch: int) -> Tensor:
    """Log-probability of every response of the pairs under the engine's parameters, fp64 (samples), on every rank."""
    rows, layout, num_micros = batches.pairs, engine.program.layout, engine.program.num_micros
    assert rows is not None, "only pairs have responses"
    degree, place = layout.data_degree, layout.data_place(engine.rank)
    found = torch.full((rows.num_samples,), torch.nan, dtype=torch.float64)
    for first in range(0, rows.num_samples, degree * micro_batch * num_micros):
        starts = [first + (micro * degree + place) * micro_batch for micro in range(num_micros)]
        # The last pass goes on with the first samples.
        samples = [np.arange(start, start + micro_batch, dtype=np.int64) % rows.num_samples for start in starts]
        micros = [_batch(engine, batches, each, start) for each, start in zip(samples, starts, strict=True)]
        for each, numbers in zip(samples, engine.score(micros), strict=False):  # other stages than the last have none
            found[torch.from_numpy(each)] = numbers.log_probs.sum(1).double().cpu()
    for (theirs,) in engine.comm.exchange_tensors([found]):
        found = torch.where(theirs.isnan(), found, theirs)
    wrong = (~found.isfinite()).nonzero()
    if len(wrong):
        raise TrainingError(
            f"the starting weights give response {int(wrong[0])} of the pairs a log-probability of "
            f"{float(found[wrong[0, 0]])}: begin from other weights"
        )
    return found


def _batch(engine: Engine, batches: Batches, samples: Ids, first_row: int) -> Batch:
    inputs, labels = (torch.from_numpy(each) for each in batches.of_samples(samples))
    batch = Batch(inputs, labels)
    if batches.pairs is not None and has_routers(engine.program.blocks):
        batch = batch.with_places(first_row, lengths=torch.from_numpy(batches.pairs.lengths[samples]))
    return batch.to(engine.device)


def _write(file: Path, reference: Tensor, digest: str) -> None:
    raw = reference.numpy().tobytes()
    content = safetensors.torch.save({"log_probs": reference}, metadata={"data": digest, "checksum": checksum(raw)})
    try:
        write_atomic(file, content)
    except OSError as error:
        raise TrainingError(f"cannot write {file}: {error.strerror}; make room there") from error


def _read(file: Path, digest: str, num_samples: int) -> Tensor:
    fix = "restore it, or start a new run: it has the log-probabilities of the starting weights"
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            facts, reference = opened.metadata() or {}, opened.get_tensor("log_probs")
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"cannot read {file} ({error}): {fix}") from error
    is_whole = facts.get("checksum") == checksum(reference.numpy().tobytes())
    if not is_whole or facts.get("data") != digest or len(reference) != num_samples:
        raise CheckpointError(f"{file} is damaged or of other data: {fix}")
    found: Tensor = reference
    return found
