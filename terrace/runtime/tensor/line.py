"""Collectives among the ranks of one tensor axis, and their backwards.

Let x_r be what rank r of n holds, [x_0; ...; x_n-1] the concatenation over the first dim, dL/dy written y':

    name      forward                         backward
    gather    y_r = [x_0; ...; x_n-1]         x_r' = part r of sum_s y_s'
    scatter   y_r = part r of sum_s x_s       x_r' = [y_0'; ...; y_n-1']
    copy      y_r = x_r (the same on all)     x_r' = sum_s y_s'
    total     y_r = sum_s x_s                 x_r' = y_r' (the same on all)
    numbers   y_r = sum_s x_s                 x_r' = sum_s y_s'

The first four are Megatron-LM's (1909.08053, section 3; 2205.05198, section 4.2: g and its conjugate). Under `copy`
every rank uses the same x for another part of a result, so their gradients add up; after `total` every rank goes on
with the same y and finds the same gradient. `numbers` is for statistics, such as a norm's, of which every rank makes
its own part of a result.

Messages are of class `tensor`, in the wire format of each tier, but numbers travel as they are.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from terrace.comm import Collectives, Meter, Origin
from terrace.plan import Layout, MessageClass
from terrace.plan.grid import position
from terrace.plan.layout import DEVICE
from terrace.runtime.clock import Clock


class Line:
    """The ranks that differ from this one on one tensor axis.

    The time of messages goes to the category `wait tensor` of the clock.
    """

    def __init__(
        self,
        collectives: Collectives,
        layout: Layout,
        rank: int,
        device: torch.device,
        meter: Meter,
        clock: Clock,
    ) -> None:
        self.degree = layout.data_degree
        self._collectives = collectives
        self._layout = layout
        self.place = position(layout.degrees, layout.coordinates(rank))
        self._coordinates = layout.coordinates(rank)
        self._origin = Origin(f"tensor {'x'.join(layout.axes)}", layout, device, meter)
        self._clock = clock

    def all_gather(self, x: Tensor) -> Tensor:
        """Return x (m, ...) of all ranks, (n m, ...)."""
        whole = x.new_empty((self.degree * x.shape[0], *x.shape[1:]))
        flat = whole.view(-1)

        def piece(tier: int) -> Tensor:
            return flat[self._layout.slice(tier, self._coordinates, flat.numel())]

        piece(self._layout.outermost).view(x.shape).copy_(x)
        self._clock.mark(self._clock.doing)
        self._collectives.gather(MessageClass.TENSOR, piece, self._layout.outermost, DEVICE, self._origin)
        self._clock.mark("wait tensor")
        return whole

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's part (m, ...) of the sum of x (n m, ...) over all ranks."""
        part = x.new_empty((x.shape[0] // self.degree, *x.shape[1:]))
        self._clock.mark(self._clock.doing)
        total = self._collectives.reduce(
            MessageClass.TENSOR, x.contiguous().view(-1), DEVICE, self._layout.outermost, self._origin
        )
        self._clock.mark("wait tensor")
        part.view(-1).copy_(total)
        return part

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks, the same bits on each."""
        flat = x.reshape(-1)
        missing = -flat.numel() % self.degree
        padded = F.pad(flat, (0, missing)) if missing else flat
        return self.all_gather(self.reduce_scatter(padded))[: flat.numel()].view(x.shape)

    def every(self, x: Tensor) -> Tensor:
        """Return numbers x (m) of all ranks, (n, m), unrounded."""
        self._clock.mark(self._clock.doing)
        rows = self._collectives.gather_numbers(x, self._layout)
        self._clock.mark("wait tensor")
        return rows

    def gather(self, x: Tensor) -> Tensor:
        """Return x (m, ...) of all ranks, (n m, ...); backward: reduce-scatter."""
        return x if self.degree == 1 else _apply(_Gather, x, self)

    def scatter(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sum of x (n m, ...); backward: all-gather."""
        return x if self.degree == 1 else _apply(_Scatter, x, self)

    def copy(self, x: Tensor) -> Tensor:
        """Return x; backward: all-reduce."""
        return x if self.degree == 1 else _apply(_Copy, x, self)

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks; backward: nothing to do."""
        return x if self.degree == 1 else _apply(_Total, x, self)

    def numbers(self, x: Tensor) -> Tensor:
        """Return the sum of statistics x over all ranks; backward: the same sum of gradients."""
        return x if self.degree == 1 else _apply(_Numbers, x, self)


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return line.all_gather(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.line.reduce_scatter(gradients[0]), None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return line.reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.line.all_gather(gradients[0]), None


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.line.all_reduce(gradients[0]), None


class _Total(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        return line.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Numbers(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return line.every(x).sum(0).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.line.every(gradients[0]).sum(0).view(gradients[0].shape), None


class _Share(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.share, None


def share(x: Tensor, num_ranks: int) -> Tensor:
    """Return x; backward: 1 / `num_ranks` of its gradient, of which every rank finds the whole.

    Parameters that ranks share have their gradients added up over these ranks.
    """
    return x if num_ranks == 1 else _apply(_Share, x, 1 / num_ranks)


def _apply(function: type[Function], *arguments: object) -> Tensor:
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result
