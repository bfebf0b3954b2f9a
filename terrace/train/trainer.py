"""`terrace.Trainer`: a user's own blocks under any plan, in the user's own loop.

Unlike `terrace train`, the trainer has no data, loop or models of its own: it takes modules that run one after the
other, a loss, a plan and a cluster, and runs one step per call.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from terrace.base.errors import CheckpointError, ConfigError, ModelError, TerraceError, TrainingError
from terrace.checkpoint.layout import latest
from terrace.checkpoint.reading import Checkpoint, resume
from terrace.checkpoint.writing import save
from terrace.cluster.cluster import Cluster
from terrace.model.balance import BalanceConfig
from terrace.model.decoder import IGNORE_INDEX, token_loss
from terrace.model.spec import BlockSpec
from terrace.plan.context import is_context_parallel
from terrace.plan.keep_rules import kept_in
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.program.report import StepReport
from terrace.runtime.batch import Batch
from terrace.runtime.describe import describe, with_dims
from terrace.runtime.engine import Engine
from terrace.runtime.objective import ignored_label
from terrace.runtime.setup import Blocks, RankSetup, Training, Workload
from terrace.runtime.step_sums import StepResult
from terrace.train.cut import Cutter
from terrace.train.evaluated import Evaluated, evaluated
from terrace.train.first_step import CheckedLoss, FirstStep, Loss, predict
from terrace.train.joining import (
    AnyOptimizer,
    find_world,
    read_balance,
    read_cluster,
    read_optimizer,
    read_plan,
    resolved_plan,
)
from terrace.train.trainer_report import StepTimes, TrainerReport
from terrace.train.user_blocks import UserBlocks, declared_of, hidden_dims, move_buffers, spread, whole_values


class Trainer:
    """Trains `blocks`, modules that run one after the other, under a plan on this rank of a cluster.

    - `blocks`: modules in a sequence (also `nn.Sequential`), or by name, each from one tensor to one tensor. A block is
      the unit of gathering, reduction and recomputation. A parameter shared by several blocks is one (a tied head). The
      trainer takes the parameters over; those with `requires_grad` off stay as they are.
    - `plan`, `cluster`: a preset's name, a file, a table or the value. `cluster="local"` is this machine with all
      running ranks; any other must have as many ranks as the world. Without a dtype in the plan, blocks keep theirs.
    - `loss(output, labels)` returns a SUM of losses. The trainer adds up the sums of all micro-batches and ranks and
      divides by the number of labels, without those equal to -100, or to the `ignore_index` of a loss module or of
      `functools.partial(torch.nn.functional.cross_entropy, ...)`. With `check_loss`, the first loss is compared with
      the losses of its two halves.
    - `optimizer`: keys as in the section `[optimizer]` of a run, or a name ("muon"), or a class of yours
      (docs/optimizers.md); by default AdamW with weight decay 0.1 on matrices and the gradient norm clipped at 1.
    - `num_micros`: number of micro-batches into which a rank cuts its part of a batch; `plan.shares` replace it.
    - `local_batches`: `step` receives this rank's part of the batch, equal on ranks that share a data rank; otherwise
      the whole batch, equal on every rank.
    - `activation=(sequence, hidden)`: shape of the tensor between blocks, for one sample. Needed by a pipeline and a
      context axis, and for choosing the number of chunks of stacks on several ranks.
    - `declared`: the meaning of parameters' dims. A tensor and a context axis need it, and blocks of
      `terrace.model.decoder` or of `terrace.blocks_of` with a declaration; the latter bring their own.
    - `broadcast`: rank 0's values of parameters and buffers are sent to all ranks first, so no seed is needed.
    - `predict`: times blocks and links in the first step, which takes about a second, to predict later steps.
    - `timeout_s`: under a launcher, how long a rank may stand still before the culprit is named.
    - `keep_folder`: where states are that the plan keeps on a disk; by default the folder for temporary files. Refused
      where the plan keeps nothing there.
    - `balance`: keys of the section `[balance]` of a run, for blocks with routers; `seed` draws their noise.

    Under torchrun, srun or mpirun the trainer joins the world, unless the user has. Every rank makes the trainer and
    calls its methods at the same points. Raises a `TerraceError` for a setup that cannot work.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module] | Mapping[str, nn.Module] | nn.Sequential,
        *,
        plan: Plan | Mapping[str, Any] | str = "zero3",
        cluster: Cluster | Mapping[str, Any] | str = "local",
        loss: Loss,
        lr: float,
        optimizer: AnyOptimizer | None = None,
        num_micros: int = 1,
        local_batches: bool = False,
        activation: tuple[int, int] | None = None,
        declared: Sequence[BlockSpec] = (),
        check_loss: bool = True,
        broadcast: bool = True,
        predict: bool = True,
        timeout_s: float = 600.0,
        keep_folder: str | Path | None = None,
        balance: BalanceConfig | Mapping[str, Any] | None = None,
        seed: int = 0,
        say: Callable[[str], None] = print,
    ) -> None:
        self._blocks = UserBlocks(blocks)
        if num_micros < 1:
            raise ConfigError(f"num_micros = {num_micros}: a rank cuts its part of a batch into 1 or more")
        self.lr, self.num_steps = lr, 0
        settings, balance = read_optimizer(optimizer, lr), read_balance(balance)
        names, modules = self._blocks.names, self._blocks.modules
        specs = describe(modules, names)
        if not any(spec.num_trainable for spec in specs):
            raise ModelError("no parameter of the blocks has requires_grad on: leave something to train")
        self._times, ignored = StepTimes(), ignored_label(loss)
        self._joined = find_world(timeout_s, say)
        try:
            self.cluster = read_cluster(cluster, self._joined.world_size, self._joined.machines)
            self.plan = read_plan(plan, self.cluster, set(self._blocks.dtypes.values()), settings.update)
            # Without declared dims, the hidden size tells which dim a pipeline's messages have.
            declared = declared or declared_of(modules) or hidden_dims(specs, activation)
            self.plan, note = resolved_plan(self.cluster, self.plan, with_dims(specs, declared), num_micros, activation)
            self._joined.note(note)
            if self.plan.balance == "cost":
                raise ConfigError(
                    'plan.balance = "cost" assigns the documents of a whole batch to ranks before each step, which a '
                    'trainer does not see: train with terrace train, or write balance = "tokens"'
                )
            if ignored != IGNORE_INDEX and is_context_parallel(Mesh.of(self.cluster, self.plan), self.plan):
                raise ConfigError(
                    f"ignore_index = {ignored} of the loss: a context axis pads with labels of {IGNORE_INDEX}, "
                    "so use that, or give the tier to the data axis"
                )
            if broadcast and self._joined.world_size > 1:
                spread(modules, specs, self._joined.device)
            move_buffers(modules, self._joined.device)
            self.engine = Engine(
                Blocks(modules, names=names, declared=declared),
                Workload(
                    cluster=self.cluster,
                    plan=self.plan,
                    num_micros=num_micros,
                    sequence=0 if activation is None else activation[0],
                ),
                # The project's own loss is known to be a sum.
                loss if loss is token_loss else CheckedLoss(loss, check_loss),
                Training(optimizer=settings, balance=balance, seed=seed),
                RankSetup(
                    rank=self._joined.rank,
                    device=self._joined.device,
                    timeout=self._joined.timeouts(timeout_s),
                    progress=self._progress,
                    keep_folder=kept_in(self.plan, keep_folder),
                ),
            )
            self._joined.live_on(self.engine.island)
            self._cutter = Cutter(self.engine, is_local=local_batches, ignored=ignored)
            # Until the first step is done. Timing runs a block twice, which blocks that send messages cannot do.
            self._first: FirstStep | None = FirstStep(names, self.device, predict and not self.engine.talks_inside)
        # A world joined here must not outlive a trainer that was never made.
        except BaseException:
            self._joined.leave()
            raise

    @property
    def rank(self) -> int:
        return self._joined.rank

    @property
    def predicted(self) -> StepReport | None:
        return self._times.predicted

    @property
    def device(self) -> torch.device:
        """Device of this rank. Batches are moved there."""
        return self._joined.device

    def step(
        self, inputs: Tensor, labels: Tensor, positions: Tensor | None = None, lr: float | None = None
    ) -> StepResult:
        """Trains on one batch: inputs, labels and optionally positions, all with samples as the first dim.

        Floating inputs are cast to the plan's compute dtype; `positions` are every block's second argument. `lr`
        overrides the trainer's `lr`, which may be set at any time, for this step. Returns the mean loss over all ranks'
        labels, the gradient norm before clipping, and the number of labels; ignored labels are left out.

        Raises `ConfigError` for a batch that cannot be divided, `NonFiniteError` on every rank for a loss or gradient
        that is inf or nan, with nothing updated, and the engine's other errors.
        """
        tensors = self._taken(inputs, labels, positions)
        with self._joined.guarded("between steps"):
            result = self._step(tensors, lr) if self._first is None else self._first_step(self._first, tensors, lr)
        self.num_steps += 1
        if not result.num_tokens:
            all_are = f"all are {self._cutter.ignored}, and its gradient is zero"
            self._joined.note(f"step {self.num_steps} has no label that counts: {all_are}")
        return result

    def evaluate(self, inputs: Tensor, labels: Tensor, positions: Tensor | None = None) -> Evaluated:
        """Mean loss over a batch of any size, under the plan; nothing changes, so the next step has the same bits.

        Blocks are in evaluation mode. A batch that does not divide among ranks and micro-batches is padded with copies
        of its first sample, with ignored labels. With islands, each evaluates its part. Every rank calls this, with a
        batch as for `step`. Raises `ConfigError` for an empty batch, or if it needs padding and labels are no integers.
        """
        tensors = self._taken(inputs, labels, positions)
        with self._joined.guarded("between steps"):
            if self._first is not None:
                self._cutter.check_same(tensors)
            return evaluated(self.engine, self._cutter.eval_passes(tensors))

    def report(self) -> TrainerReport:
        """The predicted and the measured step of this rank; bytes and times are means over the steps so far.

        Times leave out the first step, in which blocks are timed, if there are others.
        """
        measured = self.engine.report(self._times.mean())
        return TrainerReport(predicted=self.predicted, measured=measured, num_steps=self.num_steps)

    def state_dict(self) -> dict[str, Tensor]:
        """Whole parameters on every rank, as CPU tensors in the master dtype: "block.parameter" -> value.

        A shared parameter appears once, under the first block that has it. Blocks from `terrace.blocks_of` keep the
        parameter names of their model. Buffers are not included. Every rank calls this.
        """
        with self._joined.guarded("gathering parameters"):
            return {self._blocks.full_name(block, name): value for block, name, value in whole_values(self.engine)}

    def unload(self) -> None:
        """Restores plain whole parameters in the blocks, and thus in a model made of them, and closes.

        Values have each parameter's original dtype. Every rank calls this. Raises `TrainingError` under a tensor axis,
        which has replaced the blocks' own modules.
        """
        if self.engine.program.model.tensor.degree > 1:
            raise TrainingError("a tensor axis replaced the modules of the blocks: use state_dict() instead")
        with self._joined.guarded("gathering parameters"):
            # Gathered before closing: it needs the engine's communicators.
            values = {(block, name): value for block, name, value in whole_values(self.engine)}
        specs = self.engine.state.specs
        self.close()
        self._blocks.put_back(values, specs)

    def save(self, folder: str | Path, *, keep: int = 2, facts: Mapping[str, Any] | None = None) -> Path:
        """Writes a checkpoint to `folder/checkpoints/step-N`, which any plan can load.

        The newest `keep` checkpoints are kept. `facts` are the user's own values for the manifest. Every rank calls
        this. Raises `CheckpointError`.
        """
        with self._joined.guarded("saving a checkpoint"):
            self.engine.drain()
            own = {"plan": self.plan.name, **(facts or {})}
            return save(self.engine, Path(folder), self.num_steps, own, keep)

    def load(self, folder: str | Path) -> Path:
        """Resumes from a checkpoint, or from the newest one in a folder given to `save`; returns its path.

        Every rank calls this. Raises `CheckpointError` if there is none, or it is damaged or has other blocks.
        """
        with self._joined.guarded("loading a checkpoint"):
            problem, found = None, Path(folder)
            try:
                # A folder without a manifest is not a checkpoint but holds several.
                if not (found / "manifest.json").is_file():
                    newest = latest(found)
                    if newest is None:
                        raise CheckpointError(f"{folder} holds no checkpoint: give a folder that save() was given")
                    found = newest
                checkpoint = Checkpoint(found)
                # One rank reads the checksums for all.
                if self.rank == 0:
                    checkpoint.verify()
            except TerraceError as error:
                problem = str(error)
            # Every rank learns of a problem, so that none waits for a rank that has raised.
            for rank, told in enumerate(self.engine.comm.exchange(problem)):
                if told is not None:
                    raise CheckpointError(told if rank == 0 else f"rank {rank}: {told}")
            self._joined.note(resume(self.engine, checkpoint))
            self.num_steps = checkpoint.step
            return found

    def finish(self) -> None:
        """Ends a run of islands, which then hold the same parameters. Every rank calls this after its last step."""
        with self._joined.guarded("ending a run of islands"):
            self.engine.finish()

    def close(self) -> None:
        """Stops the trainer's threads, and leaves the world if it was joined here. May be called twice."""
        if not self._joined.is_left:
            self.engine.drain()
            self.engine.close()
            self._joined.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes, except after an error: other ranks may not share it, and the threads end with the process."""
        # After an error the other ranks may still wait, so closing could hang.
        if kind is None:
            self.close()

    def _taken(self, inputs: Tensor, labels: Tensor, positions: Tensor | None) -> dict[str, Tensor]:
        if self._joined.is_left:
            raise TrainingError("this trainer is closed: make a new one, and load a checkpoint into it")
        return {"inputs": inputs, "labels": labels} | ({} if positions is None else {"positions": positions})

    def _step(self, tensors: Mapping[str, Tensor], lr: float | None) -> StepResult:
        rate = self.lr if lr is None else lr
        if not 0 <= rate < math.inf:
            raise ConfigError(f"lr = {rate} must be zero or a positive number")
        result = self.engine.step(self._micro_batches(tensors), rate)
        self._times.add(result.time_s)
        return result

    def _first_step(self, first: FirstStep, tensors: Mapping[str, Tensor], lr: float | None) -> StepResult:
        # Different batches would train silently on wrong data.
        self._cutter.check_same(tensors)
        # A first step that failed before has left seconds.
        first = replace(first, seconds={})
        with first.watching(self.engine):
            result = self._step(tensors, lr)
        self._first = None
        self.engine.check_bytes()
        if first.times:
            everyone = tuple(range(self._joined.world_size))
            predicted = predict(self.engine, first.seconds, lambda what: self._progress(0, f"MEASURE {what}", everyone))
            self._joined.patience.expect(self.plan.outer, predicted.step_s)
            self._times.expect(predicted)
        return result

    def _micro_batches(self, tensors: Mapping[str, Tensor]) -> list[Batch]:
        found = self._cutter.micro_batches(tensors, self.num_steps)
        program = self.engine.program
        tensor, shapes = program.model.tensor, {tuple(batch.labels.shape) for batch in found}
        # A context axis cuts micro-batches itself, and checks them.
        if tensor.degree > 1 and not is_context_parallel(program.mesh, self.plan) and shapes != {tensor.shape}:
            raise ConfigError(
                f"micro-batches have labels of shape {', '.join(map(str, sorted(shapes)))}, but the tensor axis has "
                f"messages for {tensor.shape}: set plan.micro_batch and activation to the sizes of the batch"
            )
        return found

    def _progress(self, counter: int, instruction: object, waiting_on: tuple[int, ...]) -> None:
        self._joined.at(self.num_steps, counter, instruction, waiting_on)
