"""Grouped matrix products over rows sorted by expert, and the permutation of tokens into that order and back.

Deterministic: no atomic additions; both directions gather rows, and the k rows of a token are added in a fixed order.

Shape legend: T tokens, E experts, k experts of a token, N = T k rows sorted by expert, I inputs and O outputs of an
expert's matrix, H hidden.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from terrace.accelerator import occurrences


class Order(NamedTuple):
    """Permutation of the choices (T, k) to rows sorted by expert, and by token within an expert."""

    choices: Tensor  # (N) int64: row n is choice choices[n], of token choices[n] // k
    rows: Tensor  # (T, k) int64: the row of each choice, -1 for none
    counts: tuple[int, ...]  # rows of each expert
    columns: tuple[int, ...]  # choices with a row, in each column of `rows`
    is_whole: bool  # whether every choice has a row

    @classmethod
    def of(cls, experts: Tensor, num_experts: int, *, is_whole: bool = True) -> "Order":
        """Order of the choices `experts` (T, k). If not `is_whole`, choices of -1 get no row.

        On a GPU the host waits for the counts, once.
        """
        # Choices of no expert come last.
        flat = experts.flatten() if is_whole else experts.masked_fill(experts < 0, num_experts).flatten()
        numbers = torch.cat([occurrences(flat, num_experts + 1), (experts >= 0).sum(0)]).tolist()
        counts, columns = numbers[:num_experts], numbers[num_experts + 1 :]
        choices = flat.argsort(stable=True)
        if not is_whole:
            choices = choices[: sum(counts)].clone()  # kept for the backward, without the others
        rows = torch.full_like(flat, -1)
        rows[choices] = torch.arange(len(choices), device=flat.device)
        return cls(choices, rows.view_as(experts), tuple(counts), tuple(columns), is_whole)


def spread(x: Tensor, order: Order) -> Tensor:
    """Copy tokens x (T, H) to rows (N, H), once per chosen expert."""
    result: Tensor = _Moved.apply(x, order, True)  # type: ignore[no-untyped-call]
    return result


def collect(rows: Tensor, order: Order) -> Tensor:
    """Sum the rows (N, H) of each token, to (T, H)."""
    result: Tensor = _Moved.apply(rows, order, False)  # type: ignore[no-untyped-call]
    return result


def grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Multiply rows x (N, I) with the matrix of their expert, weight (E, O, I); returns (N, O).

    The first counts[0] rows belong to expert 0, and so on.
    """
    if has_torch_function_unary(weight):
        found: Tensor = handle_torch_function(grouped_linear, (weight,), x, weight, counts)
        return found
    result: Tensor = _GroupedLinear.apply(x, weight, tuple(counts))  # type: ignore[no-untyped-call]
    return result


def add_biases(y: Tensor, bias: Tensor, counts: Sequence[int], weights: Tensor | None = None) -> Tensor:
    """Add to rows y (N, O), in place, the bias of their expert, from (E, O), times the `weights` (N) of the rows.

    Rows are sorted as in `grouped_linear`. Returns y.
    """
    result: Tensor = _AddBiases.apply(y, bias, tuple(counts), weights)  # type: ignore[no-untyped-call]
    return result


def products(x: Tensor, weight: Tensor, counts: Sequence[int], transposed: bool = False) -> Tensor:
    """`grouped_linear` without autograd; `transposed`: weight is (E, I, O) instead of (E, O, I)."""
    matrices, sizes = weight if transposed else weight.mT, list(counts)
    out = x.new_empty(len(x), matrices.shape[2])
    for matrix, rows, found in zip(matrices.unbind(), torch.split(x, sizes), torch.split(out, sizes), strict=True):
        if len(rows):
            torch.mm(rows, matrix, out=found)
    return out


def stack_gradient(gradient: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Weight gradient (E, O, I) from the output gradient (N, O) and x (N, I); zero for an expert without rows."""
    out, sizes = gradient.new_empty(len(counts), gradient.shape[1], x.shape[1]), list(counts)
    for part, rows, inputs in zip(out.unbind(), torch.split(gradient, sizes), torch.split(x, sizes), strict=True):
        if len(rows):
            torch.mm(rows.t(), inputs, out=part)
        else:
            part.zero_()
    return out


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
        needs_input, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_input else None)
        ctx.counts = counts
        return products(x, weight, counts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        input_gradient = None if weight is None else products(gradient, weight, ctx.counts, transposed=True)
        weight_gradient = None if x is None else stack_gradient(gradient, x, ctx.counts)
        return input_gradient, weight_gradient, None


class _AddBiases(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, counts: tuple[int, ...], weights: Tensor | None) -> Tensor:
        ctx.counts = list(counts)
        ctx.save_for_backward(None if weights is None else bias, weights)
        ctx.mark_dirty(y)
        each = [None] * len(counts) if weights is None else torch.split(weights, ctx.counts)
        for rows, own, share in zip(torch.split(y, ctx.counts), bias.unbind(), each, strict=True):
            rows.add_(own) if share is None else rows.addr_(share, own)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, Tensor | None]:
        bias, weights = ctx.saved_tensors
        rows, of_bias, of_weights = torch.split(gradient, ctx.counts), None, None
        if weights is None:
            of_bias = torch.stack([own.sum(0) for own in rows]) if ctx.needs_input_grad[1] else None
            return gradient, of_bias, None, None
        if ctx.needs_input_grad[1]:
            of_bias = torch.stack([own.t() @ each for own, each in zip(rows, weights.split(ctx.counts), strict=True)])
        if ctx.needs_input_grad[3]:
            of_weights = torch.cat([own @ each for own, each in zip(rows, bias.unbind(), strict=True)])
        return gradient, of_bias, None, of_weights


class _Moved(torch.autograd.Function):
    # Each direction is the gradient of the other.

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Order, spreads: bool) -> Tensor:
        ctx.order, ctx.spreads = order, spreads
        return (_spread if spreads else _collect)(x, order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return (_collect if ctx.spreads else _spread)(gradient, ctx.order), None, None


def _spread(x: Tensor, order: Order) -> Tensor:
    return x.index_select(0, order.choices // order.rows.shape[1])


def _collect(rows: Tensor, order: Order) -> Tensor:
    if not order.is_whole:
        wide = torch.promote_types(rows.dtype, torch.float32)
        total = rows.new_zeros(len(order.rows), rows.shape[1], dtype=wide)
        for of_token, num_rows in zip(order.rows.t(), order.columns, strict=True):
            # Each column has at most one row per token, so indices are unique and the addition deterministic. Their
            # number is known, so the host does not wait for it.
            tokens = torch.nonzero_static(of_token >= 0, size=num_rows).squeeze(1)
            total.index_add_(0, tokens, rows.index_select(0, of_token[tokens]).to(wide))
        return total.to(rows.dtype)
    return rows.index_select(0, order.rows.flatten()).view(*order.rows.shape, rows.shape[1]).sum(1)
