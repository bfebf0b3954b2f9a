"""Products that overlap with a region's messages, in chunks (as FLUX, 2406.06858, does in tiles).

    forward    the next part of the input is gathered while one is multiplied;
               the next part of the result is multiplied while one is summed over the rows
    backward   the next part of the output gradient is gathered while one is multiplied;
               the message of the input gradient travels while the weight gradients are computed (AxisComm)

A part holds the same tokens of every rank's slice, so each can be gathered or summed separately with the same result
as the whole message. Shape legend: T tokens, R rows, m = T/R tokens of a rank, n inner features, H hidden.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from terrace.plan.tensor_traffic import chunk_bounds
from terrace.program.block_program.steps import ComputeKind
from terrace.runtime.linear import record_product
from terrace.runtime.tensor.axis_comm import AxisComm, apply
from terrace.runtime.tensor.regathered import RegatheredInput


def arriving_linear(x: Tensor, weight: nn.Parameter, held: RegatheredInput, shape: Sequence[int]) -> Tensor:
    """`F.linear(x, weight)` for a region's input x (B, S, H), while parts of x still arrive."""
    return apply(_Arriving, x, weight, held, shape)


def product_scatter(
    x: Tensor, weight: nn.Parameter, more: Tensor | None, comm: AxisComm, held: RegatheredInput
) -> Tensor:
    """Reduce-scatter the product of x (T, n) and the transposed weight (H, n), plus `more` (T, H), to (m, H)."""
    return apply(_ProductScatter, x, weight, more, comm, held)


class _Arriving(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, held: RegatheredInput, shape: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.held = weight, held
        values, num_rows = weight.detach(), held.comm.degree
        y = x.new_empty((num_rows, held.num_tokens, weight.shape[0]))
        for start, stop, part in held.parts():
            held.comm.in_block.computes(ComputeKind.OUTPUTS)
            y[:, start:stop] = F.linear(part, values).view(num_rows, stop - start, -1)
        return y.flatten(0, 1)[: x.shape[0] * x.shape[1]].view(*shape, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        rows = gradients[0].flatten(0, 1)
        own = None
        if ctx.needs_input_grad[1] and not record_product(ctx.weight, rows, x):
            ctx.held.await_refilled(ctx.held.comm)
            own = rows.t().mm(x.flatten(0, 1))
        return rows.mm(weight.detach()).view(x.shape), own, None, None


class _ProductScatter(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, more: Tensor | None, comm: AxisComm, held: RegatheredInput
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.comm, ctx.held = weight, comm, held
        values, tokens = weight.detach(), x.shape[0] // comm.degree
        # A part takes the same tokens of every rank, so that its reduction is a whole message.
        by_rank = x.view(comm.degree, tokens, -1)
        part = x.new_empty((tokens, weight.shape[0]))
        under_way = []
        for start, stop in chunk_bounds(tokens, held.num_chunks):
            comm.in_block.computes(ComputeKind.OUTPUTS)
            product = F.linear(by_rank[:, start:stop].flatten(0, 1), values)
            if more is not None:
                product += more.view(comm.degree, tokens, -1)[:, start:stop].flatten(0, 1)
            under_way.append(comm.start_reduce(part[start:stop], product))
        # The region's input has been used by its last product.
        held.drop()
        for flight in under_way:
            comm.wait(flight)
        return part

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        comm, held, gradient = ctx.comm, ctx.held, gradients[0].contiguous()
        bounds = chunk_bounds(gradient.shape[0], held.num_chunks)
        under_way = []
        for start, stop in bounds:
            whole = gradient.new_empty((comm.degree * (stop - start), gradient.shape[1]))
            under_way.append((comm.start_gather(whole, gradient[start:stop]), whole))
        # After the gathers of the gradient, which are needed first.
        held.refill(comm)
        # The gathered gradient is kept whole for the weight gradient.
        rows = gradient.new_empty((comm.degree, *gradient.shape))
        inputs = torch.empty_like(x).view(comm.degree, gradient.shape[0], -1)
        for (start, stop), (flight, whole) in zip(bounds, under_way, strict=True):
            comm.wait(flight)
            comm.in_block.computes(ComputeKind.INPUT_GRADIENTS)
            rows[:, start:stop] = whole.view(comm.degree, stop - start, -1)
            inputs[:, start:stop] = whole.mm(weight.detach()).view(comm.degree, stop - start, -1)
        rows = rows.flatten(0, 1)
        own = None
        if ctx.needs_input_grad[1] and not record_product(ctx.weight, rows, x):
            own = rows.t().mm(x)
        return inputs.flatten(0, 1), own, rows if ctx.needs_input_grad[2] else None, None, None
