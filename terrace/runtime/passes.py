"""Forwards and backwards of a rank's blocks, and the activations between them.

A block's forward runs on a detached input, and its backward is an explicit call. A backward has two parts, which a
program may run apart: the input gradient, and the weight gradients (terrace.runtime.linear).
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from terrace.accelerator import random_state
from terrace.plan.residency import recomputed
from terrace.plan.wire import MessageClass
from terrace.program.instruction import Instruction
from terrace.runtime.activations import Activations, Kept, Key
from terrace.runtime.batch import Batch
from terrace.runtime.block_messages import GradientMessages, ParameterMessages
from terrace.runtime.further_tokens import AHEAD
from terrace.runtime.head import head_loss
from terrace.runtime.in_block import InBlockAxis
from terrace.runtime.kept.boundaries import alone, shares
from terrace.runtime.linear import WeightGradients, WeightQueue
from terrace.runtime.messages import Messages
from terrace.runtime.model_state import ModelState
from terrace.runtime.objective import (
    Objective,
    TokenObjective,
    ValueObjective,
    chunked_loss,
    ignored_label,
    num_counted,
)
from terrace.runtime.random_state import restored
from terrace.runtime.routing.load import Load
from terrace.runtime.routing.passages import Passages

if TYPE_CHECKING:
    from terrace.runtime.score_clip import ScoreClip

_NO_STATE = torch.empty(0)


class BlockCalls:
    """Calls of a rank's modules, under in-block axes and routed mixtures, the last one with the objective."""

    batches: Sequence[Batch]  # of the program that runs
    trains: bool

    def __init__(
        self, state: ModelState, objective: Objective, axes: Sequence[InBlockAxis], passages: Passages
    ) -> None:
        self.modules, self.objective, self.axes, self.passages = state.modules, objective, axes, passages
        self.last = len(state.program.blocks) - 1
        self.recomputed = recomputed(state.program.plan, state.program.blocks)
        self.leaving = state.program.model.leaving
        self.reads_ahead = [block.operations.reads_ahead for block in state.program.blocks]

    def begin(self, batches: Sequence[Batch], *, trains: bool) -> None:
        self.batches, self.trains = batches, trains

    def run(self, block: int, inputs: Tensor, micro: int) -> Tensor:
        batch, again = self.batches[micro], block in self.recomputed
        self.passages.begin(micro, block, again=self.trains and again)
        for axis in self.axes:
            axis.begin(micro, batch, again)
        module, objective = self.modules[block], self.objective if block == self.last else None
        if isinstance(objective, (TokenObjective, ValueObjective)):
            return objective(module, inputs, batch)
        more: tuple[Tensor | None, ...] = () if batch.positions is None else (batch.positions,)
        if batch.mix is not None and block == 0:
            more = batch.positions, batch.mix
        if depth := self.reads_ahead[block]:
            more = batch.positions, batch.columns[AHEAD][..., depth - 1]
        output: Tensor = module(inputs, *more)
        return output if objective is None else objective(output, batch.labels)


class StepValues:
    """The values of one step: activations, what blocks keep for their backwards, and the sum of the losses."""

    def __init__(self, activations: Activations, device: torch.device) -> None:
        self.activations = activations
        self.kept: dict[tuple[int, int], Kept] = {}  # by (block, micro-batch)
        self.queues: dict[tuple[int, int], WeightQueue] = {}  # weight gradients to be computed, likewise
        self.loss = torch.zeros((), dtype=torch.float64, device=device)


class Passes:
    """FORWARD, BACKWARD in one or two parts, EVICT, FETCH, SEND and RECV on one rank."""

    step: StepValues  # of the program that runs

    def __init__(
        self,
        calls: BlockCalls,
        state: ModelState,
        messages: Messages,
        parameters: ParameterMessages,
        gradients: GradientMessages,
        weights: WeightGradients,
        load: Load,
        scores: "ScoreClip",
    ) -> None:
        self.calls, self._state, self._messages, self._scores = calls, state, messages, scores
        self._parameters, self._gradients, self._weights, self._load = parameters, gradients, weights, load
        self._clock, self._boundaries = messages.clock, state.below.boundaries
        modules = state.modules
        self.chunked = chunked_loss(modules[calls.last], calls.objective) if calls.last in modules else None

    def begin(self, batches: Sequence[Batch]) -> None:
        messages, edges = self._messages, [axis.edge for axis in self.calls.axes if axis.edge is not None]
        activations = Activations(messages.program, messages.comm, self._state.edges, edges)
        self.step = StepValues(activations, messages.comm.device)
        self.calls.begin(batches, trains=messages.program.trains)

    def forward(self, now: Instruction) -> None:
        step, calls = self.step, self.calls
        trains, is_last, self._clock.doing = calls.trains, now.block == calls.last, "forward"
        self._parameters.await_for(now.block)
        batch = calls.batches[now.micro]
        inputs = batch.inputs
        if now.block > 0:
            # Detached: the block's graph begins here, and its input gradient can be sent by itself.
            inputs = self._take((False, now.block - 1, now.micro)).detach()
            if trains and now.block in calls.leaving:
                inputs = alone(inputs)
            inputs.requires_grad_(trains)
        if is_last and self.chunked is not None:
            if trains:
                step.kept[now.block, now.micro] = Kept(inputs, None, _NO_STATE)  # its backward runs it
            else:
                step.loss += head_loss(calls.modules[now.block], inputs, batch.labels)
            self._clock.mark(self._clock.doing)
            return
        # Dropout must draw the same masks when the forward runs again.
        again = trains and now.block in calls.recomputed
        state = random_state(inputs.device) if again else _NO_STATE
        with ExitStack() as first, torch.set_grad_enabled(trains and not again):
            if trains:
                first.enter_context(self._load.counting(now.block))
                first.enter_context(self._scores.measuring(now.block))
            output = calls.run(now.block, inputs, now.micro)
            if trains and now.block in calls.leaving and shares(output, inputs):
                output = output.clone()  # the next block reads it when the input has left
        if trains:
            step.kept[now.block, now.micro] = Kept(inputs, None if again else output, state)
        if is_last:
            step.loss += output.detach()
        else:
            step.activations.put((False, now.block, now.micro), output)
        self._clock.mark(self._clock.doing)

    def backward(self, now: Instruction) -> None:
        # Weight gradients run at once and keep nothing, unless they can overlap with a message inside the block.
        self.backward_input(now, hold=bool(self.calls.axes), fills=True)
        self.backward_weight(now)

    def backward_input(self, now: Instruction, hold: bool = True, fills: bool = False) -> None:
        """BACKWARD_INPUT: gradients of the block's input and of parameters that are not weights of linear layers.

        With `hold`, weight gradients are deferred to `backward_weight`, which keeps each layer's output gradient and
        input in memory. Messages, other passes and the block's FREE may run in between; its REDUCE must not.
        """
        step = self.step
        self._clock.doing = "backward"
        self._parameters.await_for(now.block)
        self._gradients.open(now.block)
        self._boundaries.await_for((now.block, now.micro), self._messages)
        kept = step.kept.pop((now.block, now.micro))
        queue = step.queues[now.block, now.micro] = self._weights.queue(hold, fills)
        if now.block == self.calls.last and self.chunked is not None:
            with self._weights.recorded_in(queue):
                batch = self.calls.batches[now.micro]
                step.loss += self.chunked(kept.inputs, batch, self._state.loss_scale.value)
        else:
            self._run_backward(now, kept, queue)
        self._penalise(now)
        if now.block > 0:
            assert kept.inputs.grad is not None, f"block {now.block} does not use its input"
            step.activations.put((True, now.block, now.micro), kept.inputs.grad)
        self._clock.mark(self._clock.doing)

    def _run_backward(self, now: Instruction, kept: Kept, queue: WeightQueue) -> None:
        output = kept.output
        if output is None:
            with restored(kept.random_state, kept.inputs.device):
                output = self.calls.run(now.block, kept.inputs, now.micro)
        is_last = now.block == self.calls.last
        gradient = self._state.seed(output) if is_last else self._take((True, now.block + 1, now.micro))
        # A block with frozen parameters before everything trainable has no graph.
        if output.requires_grad:
            with self._weights.recorded_in(queue):
                torch.autograd.backward(output, gradient)
        self._messages.gaps.flush()

    def _penalise(self, now: Instruction) -> None:
        # Here, since parameters may be freed before BACKWARD_WEIGHT.
        flats = [flat for flat in self._state.trainable(now.block) if flat.penalises]
        if flats:
            calls, scale = self.calls, self._state.loss_scale.value
            tokens = num_counted(calls.batches[now.micro], ignored_label(calls.objective))
            for flat in flats:
                flat.add_penalty(tokens * scale)

    def backward_weight(self, now: Instruction) -> None:
        """BACKWARD_WEIGHT: the weight gradients that `backward_input` deferred."""
        self._clock.doing = "backward"
        self._gradients.open(now.block)
        self.step.queues.pop((now.block, now.micro)).run()
        self._clock.mark(self._clock.doing)

    def evict(self, now: Instruction) -> None:
        key = now.block, now.micro
        self._boundaries.evict(key, self.step.kept[key].inputs, self._messages)

    def fetch(self, now: Instruction) -> None:
        self._boundaries.fetch((now.block, now.micro), self._messages)

    def receive(self, now: Instruction) -> None:
        self.step.activations.receive(now, self._messages.counter)

    def send(self, now: Instruction) -> None:
        self.step.activations.send(now, self._messages.counter)

    def await_sends(self) -> None:
        """Wait for all sends, which hold their values in memory; before CLIP no weight gradient may be left."""
        assert not self.step.queues, f"CLIP before the weight gradients of {sorted(self.step.queues)}"
        while (pending := self.step.activations.leaving()) is not None:
            self._messages.wait(pending, f"wait {MessageClass.PIPELINE.value}")

    def _take(self, key: Key) -> Tensor:
        pending = self.step.activations.arriving(key)
        if pending is not None:
            self._messages.wait(pending, f"wait {MessageClass.PIPELINE.value}")
        return self.step.activations.take(key)
