"""The step runner executes a program on the blocks of a rank.

A block's forward runs on a detached input, and its backward is an explicit call, so a gather, a free, a reduction or
a recomputation happens exactly where the program says; no hooks are involved. A backward has two parts, which a
program may run apart: the input gradient, and the weight gradients (terrace.runtime.linear). Communication goes to
the lane of the outermost tier it crosses. An instruction waits only for its operands:

    FORWARD, BACKWARD   the gathers (for whole parameters, the refreshes) of its parameters; another stage's message
    BACKWARD            all reductions but the newest, so that at most one gradient is in flight
    GATHER              on its lane: the refresh of its block
    SYNC                on its lane: the last reduction of its block
    TIE                 every reduction, and the other stage
    COUNT               every FORWARD of a block with a router
    CLIP                every SYNC, and COUNT
    UPDATE              the ORTHOGONALISE of its block, under Muon
    OUTER_START         on its lane: the OUTER_COUNT before it
    OUTER_APPLY         the OUTER_START of its block, in this program or an earlier one, and the last step's refresh
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from terrace.comm.lane import HERE
from terrace.plan.residency import recomputed
from terrace.plan.wire import MessageClass
from terrace.program.instruction import Instruction, Op
from terrace.program.message import Transfer
from terrace.program.program import Program
from terrace.runtime.activations import Activations, Kept, Key
from terrace.runtime.batch import Batch
from terrace.runtime.clock import Clock
from terrace.runtime.comm import Comm
from terrace.runtime.exchanges import Exchanges
from terrace.runtime.flat_param import FlatParam
from terrace.runtime.gap_messages import Carry, GapMessages, behind, carried
from terrace.runtime.head import chunked_head, head_loss
from terrace.runtime.in_block import InBlockAxis
from terrace.runtime.islands import Island
from terrace.runtime.linear import WeightGradients, WeightQueue
from terrace.runtime.model_state import ModelState
from terrace.runtime.objective import Objective, TokenObjective, ValueObjective
from terrace.runtime.pending import Pending
from terrace.runtime.progress import Progress, no_progress
from terrace.runtime.random_state import random_state, restored
from terrace.runtime.routing.load import Load
from terrace.runtime.routing.passages import Passages
from terrace.runtime.step_sums import StepSums, end_gradients, own_sums

_NO_STATE = torch.empty(0)
Gradient = tuple[FlatParam, Tensor]  # a gradient buffer on its way to be reduced


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
        program = comm.program
        self._program, self._comm, self._state, self._axes, self._in_gaps = program, comm, state, axes, GapMessages()
        self._collectives, self._stages, self._lanes = comm.collectives, comm.stages, comm.lanes
        self._clock, self._weights, self.objective = clock, weights, objective
        self._clip_norm, self._progress, self._counter = state.settings.clip, progress, 0
        self._passages, self._load, self.island = passages, load, Island(state)
        for axis in axes:
            axis.in_block.waiting_on = self._tell_waiting  # computing then waits for other ranks, too
            axis.in_block.at_gap = self._in_gaps.leave
        # Compiled blocks hide linear layers inside one autograd node, which computes their weight gradients.
        for flat in state if not compiled else ():
            if flat.spec.trainable:
                weights.own(flat.parameters, flat.gradients)
        # What an instruction of a block needs, found once: no look-ups in the middle of a step.
        self.parameters_of = {block: (block, *program.blocks[block].tied_to) for block in state.modules}
        self._buffered = {
            block: tuple(flat for needed in blocks for flat in state.flats[needed] if flat.has_buffer)
            for block, blocks in self.parameters_of.items()
        }
        self._edges = [axis.edge for axis in axes if axis.edge is not None]
        self._recomputed = recomputed(program.plan, program.blocks)
        self._last = len(program.blocks) - 1
        self._chunked = chunked_head(state.modules[self._last], objective) if self._last in state.modules else None
        # On the stage that has the head, where all tensor ranks have the same.
        tensor_ranks = program.model.tensor.both
        self._counts_loss = self._last in program.stage.own and not any(tensor_ranks.coordinates(comm.rank))
        self._handlers: dict[Op, Callable[[Instruction], None]] = {op: getattr(self, f"_{op.lower()}") for op in Op}
        self._gathers: dict[int, Pending] = {}
        self._refreshes: dict[int, Pending] = {}
        self._reductions: deque[tuple[Pending, list[Gradient]]] = deque()
        self._reduced: dict[int, Pending] = {}  # block -> its newest reduction
        self._syncs, self._counts = list[Pending](), list[Pending]()
        self._muon_momentum: dict[int, Pending] = {}
        self._exchanges = Exchanges(self.island, self._collectives, self._submit, self._each, self._wait)
        self.declared_bytes = Counter[tuple[MessageClass, str]]()  # by all programs that were run
        self._sums = StepSums.of(torch.zeros(3))  # until the first CLIP
        self.gives_up = False  # at the next CLIP of a training step, whatever its sums

    def run(self, batches: Sequence[Batch], lr: float = 0.0, program: Program | None = None) -> StepSums:
        """Run a program on this rank's micro-batches.

        Refreshes may still be in flight afterwards. Returns the sums of the last CLIP, in this program or an earlier
        one. Raises `GivenUp` on every rank, before the updates, if the sums of a training step are not finite.

        `program` may be any verified program for the same blocks and plan; the default is the program of `comm`.
        """
        program = self._program = program or self._comm.program
        assert len(batches) == program.num_micros, f"{len(batches)} micro-batches for {program.num_micros}"
        self._trains, self._batches, self._lr = program.trains, batches, lr
        self._kept: dict[tuple[int, int], Kept] = {}
        self._due: dict[tuple[int, int], WeightQueue] = {}  # (block, micro) -> its weight gradients, to be computed
        self._loss = torch.zeros((), dtype=torch.float64, device=self._comm.device)
        self._activations = Activations(program, self._comm, self._state.edges, self._edges)
        if self._trains:
            self._load.begin()
        self._clock.start()
        handlers, progress = self._handlers, self._progress
        with torch.set_grad_enabled(self._trains):
            for self._counter, self._now in enumerate(program.instructions):
                # Reported before it runs: a rank that hangs names the instruction it hangs in.
                progress(self._counter, self._now, ())
                handlers[self._now.op](self._now)
        self._exchanges.ended(program, self._counter)
        self.declared_bytes.update(program.sent_bytes)
        return self._sums

    def _tell_waiting(self, ranks: tuple[int, ...]) -> None:
        self._progress(self._counter, self._now, ranks)

    def drain(self) -> None:
        """Wait for all messages in flight."""
        while self._refreshes:
            self._wait(self._refreshes.popitem()[1], "wait refresh")
        self._exchanges.drain(self._counter)

    def _wait(self, pending: Pending, category: str) -> None:
        self._progress(pending.counter, pending.doing, self._comm.participants(pending.instruction))
        pending.ticket.wait()
        self._clock.mark(category)
        self._progress(self._counter, self._now, ())

    def _submit(self, work: Callable[[], None], after: Pending | None = None) -> Pending:
        message = self._program.message(self._now)
        lane = self._lanes[message.lane] if message.sends else HERE  # without peers there is no lane
        ready = behind(None if after is None else after.ticket, work)
        return Pending(lane.submit(ready), self._counter, self._now)

    def _submit_gradients(self, now: Instruction, work: Carry, after: Pending | None = None) -> Pending:
        if not now.in_gaps:
            return self._submit(self._each(now, work), after)
        flats, message = self._state.flats[now.block], self._program.message(now)
        works = [self._part(carried(flats, each.transfers, work)) if each.transfers else None for each in message.parts]
        lane, before = self._lanes[message.lane], None if after is None else after.ticket
        return Pending(self._in_gaps.hold(lane, works, before), self._counter, now)

    def _part(self, work: Callable[[], None]) -> Callable[[], None]:
        return work  # which a trace times

    def _await_parameters(self, block: int) -> None:
        for needed in self.parameters_of[block]:
            if needed in self._gathers:
                pending = self._gathers.pop(needed)
                self._wait(pending, "wait gather_backward" if pending.instruction.backward else "wait gather")
            self._await_refresh(needed)  # of whole parameters the only message

    def _await_refresh(self, block: int) -> None:
        if block in self._refreshes:
            self._wait(self._refreshes.pop(block), "wait refresh")

    def _gather(self, now: Instruction) -> None:
        # The gather reads the shard that the refresh writes, hence the order on the lane.
        gather = self._each(now, lambda flat, transfer: flat.gather(self._collectives, transfer, now.secondary))
        self._gathers[now.block] = self._submit(gather, after=self._refreshes.pop(now.block, None))

    def _free(self, now: Instruction) -> None:
        self._await_parameters(now.block)  # the lane must not fill what is being freed
        for flat in self._state.flats[now.block]:
            flat.free()

    def _forward(self, now: Instruction) -> None:
        trains, self._clock.doing = self._trains, "forward"
        self._await_parameters(now.block)
        inputs = self._batches[now.micro].inputs
        if now.block > 0:
            # Detached: the block's graph begins here, and its input gradient can be sent by itself.
            inputs = self._take((False, now.block - 1, now.micro)).detach().requires_grad_(trains)
        if now.block == self._last and self._chunked is not None:
            if trains:
                self._kept[now.block, now.micro] = Kept(inputs, None, _NO_STATE)  # its backward runs it
            else:
                self._loss += head_loss(self._state.modules[now.block], inputs, self._batches[now.micro].labels)
            self._clock.mark(self._clock.doing)
            return
        # Dropout must draw the same masks when the forward runs again.
        again = trains and now.block in self._recomputed
        state = random_state(inputs.device) if again else _NO_STATE
        counting = self._load.counting(now.block) if trains else nullcontext()
        with counting, torch.set_grad_enabled(trains and not again):
            output = self._run_block(now.block, inputs, now.micro)
        if trains:
            self._kept[now.block, now.micro] = Kept(inputs, None if again else output, state)
        if now.block == self._last:
            self._loss += output.detach()
        else:
            self._activations.put((False, now.block, now.micro), output)
        self._clock.mark(self._clock.doing)

    def _backward(self, now: Instruction) -> None:
        # Weight gradients run at once and keep nothing, unless they can overlap with a message inside the block.
        self._backward_input(now, hold=bool(self._axes), fills=True)
        self._backward_weight(now)

    def _backward_input(self, now: Instruction, hold: bool = True, fills: bool = False) -> None:
        # Computes gradients of the block's input and of parameters that are not weights of linear layers. With `hold`,
        # weight gradients are deferred to `_backward_weight`, which keeps each layer's output gradient and input in
        # memory. Messages, other passes and the block's FREE may run in between; its REDUCE must not.
        self._clock.doing = "backward"
        self._await_parameters(now.block)
        self._open_gradients(now.block)
        kept = self._kept.pop((now.block, now.micro))
        queue = self._due[now.block, now.micro] = self._weights.queue(hold, fills)
        if now.block == self._last and self._chunked is not None:
            with self._weights.recorded_in(queue):
                self._loss += self._chunked(kept.inputs, self._batches[now.micro].labels, self._state.loss_scale.value)
        else:
            self._run_backward(now, kept, queue)
        if now.block > 0:
            assert kept.inputs.grad is not None, f"block {now.block} does not use its input"
            self._activations.put((True, now.block, now.micro), kept.inputs.grad)
        self._clock.mark(self._clock.doing)

    def _run_backward(self, now: Instruction, kept: Kept, queue: WeightQueue) -> None:
        output = kept.output
        if output is None:
            with restored(kept.random_state, kept.inputs.device):
                output = self._run_block(now.block, kept.inputs, now.micro)
        gradient = self._state.seed(output) if now.block == self._last else self._take((True, now.block + 1, now.micro))
        # A block with frozen parameters before everything trainable has no graph.
        if output.requires_grad:
            with self._weights.recorded_in(queue):
                torch.autograd.backward(output, gradient)
        self._in_gaps.rest()

    def _backward_weight(self, now: Instruction) -> None:
        self._clock.doing = "backward"
        self._open_gradients(now.block)
        self._due.pop((now.block, now.micro)).run()
        self._clock.mark(self._clock.doing)

    def _run_block(self, block: int, inputs: Tensor, micro: int) -> Tensor:
        batch = self._batches[micro]
        self._passages.begin(micro, block if self._trains and block in self._recomputed else None)
        for axis in self._axes:
            axis.begin(micro, batch, block in self._recomputed)
        module, objective = self._state.modules[block], self.objective if block == self._last else None
        if isinstance(objective, (TokenObjective, ValueObjective)):
            return objective(module, inputs, batch)
        output: Tensor = module(inputs) if batch.positions is None else module(inputs, batch.positions)
        return output if objective is None else objective(output, batch.labels)

    def _take(self, key: Key) -> Tensor:
        pending = self._activations.arriving(key)
        if pending is not None:
            self._wait(pending, f"wait {MessageClass.PIPELINE.value}")
        return self._activations.take(key)

    def _recv(self, now: Instruction) -> None:
        self._activations.receive(now, self._counter)

    def _send(self, now: Instruction) -> None:
        self._activations.send(now, self._counter)

    def _tie(self, now: Instruction) -> None:
        while self._reductions:
            self._finish_reduction()
        self._progress(self._counter, now, self._comm.participants(now))
        for flat in self._state.trainable(now.block):
            flat.tie(self._stages, now.peer)
        self._clock.mark(f"wait {MessageClass.TIE.value}")

    def _open_gradients(self, block: int) -> None:
        for flat in self._buffered[block]:
            if not flat.is_open:
                # At most one gradient stays in flight while the next is made: the memory formula counts two.
                while len(self._reductions) > 1:
                    self._finish_reduction()
                flat.open_gradient()

    def _reduce(self, now: Instruction) -> None:
        flats = self._state.flats[now.block]
        taken = ((each.flat, flats[each.flat].take_gradient()) for each in self._program.message(now).transfers)
        buffers = {flat: buffer for flat, buffer in taken if buffer is not None}

        def reduce(flat: FlatParam, transfer: Transfer) -> None:
            if transfer.flat in buffers:
                flat.reduce(self._collectives, transfer, buffers[transfer.flat])

        if buffers:
            pending = self._reduced[now.block] = self._submit_gradients(now, reduce)
            self._reductions.append((pending, [(flats[flat], buffer) for flat, buffer in buffers.items()]))

    def _finish_reduction(self) -> None:
        # Released only now: on CUDA the allocator hands memory to the compute stream that a lane may still read.
        pending, gradients = self._reductions.popleft()
        self._wait(pending, "wait reduce")
        for flat, buffer in gradients:
            flat.release(buffer)

    def _sync(self, now: Instruction) -> None:
        if self._program.message(now).sends:  # else nothing is left to do, and CLIP waits for the reduction
            after = self._reduced.get(now.block)
            sent = self._submit_gradients(now, lambda flat, transfer: flat.sync(self._collectives, transfer), after)
            self._syncs.append(sent)

    def _count(self, now: Instruction) -> None:
        (transfer,) = self._program.message(now).transfers
        self._counts.append(self._submit(lambda: self._load.add_up(self._collectives, transfer)))

    def _clip(self, now: Instruction) -> None:
        assert not self._due, f"{now} before the weight gradients of {sorted(self._due)}"
        # Sends hold their values in memory, so all must have left before the step ends.
        while (pending := self._activations.leaving()) is not None:
            self._wait(pending, f"wait {MessageClass.PIPELINE.value}")
        while self._reductions:
            self._finish_reduction()
        for pending in self._syncs:
            self._wait(pending, "wait sync")
        self._syncs.clear()
        while self._counts:
            self._wait(self._counts.pop(), f"wait {MessageClass.COUNTS.value}")
        self._reduced.clear()
        flats = self._state if self._program.trains else ()
        counts_loss, of_routers = self._counts_loss, self._passages.sums
        values = own_sums(flats, self._loss, self._batches, self.objective, of_routers, counts_loss=counts_loss)
        total, (transfer,) = list[Tensor](), self._program.message(now).transfers
        self._wait(self._submit(lambda: total.append(self._collectives.sum_control(transfer, values))), "wait control")
        self._sums = StepSums.of(total[0], len(of_routers), self._state.loss_scale.value)
        self._scale = self._sums.scale(self._clip_norm)
        self._clock.mark("clip")
        if self._program.trains:
            end_gradients(flats, self._state.edges.values(), self._sums, self.gives_up)
            self._load.settle()
            self.island.numbers.stepped(self._sums.loss, self._sums.num_tokens)

    def _orthogonalise(self, now: Instruction) -> None:
        for flat in self._state.trainable(now.block):
            flat.prepare_muon_momentum(self._scale)
        gather = self._each(now, lambda flat, transfer: flat.gather_muon_momentum(self._collectives, transfer))
        self._muon_momentum[now.block] = self._submit(gather)
        self._clock.mark("update")

    def _update(self, now: Instruction) -> None:
        if now.block in self._muon_momentum:
            self._wait(self._muon_momentum.pop(now.block), "wait orthogonalise")
        for flat in self._state.trainable(now.block):
            flat.update(self._scale, self._lr)
        self._clock.mark("update")

    def _refresh(self, now: Instruction) -> None:
        # The rank's own slice first; the gather then reads it.
        for flat in self._state.trainable(now.block):
            flat.publish()
        self._clock.mark("update")
        refresh = self._each(now, lambda flat, transfer: flat.refresh(self._collectives, transfer))
        if self._program.message(now).sends:
            self._refreshes[now.block] = self._submit(refresh)

    def _outer_count(self, now: Instruction) -> None:
        self._exchanges.count(self._program, now, self._counter)
        self._clock.mark("update")

    def _outer_start(self, now: Instruction) -> None:
        self._exchanges.start(now)

    def _outer_apply(self, now: Instruction) -> None:
        self._exchanges.arrived(now.block, self._counter)
        self._await_refresh(now.block)  # it still reads what this writes
        self.island.apply(self._program, now.block)
        self._clock.mark("update")

    def _each(self, now: Instruction, work: Carry) -> Callable[[], None]:
        return carried(self._state.flats[now.block], self._program.message(now).transfers, work)
