"""Layers whose products quantise both their operands each by itself: the definition, without anything shared or kept.

Bits must be those of terrace.runtime.scaled_linear, which makes codes once. Only codes of one operand and the product
of codes are the runtime's own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from terrace.model.grouped import grouped_linear
from terrace.runtime import scaled_linear, scaled_operands
from terrace.runtime.linear import WeightQueue
from terrace.runtime.scaled_linear import ScaledMatrix
from terrace.runtime.scaled_products import Codes, encode, multiply
from terrace.runtime.weight_records import OperandRecord


def product(left: Tensor, right: Tensor, of_left: torch.dtype, weight: ScaledMatrix, scale: Tensor | None) -> Tensor:
    """left right^T of (M, K) and (N, K), in the dtype of `left`; with a scale the right one is codes."""
    by_row = weight.scaling.by_row
    codes = encode(right, weight.scaling.values, by_row) if scale is None else Codes(right.contiguous(), scale)
    return multiply(encode(left, of_left, by_row), codes, left.dtype)


def outputs(x: Tensor, matrix: Tensor, weight: ScaledMatrix) -> Tensor:
    return product(x, matrix, weight.scaling.values, weight, weight.scale)


def input_gradient(dy: Tensor, matrix: Tensor, weight: ScaledMatrix) -> Tensor:
    return product(dy, matrix.t(), weight.scaling.gradients, weight, weight.scale)


def weight_gradient(dy: Tensor, x: Tensor, weight: ScaledMatrix) -> Tensor:
    return product(dy.t(), x.t(), weight.scaling.gradients, weight, None)


@dataclass
class Apart(OperandRecord):
    """A weight gradient that holds dy and x themselves."""

    counts: Sequence[int] = ()

    def _run_weight(self, inputs: Tensor, gradient: Tensor, first: bool) -> None:
        assert isinstance(self.weight, ScaledMatrix)
        rows = inputs.reshape(-1, inputs.shape[-1])
        parts = gradient.unbind() if gradient.dim() == 3 else (gradient,)
        gradients, entered = (torch.split(each, list(self.counts)) for each in (self.output_gradient, rows))
        for part, dy, x in zip(parts, gradients, entered, strict=True):
            if len(dy):
                found = weight_gradient(dy, x, self.weight)
                part.copy_(found) if first else part.add_(found)
            elif first:
                part.zero_()


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: ScaledMatrix, bias: Tensor | None, counts: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias, ctx.counts = weight, bias, list(counts)
        rows, matrices = x.reshape(-1, x.shape[-1]), weight.detach()
        parts = zip(torch.split(rows, ctx.counts), matrices.view(-1, *matrices.shape[-2:]), strict=True)
        y = torch.cat([outputs(own, matrix, weight) for own, matrix in parts if len(own)])
        if bias is not None:
            y += bias
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        x, _ = ctx.saved_tensors
        rows, weight = gradients[0].reshape(-1, gradients[0].shape[-1]), ctx.weight
        matrices = weight.detach().view(-1, *weight.shape[-2:])
        parts = zip(torch.split(rows, ctx.counts), matrices, strict=True)
        own = torch.cat([input_gradient(dy, matrix, weight) for dy, matrix in parts if len(dy)])
        queue: WeightQueue = weight.gradients.current
        queue.add(Apart(rows, x, weight, ctx.bias, ctx.counts))
        return own.view(x.shape), None, None, None


def _linear(input: Tensor, weight: ScaledMatrix, bias: Tensor | None = None) -> Any:
    counts = (input.numel() // input.shape[-1],)
    return _Layer.apply(input, weight, bias, counts)  # type: ignore[no-untyped-call]


def _grouped_linear(x: Tensor, weight: ScaledMatrix, counts: Sequence[int]) -> Any:
    return _Layer.apply(x, weight, None, counts)  # type: ignore[no-untyped-call]


@contextmanager
def apart() -> Iterator[None]:
    """Inside, layers of this process are those of this module."""
    with patch.dict(scaled_linear._FUNCTIONS, {F.linear: _linear, grouped_linear: _grouped_linear}):
        yield


@contextmanager
def counted() -> Iterator[list[int]]:
    """Numbers of elements that the runtime quantises inside, one for each operand."""
    found: list[int] = []

    def noting(x: Tensor, dtype: torch.dtype, by_row: bool) -> Codes:
        found.append(x.numel())
        return encode(x, dtype, by_row)

    with patch.object(scaled_operands, "encode", noting):
        yield found
