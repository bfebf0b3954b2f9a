"""The engine, which runs training steps of blocks under a plan."""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from terrace.accelerator import random_state
from terrace.base.errors import ModelError, ProgramError
from terrace.model.liger import any_served
from terrace.plan.balance_rules import check_balance
from terrace.plan.context import is_context_parallel
from terrace.plan.members import Formats, most_micros, with_formats
from terrace.plan.outer import NO_EXCHANGE, Exchange
from terrace.plan.pruning import check_pruning
from terrace.plan.routes import lossy_messages
from terrace.plan.wire import MessageClass
from terrace.program.cycle import exchanging, outer_program
from terrace.program.exchange import OuterResult
from terrace.program.instruction import Phase
from terrace.program.loads import Loads
from terrace.program.lowering import build, build_stages, forward_programs, restoring_program
from terrace.program.program import Program
from terrace.program.report import StepReport
from terrace.program.verify import verify
from terrace.runtime.axes import apply_axes
from terrace.runtime.batch import Batch
from terrace.runtime.batch_checks import check_batches
from terrace.runtime.byte_account import ByteAccount, Declares
from terrace.runtime.clock import make_clock
from terrace.runtime.comm import Comm
from terrace.runtime.compiled import compile_blocks, compile_parts, why_parts
from terrace.runtime.context.axis import check_declared
from terrace.runtime.finite import Examination, NotFinite, agree, examine
from terrace.runtime.further_tokens import with_further_tokens
from terrace.runtime.hidden import OutputMatrix, reading
from terrace.runtime.kept.below import below_of
from terrace.runtime.linear import WeightGradients
from terrace.runtime.malloc import keep_freed_memory, return_freed_memory
from terrace.runtime.model_state import ModelState, check_settings
from terrace.runtime.objective import Objective, check_objective, ignored_label, reading_tokens, reading_values
from terrace.runtime.random_state import restored, undisturbed
from terrace.runtime.routing.load import Load
from terrace.runtime.routing.passages import Passages
from terrace.runtime.setup import ALONE, DEFAULTS, Blocks, RankSetup, Training, Workload
from terrace.runtime.step_runner import StepRunner
from terrace.runtime.step_sums import GivenUp, StepResult, StepSums, step_result
from terrace.runtime.token_numbers import TokenNumbers


class Engine:
    """Trains `blocks` under a plan on one rank of a cluster. Owns a `Comm`, a `ModelState` and a `StepRunner`.

    Every rank of the world constructs it at the same point; `torch.distributed` must be initialised when the world
    has more than one rank. In a pipeline a rank keeps only the states of its stage's blocks. `state.modules` are the
    modules that then run in place of `blocks`.

    Raises `PlanError`, `ProgramError` or `ModelError` before anything is allocated.
    """

    _forward: Program | None = None  # the default of `evaluate`, made by its first call
    _given: Program | None = None  # the last that `evaluate` was given

    def __init__(
        self,
        blocks: Blocks,
        workload: Workload,
        objective: Objective,
        training: Training = DEFAULTS,
        setup: RankSetup = ALONE,
    ) -> None:
        modules, plan, balance, rank = blocks.modules, workload.plan, training.balance, setup.rank
        check_settings(plan, training.optimizer)
        check_objective(modules[-1], objective)
        specs = blocks.specs(balance)
        self.program = workload.program_of(rank, specs)
        check_balance(balance, self.program.mesh, plan, specs)
        check_pruning(workload.cluster, plan, specs, training.pruning)
        # Whole compiled blocks compute the gradients of their weights themselves.
        whole_blocks = training.compiled and not why_parts([self.program], any_served(modules))
        self.rank, self.device = rank, torch.device(setup.device)
        if is_context_parallel(self.program.mesh, plan):
            check_declared(dict(zip(blocks.names, modules, strict=True)))
        self._is_refreshed = not (plan.messages or MessageClass.REFRESH.value in plan.wire)  # these may round
        self._programs = {NO_EXCHANGE: self.program}
        self.clock, weights = make_clock(self.device), WeightGradients()
        self.comm = Comm(self.program, rank, self.device, timeout=setup.timeout, pacer=setup.pacer)
        self.passages = Passages(
            modules, self.program, balance, rank, self.device, training.seed, ignored_label(objective)
        )
        # Not the new modules' values: initial values are slices of the whole parameters.
        self.axes, modules, objective = apply_axes(modules, objective, self.comm, self.clock, weights)
        self.below = below_of(
            self.program, self.device, setup.keep_folder, self.comm.ledger, self.comm.meter, self.clock, setup.pacer
        )
        if plan.keep.is_below and self.device.type == "cpu":  # the values of one block at a time
            return_freed_memory()
        self.state = ModelState(
            self.program,
            rank,
            modules,
            specs=specs,
            settings=training.optimizer,
            initial=blocks.initial,
            device=self.device,
            meter=self.comm.meter,
            seed=training.seed,
            below=self.below,
            pruning=training.pruning,
        )
        if self.device.type == "cpu":  # now, so that the memory of initial values is returned
            keep_freed_memory()
        if training.compiled:
            (compile_blocks if whole_blocks else compile_parts)(self.state.modules.values())
        self.load = Load(self.program, self.state.modules, balance, self.state.choices, self.device)
        self.passages.follow(self.state.choices)
        self.runner = StepRunner(
            self.state,
            self.comm,
            objective=objective,
            clock=self.clock,
            weights=weights,
            load=self.load,
            axes=self.axes,
            passages=self.passages,
            compiled=whole_blocks,
            progress=setup.progress,
        )
        by_batch: list[Declares] = [*self.axes, self.below]
        self.bytes = ByteAccount(self.program, self.comm.ledger, self.runner.declared_bytes, by_batch)
        self.below.on_piece(self.runner.messages.moved)
        self.island = self.runner.island

    def step(self, batches: Sequence[Batch], lr: float) -> StepResult:
        """Run one training step on this rank's micro-batches, and the exchange between islands due at its end.

        Positions of a batch are passed to blocks as a second argument. The tensors must not change during the step.
        Raises `ModelError` if a block does not accept positions. Raises `NonFiniteError` on every rank of the island
        if loss or gradient is inf or nan: the state is unchanged, and the error names rank, micro-batch and block.
        Under `keep.order = "backward"` blocks whose gradients are finite have been updated: resume from a checkpoint.
        """
        self.settle()
        result = self._run(batches, lr, self._exchanging(self.island.next()))
        if isinstance(result, NotFinite):
            agree(self.comm, result)
        assert isinstance(result, StepResult), "the ranks agree on an error"
        return result

    def deal(self, shares: Sequence[int] = (), formats: Formats = MappingProxyType({})) -> None:
        """Give the members of the outermost tier other numbers of micro-batches from the next step on, or the
        boundaries of a pipeline across it other formats.

        Every rank calls this between the same two steps. No state moves. Raises `PlanError` for what the plan cannot
        have.
        """
        own = self.program
        plan = replace(with_formats(own.plan, own.cluster, formats) if formats else own.plan, shares=tuple(shares))
        micros = most_micros(plan, own.num_micros)
        workload = Workload(cluster=own.cluster, plan=plan, num_micros=micros, sequence=own.model.sequence)
        self.program = workload.program_of(self.rank, self.state.specs)
        self.comm.collectives.errors.messages = lossy_messages(self.program.model.stage_layout, plan)
        self._programs = {NO_EXCHANGE: self.program}
        self._forward = self._given = None

    def finish(self) -> list[OuterResult]:
        """Exchange all pending changes between islands, after which they have equal parameters.

        Every rank calls this, after the same step. Does nothing without islands.
        """
        results = list[OuterResult]()
        with self.bytes.outside():
            for exchange in self.island.closing():
                program = outer_program(self.program, exchange)
                verify(program, self.rank)
                with torch.no_grad():
                    self.runner.run((), program=program)
                results += self.island.applied(exchange)
            self.drain()
        return results

    def take_share(self, num_micros: int) -> None:
        """Make steps of `num_micros` micro-batches from now on, by a program of its own. Every rank calls this.

        Not for plans with islands or shares, whose programs differ between members.
        """
        program, specs = self.program, self.state.specs
        if num_micros != program.num_micros:
            sequence, stage = program.model.sequence, program.stage.index
            program = build(program.cluster, program.plan, specs, num_micros, sequence, stage)
            verify(program, self.rank)
        self._programs = {NO_EXCHANGE: program}

    def _exchanging(self, exchange: Exchange) -> Program:
        """The training program with `exchange` at its end, cached; a cycle has only a few."""
        found = self._programs.get(exchange)
        if found is None:
            found = self._programs[exchange] = exchanging(self.program, exchange)
            verify(found, self.rank)
        return found

    def evaluate(self, batches: Sequence[Batch], program: Program | None = None) -> StepResult:
        """Mean loss and token count of one step's micro-batches. The state does not change; `grad_norm` is 0.

        Every rank calls this. `program` is a forward program (terrace.program.forward_programs), by default built at
        the first call, in a pipeline from the programs of all stages. Raises `ProgramError` for a program of another
        phase, cluster, plan or model, and otherwise as `step`.
        """
        if program is None:
            if self._forward is None:
                self._forward = forward_programs(self.stage_programs())[self.program.stage.index]
                verify(self._forward, self.rank)
            return self._evaluate(batches, self._forward)
        if program is not self._given:
            if program.phase is not Phase.FORWARD:
                raise ProgramError(f"an evaluation runs a program of forwards, not one for phase {program.phase.value}")
            self._check_own(program)
            verify(program, self.rank)
            self._given = program
        return self._evaluate(batches, program)

    def _evaluate(self, batches: Sequence[Batch], program: Program) -> StepResult:
        self.settle()
        aside = undisturbed(self.state.modules.values(), self.comm.collectives.errors, self.device)
        with self.bytes.outside(), aside:
            result = self._run(batches, 0.0, program)
        assert isinstance(result, StepResult), "only training steps are given up"
        return result

    def score(self, batches: Sequence[Batch]) -> list[TokenNumbers]:
        """Token numbers of each of one step's micro-batches; empty on stages other than the last.

        Every rank calls this. The state does not change. Raises `ModelError` unless the engine's objective is a
        `TokenObjective`, and under a plan that splits rows over ranks; otherwise as `evaluate`.
        """
        objective, found = reading_tokens(self.runner.passes.calls.objective)
        self._read(batches, objective)
        return found

    def values(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Values (B, S) of each micro-batch. Needs a `ValueObjective`; otherwise as `score`."""
        objective, found = reading_values(self.runner.passes.calls.objective)
        self._read(batches, objective)
        return found

    def hidden(self, batches: Sequence[Batch], *, reads_matrix: bool = True) -> tuple[list[Tensor], OutputMatrix]:
        """Hidden states (B, S, H) of each micro-batch, and this rank's rows of the output matrix if it `reads_matrix`.

        Needs a `HiddenReader`. Both are empty on stages other than the last; otherwise as `score`.
        """
        last = len(self.program.blocks) - 1
        owners = (last, *self.program.blocks[last].tied_to)
        frees = any(flat.layout.frees for block in owners for flat in self.state.flats.get(block, ()))
        objective = reading(self.runner.passes.calls.objective, reads_matrix=reads_matrix, copies=frees)
        self._read(batches, objective)
        return objective.found, objective.matrix

    def _read(self, batches: Sequence[Batch], objective: Objective) -> None:
        if self.comm.context_group is not None:
            raise ModelError("a rank scores whole rows: leave out the context axis and balance")
        own, self.runner.passes.calls.objective = self.runner.passes.calls.objective, objective
        try:
            self.evaluate(batches)
        finally:
            self.runner.passes.calls.objective = own

    def stage_programs(self) -> list[Program]:
        """The training programs of all stages. Raises `ProgramError` if this rank's has a custom order."""
        program = self.program
        if program.stage.num_stages == 1:
            return [program]
        specs, num_micros, sequence = self.state.specs, program.num_micros, program.model.sequence
        programs = build_stages(program.cluster, program.plan, specs, num_micros, sequence)
        if programs[program.stage.index].stage != program.stage:
            raise ProgramError("the step's program has orders of its own: only its caller has those of all stages")
        return programs

    def _check_own(self, program: Program) -> None:
        own = self.program
        expected = (own.cluster, own.plan, own.blocks, own.stage.index, own.stage.held)
        if (program.cluster, program.plan, program.blocks, program.stage.index, program.stage.held) != expected:
            raise ProgramError(
                f"the {program.phase.value} program was built for another cluster, plan, model or stage than the engine"
            )

    def _run(self, batches: Sequence[Batch], lr: float, program: Program) -> StepResult | NotFinite:
        batches, drawn = self._taken(batches, program), random_state(self.device)
        try:
            sums = self.runner.run(batches, lr, program)
        except GivenUp as given_up:
            self.runner.drain()  # updates in the backward may be under way
            if self.state.loss_scale.skips(given_up.sums.figures[0]):
                self.bytes.give_up()
                return replace(self._result(given_up.sums), skipped=True)
            return NotFinite(self._result(given_up.sums), self._examined(batches, program, drawn).first)
        if program.trains:
            self.state.loss_scale.stepped()
            self.bytes.stepped()  # evaluations do not count: reports are means over training steps
        self.clock.mark("other")
        return self._result(sums, self.load.loads if program.trains else None, self.island.applied(program.exchange))

    def _taken(self, batches: Sequence[Batch], program: Program) -> Sequence[Batch]:
        depths = program.blocks[-1].operations.widths[0] - 1
        batches = [with_further_tokens(batch, depths) for batch in batches] if depths else batches
        for axis in self.axes:
            batches = axis.take(batches, trains=program.trains)
        self.passages.take(batches, trains=program.trains)
        check_batches(batches, self.state.modules.values(), self.runner.passes.calls.objective)
        return batches

    def _result(self, sums: StepSums, loads: Loads | None = None, outer: Sequence[OuterResult] = ()) -> StepResult:
        rounded, time_s = self.comm.collectives.errors.messages, self.clock.totals()
        found = step_result(sums, self.passages, rounded, time_s, loads, outer)
        return replace(found, loss_scale=sums.loss_scale) if self.state.loss_scale.scaling else found

    def examine(self, batches: Sequence[Batch]) -> Examination:
        """Run a step up to its CLIP and check the results of every block. Nothing is updated. Every rank calls this."""
        self.settle()
        return self._examined(self._taken(batches, self.program), self.program, random_state(self.device))

    def _examined(self, batches: Sequence[Batch], program: Program, drawn: Tensor) -> Examination:
        with restored(drawn, self.device):
            found = examine(self.runner, self.state, batches, program)
        self.bytes.give_up()
        return found

    @property
    def talks_inside(self) -> bool:
        """Whether blocks communicate while they run, so that other ranks wait for a block that runs here."""
        return bool(self.axes)

    def drain(self) -> None:
        """Wait until every parameter is up to date."""
        self.state.recover()
        self.runner.drain()
        self.below.drain()

    def check_bytes(self) -> None:
        """Drain, then compare the bytes sent with those that the executed programs declare.

        Raises `ProgramError` if they differ.
        """
        self.drain()
        self.bytes.check(self.rank)

    def report(self, time_s: dict[str, float]) -> StepReport:
        """The measured report of a step that took `time_s`. Bytes are means over all training steps so far.

        Exchanges between islands are included, over whole cycles once there is one; evaluations, restores and
        `finish` are not.
        """
        sent, memory_bytes, load = self.bytes.of_a_step(), self.comm.meter.peak(), self.load.mean_figures
        return StepReport(time_s=time_s, sent_bytes=sent, memory_bytes=memory_bytes, load=load)

    def refresh(self) -> None:
        """Run the restoring program: refresh all working copies from the masters, as after a checkpoint load."""
        self._is_refreshed = True
        self.drain()  # a refresh in flight would overwrite new values with old ones
        program = restoring_program(self.program)
        verify(program, self.rank)
        with torch.no_grad():
            self.runner.run((), program=program)
        self.bytes.leave_out(program.sent_bytes)
        self.drain()

    def settle(self) -> None:
        """Bring parameters up to date for the next step; refresh them before the first if messages round. All ranks."""
        self.state.recover()
        if not self._is_refreshed:
            self.refresh()

    def close(self) -> None:
        """Stop the lanes. The process groups are not destroyed."""
        self.below.close()
        self.comm.close()
        self.passages.remove()
        self.runner.scores.remove()
        for axis in self.axes:
            axis.remove()
