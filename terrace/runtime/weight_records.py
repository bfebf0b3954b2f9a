"""Records of weight gradients to be computed later, each with the operands of one.

Shape legend: N rows (all leading dims), I inputs and O outputs of a matrix, E matrices of a stack, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from terrace.model.product_parts import part_rows


class Sink(Protocol):
    """Provides gradient buffers; `GradientViews` is one."""

    def gradient_of(self, parameter: Tensor) -> tuple[Tensor, bool]:
        """The gradient of `parameter`, and whether it is uninitialised: the caller then writes it, otherwise adds."""


class Record:
    """Deferred gradients of a weight, of its bias, or of both."""

    def hold(self) -> None:
        """Remember the versions of tensors that must not change until the record runs."""

    def release(self) -> None:
        """Check that these tensors have not changed."""

    def run(self, sinks: Mapping[int, Sink]) -> None:
        """Add the gradients to the views in `sinks`, by the `id` of a parameter."""
        raise NotImplementedError


@dataclass
class OperandRecord(Record):
    """dy and x of the gradients of a weight and a bias; these are None where absent or not trained."""

    output_gradient: Tensor  # (N, O)
    inputs: Tensor | None  # (..., I), or tokens (...)
    weight: Tensor | None  # (O, I), or a stack (E, O, I)
    bias: Tensor | None = None  # (O)

    def hold(self) -> None:
        self._versions = self._current_versions()

    def release(self) -> None:
        assert self._versions == self._current_versions(), "dy or x was changed before the weight gradient was taken"

    def run(self, sinks: Mapping[int, Sink]) -> None:
        if self.weight is not None:
            assert self.inputs is not None, "autograd saves the input of a layer whose weight it differentiates"
            self._run_weight(self.inputs, *sinks[id(self.weight)].gradient_of(self.weight))
        if self.bias is not None:
            # The first gradient is written, not added: the buffer is uninitialised.
            gradient, first = sinks[id(self.bias)].gradient_of(self.bias)
            if first:
                torch.sum(self.output_gradient, 0, dtype=gradient.dtype, out=gradient)
            else:
                gradient.add_(self.output_gradient.sum(0, dtype=gradient.dtype))

    def _run_weight(self, inputs: Tensor, gradient: Tensor, first: bool) -> None:
        raise NotImplementedError

    def _current_versions(self) -> list[int]:
        return [tensor._version for tensor in (self.output_gradient, self.inputs) if tensor is not None]


class Product(OperandRecord):
    """The weight gradient dy^T x of a linear layer."""

    def _run_weight(self, inputs: Tensor, gradient: Tensor, first: bool) -> None:
        _product(self.output_gradient, inputs.reshape(-1, inputs.shape[-1]), gradient, first)


@dataclass
class StackProduct(OperandRecord):
    """The weight gradients of a stack: one product for each matrix and its consecutive rows."""

    counts: Sequence[int] = ()  # rows of each matrix, E of them

    def _run_weight(self, inputs: Tensor, gradient: Tensor, first: bool) -> None:
        counts = list(self.counts)
        rows, entered = torch.split(self.output_gradient, counts), torch.split(inputs, counts)
        for part, gradients, tokens in zip(gradient.unbind(), rows, entered, strict=True):
            if len(gradients):
                _product(gradients, tokens, part, first)
            elif first:
                part.zero_()


class Sum(OperandRecord):
    """A weight gradient summed elsewhere, passed in place of dy and x."""

    def _run_weight(self, inputs: Tensor, gradient: Tensor, first: bool) -> None:
        if first:
            gradient.copy_(inputs)
        else:
            gradient.add_(inputs)


class TableRows(OperandRecord):
    """The gradient of an embedding (V, O) on a CPU: adds only to the rows of its tokens."""

    def _run_weight(self, inputs: Tensor, gradient: Tensor, first: bool) -> None:
        tokens, rows = inputs.reshape(-1), self.output_gradient
        if gradient.dtype != rows.dtype:
            rows = rows.to(gradient.dtype)
        elif rows.dtype.itemsize < torch.float32.itemsize:
            # A half-precision row rounds whenever something is added: let that be once, not once a token.
            tokens, places = torch.unique(tokens, return_inverse=True)
            total = torch.zeros(len(tokens), rows.shape[1], dtype=torch.float32)
            rows = total.index_add_(0, places, rows.float()).to(rows.dtype)
        if first:
            gradient.zero_()
        gradient.index_add_(0, tokens, rows)


def _product(output_gradient: Tensor, inputs: Tensor, gradient: Tensor, first: bool) -> None:
    # dy^T x of dy (N, O) and x (N, I), written or added to the gradient (O, I)
    left = output_gradient.t()
    if gradient.dtype != left.dtype:
        # In parts: a part is still in the cache when it is converted, and no buffer of the weight's size is made.
        step = part_rows(inputs.shape[1], left.device.type)
        for start in range(0, len(left), step):
            part = torch.mm(left[start : start + step], inputs)
            gradient[start : start + step].copy_(part) if first else gradient[start : start + step].add_(part)
    elif first:
        torch.mm(left, inputs, out=gradient)
    else:
        gradient.addmm_(left, inputs)
