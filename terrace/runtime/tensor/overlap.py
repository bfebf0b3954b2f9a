"""Products that overlap with the messages of a region, in parts (FLUX, 2406.06858, at the level of chunks).

    forward    while a part of the gathered input is multiplied, the next one is under way;
               while a part of the result is summed over the rows, the next one is multiplied
    backward   while a part of the gathered gradient is multiplied, the next one is under way;
               the message of the input gradient travels while the weight gradients are computed (Line)

A part holds the same tokens of every rank's slice, so each is gathered or summed by itself and the results are those
of the whole message. Shape legend: T tokens, R rows, m = T/R tokens of a rank, n inner features, H hidden.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from terrace.plan.tensor_traffic import chunk_bounds
from terrace.runtime.linear import record_product
from terrace.runtime.tensor.entry import Entry
from terrace.runtime.tensor.line import Line


def arriving_linear(x: Tensor, weight: nn.Parameter, entry: Entry, shape: Sequence[int]) -> Tensor:
    """Return `F.linear(x, weight)` for the input x (B, S, H) of a region that is still arriving."""
    result: Tensor = _Arriving.apply(x, weight, entry, shape)  # type: ignore[no-untyped-call]
    return result


def product_scatter(x: Tensor, weight: nn.Parameter, line: Line, entry: Entry) -> Tensor:
    """Return this rank's part (m, H) of the sum over the rows of x (T, n) times the transposed weight (H, n)."""
    result: Tensor = _ProductScatter.apply(x, weight, line, entry)  # type: ignore[no-untyped-call]
    return result


class _Arriving(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, entry: Entry, shape: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.entry = weight, entry
        values, num_rows = weight.detach(), entry.num_rows
        y = x.new_empty((num_rows, entry.num_tokens, weight.shape[0]))
        for start, stop, part in entry.parts():
            y[:, start:stop] = F.linear(part, values).view(num_rows, stop - start, -1)
        return y.flatten(0, 1)[: x.shape[0] * x.shape[1]].view(*shape, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        rows = gradients[0].flatten(0, 1)
        own = None
        if ctx.needs_input_grad[1] and not record_product(ctx.weight, rows, x):
            ctx.entry.await_refilled(ctx.entry.line)
            own = rows.t().mm(x.flatten(0, 1))
        return rows.mm(weight.detach()).view(x.shape), own, None, None


class _ProductScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, line: Line, entry: Entry) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.line, ctx.entry = weight, line, entry
        values, tokens = weight.detach(), x.shape[0] // line.degree
        by_rank = x.view(line.degree, tokens, -1)
        part = x.new_empty((tokens, weight.shape[0]))
        under_way = []
        for start, stop in chunk_bounds(tokens, entry.num_chunks):
            product = F.linear(by_rank[:, start:stop].flatten(0, 1), values)
            under_way.append((line.start_reduce(part[start:stop], product), product))
        entry.drop()
        for ticket, _ in under_way:
            line.wait(ticket)
        return part

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        line, entry, gradient = ctx.line, ctx.entry, gradients[0].contiguous()
        bounds = chunk_bounds(gradient.shape[0], entry.num_chunks)
        under_way = []
        for start, stop in bounds:
            whole = gradient.new_empty((line.degree * (stop - start), gradient.shape[1]))
            under_way.append((line.start_gather(whole, gradient[start:stop]), whole))
        entry.refill(line)
        rows = gradient.new_empty((line.degree, *gradient.shape))
        inputs = torch.empty_like(x).view(line.degree, gradient.shape[0], -1)
        for (start, stop), (ticket, whole) in zip(bounds, under_way, strict=True):
            line.wait(ticket)
            rows[:, start:stop] = whole.view(line.degree, stop - start, -1)
            inputs[:, start:stop] = whole.mm(weight.detach()).view(line.degree, stop - start, -1)
        rows = rows.flatten(0, 1)
        own = None
        if ctx.needs_input_grad[1] and not record_product(ctx.weight, rows, x):
            own = rows.t().mm(x)
        return inputs.flatten(0, 1), own, None, None
