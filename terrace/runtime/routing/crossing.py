"""Runs tokens through a layer's experts on several ranks, as one autograd function that follows the block's program.

Forward and backward take the steps of the program (terrace.program.block_program.routed) in order. A `Send` submits a
chunk's hop to the lane of its tier, which packs, exchanges and sums rows; hops of a chunk run one after the other.
Meanwhile the rank computes experts on chunks that have arrived, the shared expert, and weight gradients.

The computation of the forward has a separate graph for each piece and for the shared expert, so that the backward can
differentiate each when its step comes. Their weight gradients are recorded like those of any layer.

Shape legend: T tokens, N rows that arrive at a rank, H hidden, k experts of a token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from terrace.model.experts.gates import Choice
from terrace.model.experts.mixture import Mixture
from terrace.plan.expert_traffic import spans_of
from terrace.plan.in_block_messages import RoutedMessage
from terrace.plan.wire import MessageClass
from terrace.program.block_program.steps import Await, ComputeKind, Gap, Send, Steps
from terrace.runtime.in_block import InBlockComm, InFlight
from terrace.runtime.routing.way import Carrier, Chunk, Way

_SHARED = -1  # among the numbers of pieces


@dataclass
class _Graph:
    """The graph of a computed piece: its result's gradient edge, and the list that receives its inputs' gradients."""

    edge: GradientEdge
    gradients: list[Tensor]

    def differentiate(self, gradient: Tensor) -> list[Tensor]:
        """Run the piece's backward. Returns the gradients of its inputs; weight gradients are recorded as usual."""
        torch.autograd.backward(self.edge, gradient)
        return self.gradients


class _Enter(torch.autograd.Function):
    # Hands inputs on; their gradients go into a list. Leaves would keep the inputs alive until the backward.

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gradients: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.gradients = gradients
        return tuple(each.view_as(each) for each in inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.gradients.extend(gradients)
        return (None, None, *(None for _ in gradients))


class Rank(Carrier, Protocol):
    """The interface of a rank that a crossing uses."""

    in_block: InBlockComm

    def declare(self, message: RoutedMessage, ways: Sequence[Way]) -> None:
        """Count a message's bytes as declared."""

    def peers(self, message: RoutedMessage) -> tuple[int, ...]:
        """The ranks of a message, including this one."""


class Crossing:
    """One micro-batch's tokens in one layer.

    `ways` are the routes of its pieces, `steps` the program's forward and backward, `held` this rank's experts as
    (first, last + 1).
    """

    def __init__(
        self, rank: Rank, mixture: Mixture, steps: tuple[Steps, Steps], ways: Sequence[Way], held: tuple[int, int]
    ) -> None:
        self._rank, self._mixture, self._steps, self._ways, self._held = rank, mixture, steps, ways, held
        self._graphs: dict[int, _Graph] = {}  # of each piece, and of the shared expert
        self._shared: list[Tensor] = []  # its result, then the gradient of its tokens

    def through(self, tokens: Tensor, choice: Choice, x: Tensor) -> tuple[Tensor, Tensor]:
        """Summed expert results (T, H) for tokens (T, H), and the shared expert's result for x, empty without one."""
        parts = tokens, choice.weights, choice.experts.int(), x
        if not torch.is_grad_enabled():
            return self.forward(*parts, trains=False)
        # The results have gradients wherever some parameter has.
        trains = any(parameter.requires_grad for parameter in self._mixture.parameters())
        anchor = tokens.new_empty(0).requires_grad_(trains)
        results: tuple[Tensor, Tensor] = _Through.apply(*parts, anchor, self)  # type: ignore[no-untyped-call]
        return results

    def forward(
        self, tokens: Tensor, weights: Tensor, experts: Tensor, x: Tensor, *, trains: bool
    ) -> tuple[Tensor, Tensor]:
        """The forward. With `trains`, graphs are kept for `backward`."""

        def pass_piece(number: int, rows: Tensor, of_rows: Tensor, choices: Tensor) -> list[Tensor]:
            first, last = self._held
            here = choices.long() - first
            here = here.masked_fill((here < 0) | (here >= last - first), -1)

            def compute(rows: Tensor, of_rows: Tensor) -> Tensor:
                return self._mixture.pass_through(rows, Choice(here, of_rows, is_whole=False))

            return [self._computed(number, compute, (rows, of_rows), trains)]

        def pass_shared() -> None:
            self._shared.append(self._computed(_SHARED, self._mixture.pass_shared, (x,), trains))

        (found,) = self._play(0, (tokens, weights, experts), pass_piece, pass_shared)
        return found, self._shared.pop() if self._shared else x.new_empty(0)

    def backward(self, gradient: Tensor, of_shared: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of tokens (T, H), weights (T, k) and x, given those of both results."""

        def differentiate(number: int, rows: Tensor) -> list[Tensor]:
            return self._graphs.pop(number).differentiate(rows)

        def differentiate_shared() -> None:
            self._shared += self._graphs.pop(_SHARED).differentiate(of_shared)

        tokens, weights = self._play(1, (gradient,), differentiate, differentiate_shared)
        return tokens, weights, self._shared.pop() if self._shared else None

    def _computed(self, number: int, compute: Callable[..., Tensor], inputs: Sequence[Tensor], trains: bool) -> Tensor:
        inputs = [each.detach() for each in inputs]
        if not trains:
            with torch.no_grad():
                return compute(*inputs)
        gradients: list[Tensor] = []
        with torch.enable_grad():
            anchor = inputs[0].new_empty(0).requires_grad_()
            output = compute(*_Enter.apply(anchor, gradients, *inputs))  # type: ignore[no-untyped-call]
        # The graph, not the result, which may be freed once it has been sent.
        self._graphs[number] = _Graph(get_gradient_edge(output), gradients)
        return output.detach()

    def _play(
        self,
        half: int,
        parts: Sequence[Tensor],
        compute: Callable[..., list[Tensor]],
        compute_shared: Callable[[], None],
    ) -> list[Tensor]:
        """Execute the steps of one half on `parts` (T, ...). Returns the parts that came back, (T, ...)."""
        rank, steps = self._rank, self._steps[half]
        chunks = self._chunks(steps, parts)
        each = len(self._ways) // len(chunks)
        done: dict[int, list[list[Tensor]]] = {}  # by chunk, the results of its pieces
        flights: dict[Send, InFlight] = {}
        newest: dict[tuple[MessageClass, int], InFlight] = {}  # of each chunk, its last hop so far
        for step in steps:
            if isinstance(step, Send):
                (message,) = step.messages
                assert isinstance(message, RoutedMessage), "the steps are of experts"
                chunk, is_back = chunks[message.chunk], message.message_class is MessageClass.COMBINE
                if is_back and message.chunk in done:
                    chunk.turn([torch.cat(part) for part in zip(*done.pop(message.chunk), strict=True)])
                key = message.message_class, message.chunk
                rank.declare(message, self._ways[each * message.chunk : each * (message.chunk + 1)])
                flight = rank.in_block.submit(partial(chunk.go, message), message, after=newest.get(key))
                newest[key] = flights[step] = flight
            elif isinstance(step, Await):
                (message,) = step.send.messages
                assert isinstance(message, RoutedMessage), "the steps are of experts"
                rank.in_block.wait(flights.pop(step.send), rank.peers(message))
            elif isinstance(step, Gap):
                rank.in_block.gap(step.number)
            elif step.kind is ComputeKind.EXPERT_WEIGHTS:
                rank.in_block.fill(step.kind, step.number)
            else:
                rank.in_block.computes(step.kind, step.number)
                if step.kind in (ComputeKind.SHARED, ComputeKind.SHARED_GRADIENTS):
                    compute_shared()
                else:
                    number, piece = divmod(step.number, each)
                    chunk = chunks[number]
                    chunk.arrived()
                    done.setdefault(number, []).append(compute(step.number, *chunk.pieces()[piece]))
        return [torch.cat(part) for part in zip(*(chunk.parts for chunk in chunks), strict=True)]

    def _chunks(self, steps: Steps, parts: Sequence[Tensor]) -> list[Chunk]:
        sent = (message for step in steps if isinstance(step, Send) for message in step.messages)
        number = 1 + max(message.chunk for message in sent if isinstance(message, RoutedMessage))
        each = len(self._ways) // number
        return [
            Chunk(self._rank, self._ways[each * chunk : each * (chunk + 1)], [part[start:stop] for part in parts])
            for chunk, (start, stop) in enumerate(spans_of(len(parts[0]), number))
        ]


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weights: Tensor, experts: Tensor, x: Tensor, anchor: Tensor, crossing: Crossing
    ) -> tuple[Tensor, Tensor]:
        ctx.crossing = crossing
        return crossing.forward(tokens, weights, experts, x, trains=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, of_shared: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weights, x = ctx.crossing.backward(gradient, of_shared)
        return tokens, weights, None, x, None, None
