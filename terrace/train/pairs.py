"""Training objectives: next token, reward model and DPO.

DPO's reference is the initial model. Its log-probabilities of all responses are computed by the engine before the first
step and kept in the run folder, so no rank holds a second model, and a resumed run reads the same bits.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor

from terrace.base.errors import CheckpointError, TrainingError
from terrace.base.files import write_atomic
from terrace.base.foreign import check_file
from terrace.base.sealed import checksum
from terrace.base.words import counted
from terrace.data.batches import Batches, rows_of_rank
from terrace.model.decoder import token_loss
from terrace.model.facts import num_further_tokens
from terrace.plan.dims import has_routers
from terrace.program.report import StepReport
from terrace.runtime.batch import Batch
from terrace.runtime.further_tokens import next_and_further_tokens
from terrace.runtime.objective import Objective
from terrace.runtime.pairs import PairFigures, dpo_batch, dpo_objective, reward_batch, reward_objective
from terrace.train.config import RunConfig
from terrace.train.job import RunJob
from terrace.train.micro_batches import MicroBatches, StepBatches

if TYPE_CHECKING:
    from terrace.runtime.engine import Engine

REFERENCE = "reference.safetensors"  # in the run folder of DPO

Ids = npt.NDArray[np.int64]


class Learning:
    """A run's objective, with the data that pairs need. Every rank calls the methods at the same points."""

    def __init__(self, run: RunConfig, batches: Batches) -> None:
        self._run, self._batches, self._seen = run, batches, PairFigures()
        self._further = next_and_further_tokens(run.train.mtp_loss_weight)
        self._reference = torch.zeros(0, dtype=torch.float64)
        self._dealt: tuple[int, int, int, tuple[int, ...]] = (0, 1, 1, ())

    @property
    def objective(self) -> Objective:
        match self._run.train.objective:
            case "reward":
                return reward_objective(self._seen)
            case "dpo":
                return dpo_objective(self._seen, self._run.train.beta)
            case _ if num_further_tokens(self._run.model):
                return self._further
            case _:
                return token_loss

    def begin(
        self,
        engine: "Engine",
        job: RunJob,
        note: Callable[[str], None],
        idle: Callable[[str], None],
        *,
        keeps: bool = True,
    ) -> None:
        """Prepares the objective before the first step: computes DPO's reference, saving it if `keeps`, or reads it on
        resume.

        `note` receives lines for the user, `idle` the progress for the watchdog. Raises `CheckpointError` if the saved
        reference is missing, and `TrainingError` if the starting weights give non-finite values.
        """
        layout, plan = engine.program.layout, engine.program.plan
        self._dealt = layout.data_rank(engine.rank), layout.data_degree, plan.micro_batch, plan.shares
        if self._run.train.objective != "dpo":
            return
        file, rows = job.folder / REFERENCE, self._batches.pairs
        assert rows is not None, "DPO runs on pairs"
        if job.resume is None:
            note(f"scoring {counted(rows.num_samples, 'response')} with the starting weights, the reference of DPO")
            self._reference = reference_of(engine, self._batches, self._run.plan.micro_batch, idle)
            if engine.rank == 0 and keeps:
                _write(file, self._reference, job.sources[0].tokens.digest)
        else:
            # Rank 0 reads for all: others may not see its disk.
            own = torch.empty(rows.num_samples, dtype=torch.float64)
            if engine.rank == 0:
                own = _read(file, job.sources[0].tokens.digest, rows.num_samples)
            self._reference = engine.comm.of_first(own)

    def fed(self, made: MicroBatches) -> Callable[[int], StepBatches]:
        """Returns the function that makes the batches of a step for this objective."""
        return self._pairs_of(made) if self._run.on_pairs else made.step

    def _pairs_of(self, made: MicroBatches) -> Callable[[int], StepBatches]:
        batches, is_dpo = self._batches, self._run.train.objective == "dpo"

        def step_of(step: int) -> StepBatches:
            micros = made.step(step).micros
            micros = self._with_reference(step, micros) if is_dpo else [reward_batch(micro) for micro in micros]
            # Tokens of whole sequences, prompts included, counted on the host.
            num_tokens = sum(length for parts in batches.parts(step) for _, length in parts)
            return StepBatches(micros, None, num_tokens)

        return step_of

    def _with_reference(self, step: int, micros: list[Batch]) -> list[Batch]:
        size = self._run.plan.micro_batch
        samples = self._batches.samples_of(step, *self._dealt)
        references = torch.split(self._reference[torch.from_numpy(samples)], size)
        return [dpo_batch(micro, reference) for micro, reference in zip(micros, references, strict=True)]

    def ready(self, batches: StepBatches, engine: "Engine") -> StepBatches:
        """Batches on the engine's device, with what other models say of them."""
        return batches._replace(micros=[micro.to(engine.device) for micro in batches.micros])

    def report(self, measured: StepReport) -> StepReport:
        return measured

    def close(self) -> None:
        """End what runs beside the steps."""

    def figures(self, step: int, engine: "Engine") -> dict[str, dict[str, float]]:
        """Fields of the step's record: of pairs, accuracy and mean reward margin since they were last reported; of
        further tokens, their mean cross entropy.

        Reported every `train.log_every` steps, since they are summed over ranks.
        """
        if not self._reports(step):
            return {}
        if num_further_tokens(self._run.model):
            # All ranks that count the same tokens count them equally often.
            entropy, tokens = (sum(each) for each in zip(*engine.comm.exchange(self._further.sums.take()), strict=True))
            return {"further_tokens": {"cross_entropy": entropy / max(1.0, tokens)}}
        if not self._run.on_pairs:
            return {}
        # Tensor ranks count the same pairs, all equally often; only the last stage counts any.
        right, margin, pairs = (sum(each) for each in zip(*engine.comm.exchange(self._seen.take()), strict=True))
        return {"pairs": {"accuracy": right / pairs, "margin": margin / pairs}}

    def _reports(self, step: int) -> bool:
        return not (step + 1) % self._run.train.log_every or step + 1 == self._run.train.steps


def reference_of(engine: "Engine", batches: Batches, micro_batch: int, idle: Callable[[str], None]) -> Tensor:
    """Log-probability of every response under the engine's parameters: fp64, shape (num_samples,), on every rank.

    `idle` receives the progress after each pass.
    """
    rows, program, layout = batches.pairs, engine.program, engine.program.layout
    assert rows is not None, "only pairs have responses"
    degree, place = layout.data_degree, layout.data_rank(engine.rank)
    found = torch.full((rows.num_samples,), torch.nan, dtype=torch.float64)
    size, shares = batches.batch, program.plan.shares
    places = [layout.data_rank(rank) for rank in range(program.cluster.world_size)]
    for first in range(0, rows.num_samples, size):
        # Of every data rank: (micro-batches, micro_batch), dealt as a step's.
        of_ranks = [rows_of_rank(size, each, degree, micro_batch, shares) for each in range(degree)]
        at = [first + each.reshape(-1, micro_batch) for each in of_ranks]
        # The last pass is filled up with the first samples, which are already scored.
        micros = [_batch(engine, batches, each % rows.num_samples, int(each[0])) for each in at[place]]
        scores = [numbers.log_probs.sum(1).double().cpu() for numbers in engine.score(micros)]
        idle(f"scoring pairs with the starting weights, {min(first + size, rows.num_samples)} of {rows.num_samples}")
        # Exchanged after every pass: at the end, every rank would hold the samples of all ranks at once. Only the last
        # stage has any.
        for there, theirs in zip(places, engine.comm.exchange_tensors(scores), strict=True):
            for samples, values in zip(at[there], theirs, strict=False):
                is_new = torch.from_numpy(samples < rows.num_samples)
                found[torch.from_numpy(samples)[is_new]] = values[is_new]
    wrong = (~found.isfinite()).nonzero()
    if len(wrong):
        raise TrainingError(
            f"the starting weights give response {int(wrong[0])} of the pairs a log-probability of "
            f"{float(found[wrong[0, 0]])}: begin from other weights"
        )
    return found


def _batch(engine: "Engine", batches: Batches, samples: Ids, first_row: int) -> Batch:
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
        check_file(file, file.parent)
        with safetensors.safe_open(file, framework="pt") as opened:
            facts, reference = opened.metadata() or {}, opened.get_tensor("log_probs")
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"cannot read {file} ({error}): {fix}") from error
    is_whole = facts.get("checksum") == checksum(reference.numpy().tobytes())
    if not is_whole or facts.get("data") != digest or len(reference) != num_samples:
        raise CheckpointError(f"{file} is damaged or of other data: {fix}")
    found: Tensor = reference
    return found
