"""Collectives among the ranks of one tensor axis, and their backwards.

Let x_r be the tensor of rank r of n, [x_0; ...; x_n-1] the concatenation over the first dim, dL/dy written y':

    name      forward                         backward
    gather    y_r = [x_0; ...; x_n-1]         x_r' = part r of sum_s y_s'
    scatter   y_r = part r of sum_s x_s       x_r' = [y_0'; ...; y_n-1']
    copy      y_r = x_r (the same on all)     x_r' = sum_s y_s'
    total     y_r = sum_s x_s                 x_r' = y_r' (the same on all)
    numbers   y_r = sum_s x_s                 x_r' = sum_s y_s'

The first four are Megatron-LM's (1909.08053, section 3; 2205.05198, section 4.2: g and its conjugate). After `copy`
every rank uses the same x for a different part of a result, so gradients are summed; after `total` every rank
continues with the same y and computes the same gradient. `sum_numbers` is for statistics such as a norm's, from which
every rank computes its own part of a result.

Messages are of class `tensor`, in the wire format of each tier; numbers are sent unrounded.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from terrace.comm.collectives import Collectives
from terrace.comm.ledger import Meter
from terrace.comm.rounding import Origin
from terrace.comm.symmetric import Operators
from terrace.plan.in_block_messages import Leg, TensorMessage
from terrace.plan.layout import Layout
from terrace.plan.mesh import position
from terrace.program.block_program.steps import ComputeKind
from terrace.program.message import Transfer
from terrace.program.resolve import line_transfer, number_transfer
from terrace.runtime.in_block import InBlockComm, InFlight
from terrace.runtime.pages import is_returning, mark_returning

Map = Callable[[Tensor], Tensor]


class AxisComm:
    """Collectives among the ranks that differ from this one on one tensor axis.

    All run on the lane of messages inside blocks, because they share its memory and its groups, which carry one
    message at a time. Deferred weight gradients run while the last message of a region's backward travels.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        collectives: Collectives,
        in_block: InBlockComm,
        device: torch.device,
        meter: Meter,
        fused: Operators | None = None,
    ) -> None:
        self.degree = layout.degree
        self._fused = fused  # products that are one operation with their message
        self.index = position(layout.degrees, layout.coordinates(rank))
        self.in_block = in_block
        self._layout = layout
        self._coordinates = layout.coordinates(rank)
        self._collectives = collectives
        self._ranks: tuple[int, ...] = (rank,)
        # All ranks of the line, for the watchdog.
        for tier in range(len(layout.tiers)):
            self._ranks = tuple(peer for each in self._ranks for peer in layout.peers(each, tier))
        self._origin = Origin(f"tensor {'x'.join(layout.axes)}", device, meter)
        self._transfers: dict[tuple[Leg, int], Transfer] = {}

    def all_gather(self, x: Tensor) -> Tensor:
        """All-gather x (m, ...) to (n m, ...)."""
        whole = x.new_empty((self.degree * x.shape[0], *x.shape[1:]))
        self.wait(self.start_gather(whole, x))
        return whole

    def start_gather(self, whole: Tensor, x: Tensor) -> InFlight:
        """Start to gather x (m, ...) into `whole` (n m, ...). Neither may change until the wait."""
        return self.in_block.submit(lambda: self._gather_into(whole, x), self._message(Leg.GATHER, whole))

    def start_reduce(self, part: Tensor, x: Tensor) -> InFlight:
        """Start to reduce-scatter x (n m, ...) into `part` (m, ...)."""
        return self.in_block.submit(lambda: self._reduce_into(part, x), self._message(Leg.REDUCE, x))

    def wait(self, flight: InFlight) -> None:
        self.in_block.wait(flight, self._ranks)

    @property
    def _operators(self) -> Operators:
        assert self._fused is not None, "only plans with fused messages multiply while they send"
        return self._fused

    def gather_products(self, x: Tensor, matrices: Sequence[Tensor], kind: ComputeKind) -> tuple[Tensor, list[Tensor]]:
        """All-gather x (m, K) to (n m, K), and multiply it with `matrices` (K, ...) while it arrives."""
        gather, found = self._operators.gather, list[tuple[Tensor, list[Tensor]]]()
        message = TensorMessage(Leg.GATHER, self._layout.axes, self.degree * x.numel())
        self._compute(message, kind, lambda group: found.append(gather(x, matrices, group)))
        return found[0]

    def scatter_product(self, x: Tensor, matrix: Tensor, kind: ComputeKind) -> Tensor:
        """Reduce-scatter the product of x (n m, K) and `matrix` (K, N) to (m, N)."""
        scatter, found = self._operators.scatter, list[Tensor]()
        message = TensorMessage(Leg.REDUCE, self._layout.axes, x.shape[0] * matrix.shape[1])
        self._compute(message, kind, lambda group: found.append(scatter(x, matrix, group)))
        return found[0]

    def _compute(self, message: TensorMessage, kind: ComputeKind, work: Callable[[str], None]) -> None:
        # On the lane, although it is computing: messages inside blocks share a group, one after the other.
        transfer = self._transfer(message.leg, message.numel)
        flight = self.in_block.submit(lambda: self._collectives.fused(transfer, work), message)
        self.in_block.computes(kind)
        self.in_block.wait(flight, self._ranks, computes=True)

    def reduce_scatter(self, x: Tensor, *, ends_region: bool = False) -> Tensor:
        """Reduce-scatter x (n m, ...) to (m, ...). If it `ends_region`, deferred weight gradients run meanwhile."""
        part = x.new_empty((x.shape[0] // self.degree, *x.shape[1:]))
        self._finish(self.start_reduce(part, x), ends_region)
        return part

    def all_reduce(self, x: Tensor, *, ends_region: bool = False) -> Tensor:
        """Sum x over all ranks, bitwise equal on each. If it `ends_region`, deferred weight gradients run meanwhile."""
        # Padded, so that all ranks reduce equal parts.
        total = x.new_empty(-(-x.numel() // self.degree) * self.degree)
        legs = (self._message(leg, total) for leg in (Leg.REDUCE, Leg.GATHER))
        self._finish(self.in_block.submit(lambda: self._sum_into(total, x), *legs), ends_region)
        return total[: x.numel()].view(x.shape)

    def _finish(self, flight: InFlight, ends_region: bool) -> None:
        # Weight gradients need no message: they hide this one.
        if ends_region:
            self.in_block.compute_weight_gradients()
        self.wait(flight)

    def _message(self, leg: Leg, values: Tensor) -> TensorMessage:
        return TensorMessage(leg, self._layout.axes, values.numel())

    def _sum_into(self, total: Tensor, x: Tensor) -> None:
        source = x.contiguous().view(-1)
        if total.numel() > source.numel():
            total[: source.numel()] = source
            total[source.numel() :] = 0.0
            source = total
        self._reduce_into(self._piece(total), source)
        self._gather_parts(total)

    def _gather_into(self, whole: Tensor, x: Tensor) -> None:
        flat = whole.view(-1)
        # Gathers run in place: a rank's part already stands where the others expect it.
        self._piece(flat).view(x.shape).copy_(x)
        self._gather_parts(flat)

    def _gather_parts(self, flat: Tensor) -> None:
        self._collectives.gather(
            self._transfer(Leg.GATHER, flat.numel()),
            lambda tier: flat[self._layout.slice(tier, self._coordinates, flat.numel())],
            self._origin,
        )

    def _transfer(self, leg: Leg, numel: int) -> Transfer:
        # Sizes repeat every layer and micro-batch, so each transfer is resolved once.
        if (leg, numel) not in self._transfers:
            plan = self._collectives.plan
            self._transfers[leg, numel] = (
                number_transfer(self._layout, plan, numel)
                if leg is Leg.NUMBERS
                else line_transfer(self._layout, plan, leg, numel)
            )
        return self._transfers[leg, numel]

    def _piece(self, flat: Tensor) -> Tensor:
        return flat[self._layout.slice(self._layout.outermost, self._coordinates, flat.numel())]

    def _reduce_into(self, part: Tensor, x: Tensor) -> None:
        source = x.contiguous().view(-1)
        transfer = self._transfer(Leg.REDUCE, source.numel())
        part.view(-1).copy_(self._collectives.reduce(transfer, source, self._origin))

    def every(self, x: Tensor) -> Tensor:
        """Gather numbers x (m) from all ranks, unrounded: (n, m)."""
        found: list[Tensor] = []
        transfer = self._transfer(Leg.NUMBERS, x.numel())

        def work() -> None:
            found.append(self._collectives.gather_numbers(transfer, x))

        self.wait(self.in_block.submit(work, self._message(Leg.NUMBERS, x)))
        return found[0]

    def gather(self, x: Tensor) -> Tensor:
        """All-gather x (m, ...) to (n m, ...); backward: reduce-scatter."""
        return self._sent(x, self.all_gather, self.reduce_scatter)

    def scatter(self, x: Tensor) -> Tensor:
        """Reduce-scatter x (n m, ...); backward: all-gather."""
        return self._sent(x, self.reduce_scatter, self.all_gather)

    def copy(self, x: Tensor) -> Tensor:
        """Identity; backward: all-reduce."""
        same = self._sent(x, _same, lambda gradient: self.all_reduce(gradient, ends_region=True))
        return mark_returning(same) if is_returning(x) else same

    def total(self, x: Tensor) -> Tensor:
        """All-reduce x; backward: identity."""
        return self._sent(x, self.all_reduce, lambda gradient: gradient)

    def sum_numbers(self, x: Tensor) -> Tensor:
        """Sum statistics x over all ranks, unrounded; backward: the same sum of gradients."""
        return self._sent(x, self._sum, self._sum)

    def _sum(self, x: Tensor) -> Tensor:
        return self.every(x).sum(0).view(x.shape)

    def _sent(self, x: Tensor, forward: Map, backward: Map) -> Tensor:
        return x if self.degree == 1 else mapped(x, forward, backward)


class _Mapped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, backward: Map) -> Tensor:
        ctx.map = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.map(gradients[0]), None, None


def mapped(x: Tensor, forward: Map, backward: Map) -> Tensor:
    """`forward(x)`, whose backward is `backward`. Both may send messages."""
    return apply(_Mapped, x, forward, backward)


def share(x: Tensor, num_ranks: int) -> Tensor:
    """Identity; backward: the gradient times 1 / `num_ranks`.

    For gradients that `num_ranks` ranks compute in full, and that are later summed over these ranks.
    """
    return x if num_ranks == 1 else mapped(x, _same, lambda gradient: gradient * (1 / num_ranks))


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def apply(function: type[Function], *arguments: object) -> Tensor:
    """Apply an autograd function with one result."""
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result
