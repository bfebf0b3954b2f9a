"""The engine: blocks, a plan and a world, ready to step."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from terrace.base.errors import PlanError, ProgramError, TrainingError
from terrace.cluster import Cluster
from terrace.comm import Among, Between, Collectives, Ledger, Meter, Pacer, TierGroups, make_lane, relative_errors
from terrace.comm.groups import Meeting
from terrace.model.spec import BlockSpec, ParamSpec
from terrace.plan import MessageClass, Plan, step_bytes
from terrace.plan.context import Pool, is_spread
from terrace.plan.edges import rounds_of
from terrace.plan.layout import INSIDE
from terrace.plan.mesh import Mesh
from terrace.plan.slices import slice_blocks
from terrace.program import Program, StepReport, build_stages, verify, verify_stages
from terrace.runtime.batch import Batch, check_positions
from terrace.runtime.block_state import BlockState
from terrace.runtime.clock import make_clock
from terrace.runtime.compiled import check_compiles, compile_blocks
from terrace.runtime.context import ContextAxis, Mover, check_declared
from terrace.runtime.describe import describe, replace_parameters, with_dims
from terrace.runtime.executor import Executor, Objective, Progress
from terrace.runtime.heap import return_large_buffers
from terrace.runtime.linear import WeightGradients
from terrace.runtime.means import Means
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.tensor import make_axis, parallelise, slice_value

InitialValue = Callable[[str, str, tuple[int, ...]], Tensor]  # (block name, parameter name, shape) -> values


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One step: mean loss over the valid tokens of the global batch, its gradient norm before clipping.

    `quantisation_error` is the relative error of each message class that travelled in a block format since
    the step before was summed up: REFRESH comes after that, so its figure is that of the step before.
    """

    loss: float
    grad_norm: float
    num_tokens: int
    time_s: dict[str, float]
    quantisation_error: dict[str, float]


_EXCHANGE_TIMEOUTS = 5


def _no_progress(counter: int, instruction: object, waiting_on: tuple[int, ...]) -> None:
    """Nobody is told."""


class Engine:
    """Trains `blocks` under `plan` on this rank's part of `cluster`.

    Every rank of the world constructs it at the same point; `torch.distributed` must be initialised when the world
    has more than one rank. The parameters of `blocks` are replaced by views of flat buffers, in the compute
    dtype. Initial values come from `initial`, or else from the blocks as they are, which then must be the same on
    every rank. With a pipeline a rank keeps the states of its stage's blocks alone. Tensor and pipeline axes need the
    dims of parameters, from the specs `declared`, and the length of a `sequence`; what a tensor axis then runs in place
    of `blocks` is `states[i].module`. A `pacer` slows every message to the rate of its tier. `compiled` runs each
    block through `torch.compile`.

    Raises `PlanError`, `ProgramError` or `ModelError` before anything is allocated.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        *,
        names: Sequence[str] | None = None,
        cluster: Cluster,
        plan: Plan,
        num_micros: int,
        objective: Objective,
        rank: int = 0,
        device: torch.device | str = "cpu",
        adamw: OptimizerConfig | None = None,
        initial: InitialValue | None = None,
        freeze: Sequence[str] = (),
        timeout: timedelta = timedelta(minutes=10),
        progress: Progress = _no_progress,
        program: Program | None = None,
        declared: Sequence[BlockSpec] = (),
        sequence: int = 0,
        pacer: Pacer | None = None,
        compiled: bool = False,
    ) -> None:
        names = list(names or (f"block.{index}" for index in range(len(blocks))))
        adamw = self.settings = _settings_for(plan, adamw)
        specs = self.whole = with_dims(describe(blocks, names, freeze), declared)
        self.program = _checked(program, rank, cluster, plan, specs, num_micros, sequence)
        verify(self.program, rank)
        if compiled:
            check_compiles([self.program])
        self.rank = rank
        self.device = torch.device(device)
        if self.device.type == "cpu":
            return_large_buffers()
        self._ledger, self._meter, self.pacer = Ledger(), Meter(), pacer
        self._num_steps = 0
        self._compiled = compiled  # then autograd computes the weight gradients
        pool = Pool.of(cluster, plan, rank) if is_spread(self.program.mesh, plan) else None
        if pool is not None:
            check_declared(dict(zip(names, blocks, strict=True)))
        self.groups = self._make_groups(rank, timeout, pool)
        # Its own group, since the world's may have no timeout; longer, since ranks meet in it after slow writes.
        everyone = _EXCHANGE_TIMEOUTS * timeout
        self._clock = make_clock(self.device)
        self.collectives = self._make_collectives(self._ledger, self._meter)
        self._between = Between(self.groups, self.program.mesh, self.program.layout.tiers, rank, self._ledger)
        self._between.pacer = pacer
        values = [dict(block.named_parameters()) for block in blocks]
        self._weights = WeightGradients()
        self._lanes = {lane: make_lane(self.device) for lane in {0, *self.groups.lanes}}
        axis, self._context = None, None
        if self.program.tensor.degree > 1 or pool is not None:
            means = Means(self._lanes.setdefault(INSIDE, make_lane(self.device)), self._clock, self._weights)
        if self.program.tensor.degree > 1:
            axis = make_axis(self.program, self.collectives, rank, means, self.device, self._meter)
            blocks, objective = parallelise(blocks, self.program, rank, axis, objective)
        if pool is not None:
            self._context = self._make_context(pool, blocks, means)
        self._everyone = dist.new_group(timeout=everyone) if cluster.world_size > 1 else None
        held = self.program.stage.held
        self.states = [self._make_state(index, blocks[index]) for index in held]
        self._adopt([blocks[index] for index in held], [values[index] for index in held], initial, adamw)
        if compiled:
            compile_blocks(blocks[index] for index in held)
        self._executor = Executor(
            self.program,
            dict(zip(held, self.states, strict=True)),
            self.collectives,
            self._between,
            self._lanes,
            self._clock,
            self._weights,
            objective,
            adamw.clip,
            rank,
            progress,
            axis,
            self._context,
        )

    def step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        """Run one step on this rank's micro-batches of (inputs, labels), or of (inputs, labels, positions).

        `positions` int64 (B, S) says where each token stands in its own document; blocks then get it as a second
        argument, and nothing may change it meanwhile. Raises `ModelError` when a block takes none, and
        `TrainingError` naming the message when one that travels in a block format holds inf or nan.
        """
        if self._context is not None:
            batches = self._context.take(batches)
        check_positions(batches, (state.module for state in self.states))
        sums = self._executor.run(batches, lr)
        self._num_steps += 1
        figures = torch.stack([sums.loss, sums.grad_norm, sums.num_tokens])
        loss, norm, count, *rounding = torch.cat([figures, sums.rounding]).tolist()
        self._clock.mark("other")
        errors = self.collectives.errors
        if not all(math.isfinite(value) for value in rounding):
            named = "; ".join(errors.not_finite()) or "a message of another rank"
            raise TrainingError(f"inf or nan in {named}: lower optimizer.lr and resume from the last checkpoint")
        return StepResult(
            loss=loss,
            grad_norm=norm,
            num_tokens=int(count),
            time_s=self._clock.totals(),
            quantisation_error=relative_errors(errors.messages, rounding),
        )

    @property
    def talks_inside(self) -> bool:
        """Whether blocks send messages while they run, which are counted, and which other ranks must wait for."""
        return self.program.tensor.degree > 1 or self._context is not None

    def drain(self) -> None:
        """Wait until every parameter is up to date."""
        self._executor.drain()

    def check_bytes(self) -> None:
        """Drain, and hold the ledger against the plan's formula.

        Raises `ProgramError` when a byte was sent that the plan does not declare, or the reverse.
        """
        self.drain()
        measured = self._ledger.total()
        expected = {key: num_bytes * self._num_steps for key, num_bytes in self.expected_bytes().items()}
        if self._context is not None:
            expected = {**self._context.declared, **expected}  # where there is no formula the spreads say it
        for key in sorted(measured.keys() | expected.keys()):
            sent, declared = measured.get(key, 0), expected.get(key, 0)
            if sent != declared:
                message, tier = key
                raise ProgramError(
                    f"rank {self.rank} sent {sent} bytes of {message} on tier {tier!r} in {self._num_steps} steps, "
                    f"but the plan declares {declared}"
                )

    def expected_bytes(self) -> dict[tuple[MessageClass, str], int]:
        """Return what the plan's formula says a step sends."""
        program = self.program
        stage = program.stage if program.stage.num_stages > 1 else None
        return step_bytes(program.cluster, program.plan, program.blocks, program.num_micros, program.sequence, stage)

    def report(self, time_s: dict[str, float]) -> StepReport:
        """Return the measured report of a step with these times; bytes are the mean of all steps so far."""
        steps = max(1, self._num_steps)
        sent = {key: total // steps for key, total in self._ledger.total().items()}
        return StepReport(time_s=time_s, sent_bytes=sent, memory_bytes=self._meter.peak())

    def sent_bytes(self) -> dict[tuple[MessageClass, str], int]:
        """Return what this rank has sent in all steps so far."""
        return self._ledger.total()

    def memory_bytes(self) -> dict[str, int]:
        """Return the peak of each category of model state so far."""
        return self._meter.peak()

    def refresh_all(self) -> None:
        """Bring every working copy up to date with the master parameters, as after loading a checkpoint.

        Not counted in the ledger: it belongs to no step.
        """
        self._executor.drain()  # a refresh under way would bring old values after the new ones
        collectives = self._make_collectives(Ledger(), Meter())
        for state in self.states:
            state.publish()
            state.refresh(collectives)

    def exchange(self, value: Any) -> list[Any]:
        """Return the small picklable `value` of every rank, in rank order. Every rank calls this."""
        if self.program.cluster.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.program.cluster.world_size
        dist.all_gather_object(values, value, group=self._everyone)
        return values

    def close(self) -> None:
        """Stop the lanes. The groups stay with the world."""
        failed = self._between.failed or any(
            lane.failed for lane in self._lanes.values()
        )  # others may then wait for ranks that are gone
        for lane in self._lanes.values():
            lane.close(wait=not failed)
        self._between.close(wait=not failed)
        if self._context is not None:
            self._context.remove()

    def _make_collectives(self, ledger: Ledger, meter: Meter) -> Collectives:
        program = self.program
        return Collectives(
            self.groups, program.everyone, program.plan, ledger, meter, self.device, self.pacer, program.world
        )

    def _make_state(self, block: int, module: nn.Module) -> BlockState:
        program = self.program
        is_copy = block in program.stage.copies
        return BlockState(
            program.blocks[block],
            module,
            program.flats[block],
            self.rank,
            program.plan,
            self.device,
            self._meter,
            is_copy=is_copy,
        )

    def _make_context(self, pool: Pool, blocks: Sequence[nn.Module], means: Means) -> ContextAxis:
        program, member = self.program, pool.members.index(self.rank)
        among = Among(self.groups, pool, member, program.layout.tiers, self._ledger, self.device, self.pacer)
        held = [blocks[index] for index in program.stage.held]
        return ContextAxis(Mover(pool, member, among, means), program, held, self.device)

    def _make_groups(self, rank: int, timeout: timedelta, pool: Pool | None) -> TierGroups:
        program = self.program
        parts = {flat.layout.axes: flat.layout for flats in program.flats for flat in flats}
        lines = (program.tensor.rows, program.tensor.columns, program.tensor.both)
        return TierGroups(
            program.everyone,
            rank,
            timeout,
            parts.values(),
            lines,
            program.world,
            list(_meetings(program, rank)),
            () if pool is None else pool.members,
        )

    def _adopt(
        self,
        blocks: Sequence[nn.Module],
        values: Sequence[dict[str, nn.Parameter]],
        initial: InitialValue | None,
        adamw: OptimizerConfig,
    ) -> None:
        replacements: dict[int, nn.Parameter] = {}
        for state, block, own in zip(self.states, blocks, values, strict=True):
            old = dict(block.named_parameters())

            def value(spec: ParamSpec, state: BlockState = state, own: dict[str, nn.Parameter] = own) -> Tensor:
                if initial is not None:
                    whole = initial(state.spec.name, spec.name, spec.whole or spec.shape)
                else:
                    whole = own[spec.name].detach()
                return slice_value(whole, spec, self.program, self.rank)

            state.initialise(value, adamw)
            for shard in state.shards:
                if shard.trainable is not None and not self._compiled:
                    self._weights.own(shard.trainable.parameters, shard.trainable)
            for name, new in state.named_parameters():
                replacements[id(old[name])] = new
        replace_parameters(blocks, replacements)


def _settings_for(plan: Plan, optimizer: OptimizerConfig | None) -> OptimizerConfig:
    """Return the optimizer's settings, or the default ones; raises `PlanError` for a plan of another optimizer."""
    optimizer = optimizer or OptimizerConfig()
    if plan.update != optimizer.name:
        raise PlanError(
            f"the plan is for the optimizer {plan.update!r}, the settings are of {optimizer.name!r}: give both the same"
        )
    return optimizer


def _meetings(program: Program, rank: int) -> Iterator[Meeting]:
    """Yield with whom of another stage a rank exchanges messages, round by round; alone where with nobody."""
    for number, pairs in enumerate(rounds_of(program.stage.pairs)):
        partners = {stage: other for pair in pairs for stage, other in (pair, pair[::-1])}
        stage = program.stage.index
        ranks = {rank, program.mesh.at_stage(rank, partners.get(stage, stage))}
        yield (number, pairs, program.mesh), tuple(sorted(ranks))


def _checked(
    program: Program | None,
    rank: int,
    cluster: Cluster,
    plan: Plan,
    specs: Sequence[BlockSpec],
    num_micros: int,
    sequence: int,
) -> Program:
    """Return the program of a rank: the one that is given, if it is for what is asked, or a new one."""
    mesh = Mesh.of(cluster, plan)
    stage = mesh.stage(rank)
    if program is None:
        programs = build_stages(cluster, plan, specs, num_micros, sequence)
        if len(programs) > 1:
            verify_stages(programs)
        return programs[stage]
    asked = (cluster, plan, slice_blocks(specs, mesh), num_micros, stage)
    if (program.cluster, program.plan, program.blocks, program.num_micros, program.stage.index) != asked:
        raise ProgramError("the program was built for another cluster, plan, model, number of micro-batches or stage")
    if program.sequence != sequence and (program.tensor.degree > 1 or program.stage.num_stages > 1):
        raise ProgramError(
            f"the program was built for sequences of {program.sequence} tokens, the engine is asked for {sequence}: "
            "its messages are activations; build it for the same length"
        )
    return program
