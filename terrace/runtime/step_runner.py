"""The step runner executes a program on the blocks of a rank.

Passes over blocks (terrace.runtime.passes), messages of parameters and gradients (terrace.runtime.block_messages),
updates and exchanges between islands (terrace.runtime.islands) each have a class whose methods are the instructions. A
gather, a free, a reduction or a recomputation happens exactly where the program says; no hooks are involved.
Communication goes to the lane of the outermost tier it crosses. An instruction waits only for its operands:

    FORWARD, BACKWARD   the gathers (for whole parameters, the refreshes) of its parameters; another stage's message
    BACKWARD            all reductions but the newest, so that at most one gradient is in flight
    BACKWARD            the FETCH of its input
    EVICT               the write of the EVICT before it
    FETCH               the write of its EVICT
    GATHER              on its lane: the refresh of its block
    SYNC                on its lane: the last reduction of its block
    TIE                 every reduction, and the other stage
    COUNT               every FORWARD of a block with a router
    CLIP                every SYNC, and COUNT
    UPDATE              the ORTHOGONALISE of its block, under Muon
    REFRESH             the UPDATE of its block, if the host's cores update
    AGREE               the SYNC of its block; the UPDATE behind it waits for AGREE on the host's cores
    OUTER_START         on its lane: the OUTER_COUNT before it
    OUTER_APPLY         the OUTER_START of its block, in this program or an earlier one, and the last step's refresh
"""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from terrace.plan.wire import MessageClass
from terrace.program.instruction import Instruction, Op
from terrace.program.program import Program
from terrace.runtime.batch import Batch
from terrace.runtime.block_messages import GradientMessages, ParameterMessages
from terrace.runtime.clock import Clock
from terrace.runtime.comm import Comm
from terrace.runtime.in_block import InBlockAxis
from terrace.runtime.islands import Exchanges, Island
from terrace.runtime.layer_wise import Agreements
from terrace.runtime.linear import WeightGradients
from terrace.runtime.messages import Messages, Pending, Progress, no_progress
from terrace.runtime.model_state import ModelState
from terrace.runtime.objective import Objective
from terrace.runtime.passes import BlockCalls, Passes
from terrace.runtime.routing.load import Load
from terrace.runtime.routing.passages import Passages
from terrace.runtime.score_clip import ScoreClip
from terrace.runtime.step_sums import StepSums, end_gradients, own_sums


class Updates:
    """COUNT, CLIP, ORTHOGONALISE and UPDATE on one rank."""

    def __init__(
        self,
        state: ModelState,
        messages: Messages,
        passes: Passes,
        parameters: ParameterMessages,
        gradients: GradientMessages,
        load: Load,
        scores: ScoreClip,
        island: Island,
    ) -> None:
        self._state, self._messages, self._passes, self._gradients = state, messages, passes, gradients
        self._parameters = parameters
        self._load, self._scores, self._island = load, scores, island
        self.lr = 0.0
        self.sums = StepSums.of(torch.zeros(3))  # until the first CLIP
        self.gives_up = False  # at the next CLIP of a training step, whatever its sums
        self._scale = self._host_scale = torch.ones(())
        self._on_host = state.program.plan.keep.updates_on_host
        self._layer_wise = state.program.plan.keep.layer_wise
        self._agreements = Agreements(state, messages, passes, gradients)
        self._counts = list[Pending]()
        self._whole: dict[int, Pending] = {}

    def count(self, now: Instruction) -> None:
        (transfer,) = self._messages.program.message(now).transfers
        collectives = self._messages.comm.collectives
        self._counts.append(self._messages.submit(lambda: self._load.add_up(collectives, transfer)))

    def clip(self, now: Instruction) -> None:
        """CLIP. Raises `GivenUp` on every rank if the sums of a training step are not finite."""
        messages, state, calls, step = self._messages, self._state, self._passes.calls, self._passes.step
        self._passes.await_sends()
        self._gradients.await_all()
        while self._counts:
            messages.wait(self._counts.pop(), f"wait {MessageClass.COUNTS.value}")
        flats = state if calls.trains else ()
        of_routers = calls.passages.sums
        values = own_sums(
            flats, step.loss, calls.batches, calls.objective, of_routers, counts_loss=self._counts_loss(calls.last)
        )
        total, (transfer,) = list[Tensor](), messages.program.message(now).transfers
        collectives, largest = messages.comm.collectives, self._scores.largest
        pending = messages.submit(lambda: total.append(collectives.sum_control(transfer, values, largest)))
        messages.wait(pending, "wait control")
        counts = self._load.sums if calls.trains else None
        self.sums = StepSums.of(total[0], len(of_routers), state.loss_scale.value, counts, len(largest))
        self._scale = self.sums.scale(state.settings.clip)
        self._host_scale = self.sums.on_host().scale(state.settings.clip) if calls.trains else self._scale
        messages.clock.mark("clip")
        if calls.trains:
            end_gradients(flats, state.edges.values(), self.sums, self.gives_up)
            self._load.settle(self.sums.counts)
            self._scores.settle(self.sums.largest)
            self._island.numbers.stepped(self.sums.loss, self.sums.num_tokens)
            self._gradients.resting.begin_updates()

    def _counts_loss(self, last: int) -> bool:
        # On the stage that has the head, where all tensor ranks have the same.
        program, rank = self._messages.comm.program, self._messages.comm.rank
        return last in program.stage.own and not any(program.model.tensor.both.coordinates(rank))

    def orthogonalise(self, now: Instruction) -> None:
        self._gradients.resting.take(now.block)
        for flat in self._state.trainable(now.block):
            flat.prepare_whole(self._scale)
        collectives = self._messages.comm.collectives
        gather = self._messages.of_block(lambda flat, transfer: flat.gather_whole(collectives, transfer))
        self._whole[now.block] = self._messages.submit(gather)
        self._messages.clock.mark("update")

    def update(self, now: Instruction) -> None:
        if now.block in self._whole:
            self._messages.wait(self._whole.pop(now.block), "wait orthogonalise")
        if self._on_host:
            self._update_on_host(now)
            return
        self._gradients.resting.take(now.block)
        self._parameters.open(now.block)
        for flat in self._state.trainable(now.block):
            flat.update(self._scale, self.lr)
        self._scores.scale(now.block, self._state.trainable(now.block))
        self._gradients.resting.free(now.block)
        self._messages.clock.mark("update")

    def agree(self, now: Instruction) -> None:
        self._agreements.agree(now, counts_tokens=self._counts_loss(self._passes.calls.last))

    def _update_on_host(self, now: Instruction) -> None:
        if not self._layer_wise:
            scale = self._host_scale
            self._parameters.update_on_host(now, lambda: (scale,), self.lr)
            return
        agreed = self._agreements.scale(now.block)
        if not self.gives_up:
            self._parameters.update_on_host(now, agreed, self.lr)


class StepRunner:
    """Executes programs on one rank, one after the other.

    `axes` are the in-block axes applied to the modules of `state`; their messages use the same `clock` and `weights`.
    `passages` tell the mixtures which micro-batch runs; `load` counts their tokens. With `compiled`, autograd
    computes the weight gradients; otherwise the runtime does, when the program says.
    """

    def __init__(
        self,
        state: ModelState,
        comm: Comm,
        *,
        objective: Objective,
        clock: Clock,
        weights: WeightGradients,
        load: Load,
        axes: Sequence[InBlockAxis] = (),
        passages: Passages,
        compiled: bool = False,
        progress: Progress = no_progress,
    ) -> None:
        self.messages = messages = Messages(comm, state.flats, clock, progress)
        for axis in axes:
            axis.in_block.waiting_on = messages.waiting_on  # computing then waits for other ranks, too
            axis.in_block.at_gap = messages.gaps.leave
        # Compiled blocks hide linear layers inside one autograd node, which computes their weight gradients.
        for flat in state if not compiled else ():
            if flat.spec.trainable:
                weights.own(flat.parameters, flat.gradient.views)
        self.parameters = ParameterMessages(state, messages)
        self.gradients = GradientMessages(state, messages, self.parameters)
        calls = BlockCalls(state, objective, axes, passages)
        self.scores = ScoreClip(comm.program, comm.rank, state.modules, state.settings.qk_clip, comm.device)
        self.passes = Passes(calls, state, messages, self.parameters, self.gradients, weights, load, self.scores)
        self.island, self._load = Island(state), load
        self.exchanges = Exchanges(self.island, messages, self.parameters)
        self.updates = Updates(
            state, messages, self.passes, self.parameters, self.gradients, load, self.scores, self.island
        )
        self.declared_bytes = Counter[tuple[MessageClass, str]]()  # by all programs that were run
        self.handlers = self._methods()

    def _methods(self) -> dict[Op, Callable[[Instruction], None]]:
        passes, parameters, gradients, updates = self.passes, self.parameters, self.gradients, self.updates
        return {
            Op.GATHER: parameters.gather,
            Op.FREE: parameters.free,
            Op.REFRESH: parameters.refresh,
            Op.FORWARD: passes.forward,
            Op.BACKWARD: passes.backward,
            Op.BACKWARD_INPUT: passes.backward_input,
            Op.BACKWARD_WEIGHT: passes.backward_weight,
            Op.EVICT: passes.evict,
            Op.FETCH: passes.fetch,
            Op.RECV: passes.receive,
            Op.SEND: passes.send,
            Op.REDUCE: gradients.reduce,
            Op.SYNC: gradients.sync,
            Op.TIE: gradients.tie,
            Op.COUNT: updates.count,
            Op.CLIP: updates.clip,
            Op.AGREE: updates.agree,
            Op.ORTHOGONALISE: updates.orthogonalise,
            Op.UPDATE: updates.update,
            Op.OUTER_COUNT: self.exchanges.count,
            Op.OUTER_START: self.exchanges.start,
            Op.OUTER_APPLY: self.exchanges.apply,
        }

    def run(self, batches: Sequence[Batch], lr: float = 0.0, program: Program | None = None) -> StepSums:
        """Run a program on this rank's micro-batches.

        Refreshes may still be in flight afterwards. Returns the sums of the last CLIP, in this program or an earlier
        one. Raises `GivenUp` on every rank, before the updates, if the sums of a training step are not finite.

        `program` may be any verified program for the same blocks and plan; the default is the program of `comm`.
        """
        program = program or self.messages.comm.program
        assert len(batches) == program.num_micros, f"{len(batches)} micro-batches for {program.num_micros}"
        self.messages.comm.groups.take_over(self.drain)
        self.messages.program, self.updates.lr = program, lr
        self.passes.begin(batches)
        if program.trains:
            self._load.begin()
            self.scores.begin()
        self.messages.clock.start()
        with torch.set_grad_enabled(program.trains):
            self.messages.run(program, self.handlers)
        self.exchanges.ended()
        self.declared_bytes.update(program.sent_bytes)
        return self.updates.sums

    def drain(self) -> None:
        self.parameters.drain()
        self.exchanges.drain()
