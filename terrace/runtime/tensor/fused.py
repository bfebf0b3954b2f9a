"""A region's products fused with their messages (`tensor_chunks = "fused"`).

With x_r the residual stream of rank r, W_i the matrices into a region and V the one out of it:

    enter    forward     Y_i = [x_0; ...; x_n-1] W_i^T for all i    gather and products fused
             backward    x_r' = part r of sum_s sum_i Y_i' W_i      products, then a reduction that travels while the
                                                                    weight gradients are computed, as without fusion
    leave    forward     z_r = part r of sum_s u_s V^T              product and reduction fused
             backward    u_r' = [z_0'; ...; z_n-1'] V               gather and product fused

The reduction of the input's gradient overlaps with weight gradients. Fusing it with the input gradients would require
concatenated matrices, and it would compete with the second gather of the input.

Shape legend: m tokens of a rank, T = n m tokens, H hidden, N inner features of a rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from terrace.program.block_program.steps import ComputeKind
from terrace.runtime.linear import record_product
from terrace.runtime.tensor.axis_comm import AxisComm, apply
from terrace.runtime.tensor.regathered import RegatheredInput


def gather_products(
    x: Tensor, weights: Sequence[nn.Parameter], comm: AxisComm, held: RegatheredInput
) -> tuple[Tensor, list[Tensor]]:
    """All-gather x (m, H) to (T, H), and multiply it with the transposed `weights` (N, H): (T, N) each."""
    whole, *products = _GatherProducts.apply(x, comm, held, *weights)  # type: ignore[no-untyped-call]
    return whole, products


def scatter_product(x: Tensor, weight: nn.Parameter, comm: AxisComm, held: RegatheredInput) -> Tensor:
    """Reduce-scatter the product of x (T, N) and the transposed weight (H, N) to (m, H)."""
    return apply(_ScatterProduct, x, weight, comm, held)


class _GatherProducts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: AxisComm, held: RegatheredInput, *weights: Tensor) -> tuple[Tensor, ...]:
        matrices = [weight.detach().t() for weight in weights]
        whole, products = comm.gather_products(x, matrices, ComputeKind.OUTPUTS)
        held.hold(whole, x)
        ctx.set_materialize_grads(False)  # most regions read the gathered input by these products alone
        ctx.save_for_backward(whole, *weights)
        ctx.weights, ctx.comm, ctx.held = weights, comm, held
        return whole, *products

    @staticmethod
    def backward(ctx: Any, total: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        whole, *weights = ctx.saved_tensors
        for rows, weight in zip(gradients, weights, strict=True):
            if rows is not None:
                total = rows.mm(weight.detach()) if total is None else torch.addmm(total, rows, weight.detach())
        assert total is not None, "a backward reaches a region by one of its products"
        # Gradients of weights read the input, which has been dropped.
        ctx.held.await_refilled(ctx.comm)
        own: list[Tensor | None] = []
        for rows, weight, needed in zip(gradients, ctx.weights, ctx.needs_input_grad[3:], strict=True):
            is_left = needed and rows is not None and not record_product(weight, rows, whole)
            own.append(rows.t().mm(whole) if is_left and rows is not None else None)
        return ctx.comm.reduce_scatter(total, ends_region=True), None, None, *own


class _ScatterProduct(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, comm: AxisComm, held: RegatheredInput) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.comm, ctx.held = weight, comm, held
        part = comm.scatter_product(x, weight.detach().t(), ComputeKind.OUTPUTS)
        # The region's input has been used by its last product.
        held.drop()
        return part

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        comm: AxisComm = ctx.comm
        rows, (inputs,) = comm.gather_products(gradients[0], [weight.detach()], ComputeKind.INPUT_GRADIENTS)
        # After the gradient, which is needed first.
        ctx.held.refill(comm)
        own = None
        if ctx.needs_input_grad[1] and not record_product(ctx.weight, rows, x):
            own = rows.t().mm(x)
        return inputs, own, None, None
