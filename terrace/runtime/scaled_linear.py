"""Linear layers whose three matrix products run in 8-bit floats (terrace.runtime.scaled_products).

A `ScaledMatrix` dispatches `F.linear`, or `grouped_linear` for a stack, to the functions below, with and without
gradients, so that an evaluation and a recomputed forward give the bits of the first. As with any `Matrix`
(terrace.runtime.linear), the input gradient is computed at once, and the weight gradient is recorded; the record
holds only codes of dy and x. Each operand is quantised once (terrace.runtime.scaled_operands).

Shape legend: N rows (all leading dims), I inputs and O outputs, E matrices of a stack.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.base.errors import PlanError
from terrace.model.grouped import grouped_linear
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.products import is_scaled
from terrace.runtime.linear import Matrix, WeightGradients, WeightQueue
from terrace.runtime.scaled_operands import Again, Entered, columns_of
from terrace.runtime.scaled_products import Codes, multiply
from terrace.runtime.scaling import Scaling
from terrace.runtime.weight_records import OperandRecord, Record, Sink

# Tensor functions, besides attributes, that neither read nor change values.
_READS_NO_VALUES = frozenset(
    [
        *("__get__", "__set__", "__hash__", "detach", "dim", "size", "stride", "numel", "storage_offset", "data_ptr"),
        *("untyped_storage", "requires_grad_", "is_floating_point", "register_hook"),
        "register_post_accumulate_grad_hook",
    ]
)


class ScaledMatrix(Matrix):
    """A matrix, or stack of matrices, whose products as the weight of a linear layer run in 8 bits.

    With a `scale` (1, 1) its values are codes (terrace.runtime.matrix_codes), which only those products may read.
    """

    scaling: Scaling
    scale: Tensor | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a linear layer with this weight in 8 bits, or any other `func`: `PlanError` if that reads codes."""
        own = _FUNCTIONS.get(func)
        if own is not None:
            return own(*args, **(kwargs or {}))
        if func.__name__ not in _READS_NO_VALUES and any(
            isinstance(each, cls) and each.scale is not None for each in args
        ):
            raise PlanError(
                f"a block calls {func.__name__} of a matrix that is held as the codes of its products, which "
                "torch.nn.functional.linear alone takes: write 'fp8:128' in place of 'fp8' in wire.gather and "
                "wire.refresh"
            )
        return super().__torch_function__(func, types, args, kwargs)


def scale_matrices(
    named: Iterable[tuple[ParamSpec, nn.Parameter]],
    blocks: Sequence[BlockSpec],
    index: int,
    scaling: Scaling,
    scales: Sequence[Tensor] | None = None,
) -> None:
    """Make `ScaledMatrix`es, in place, of the parameters of block `index` whose products run in 8 bits.

    `scales`, (1, 1) each, are given if the parameters are stored as codes.
    """
    for number, (spec, parameter) in enumerate(named):
        if is_scaled(blocks, index, spec):
            parameter.__class__ = ScaledMatrix
            assert isinstance(parameter, ScaledMatrix)
            parameter.scaling, parameter.gradients = scaling, WeightGradients()
            parameter.scale = None if scales is None else scales[number]


@dataclass
class ScaledProduct(Record):
    """The weight gradient dy^T x of a layer, or of each matrix of a stack, rounded to `dtype` before it is added."""

    weight: ScaledMatrix  # (O, I), or a stack (E, O, I)
    gradients: Sequence[Codes]  # (O, N) of each matrix
    inputs: Sequence[Tensor]  # as `Entered.kept` gave them
    again: Again | None
    dtype: torch.dtype

    def hold(self) -> None:
        self._versions = self._current_versions()

    def release(self) -> None:
        assert self._versions == self._current_versions(), "x was changed before the weight gradient was taken"

    def run(self, sinks: Mapping[int, Sink]) -> None:
        gradient, first = sinks[id(self.weight)].gradient_of(self.weight)
        parts = gradient.unbind() if gradient.dim() == 3 else (gradient,)
        for part, found in zip(parts, self.products(), strict=True):
            if found is not None:
                part.copy_(found) if first else part.add_(found)
            elif first:
                part.zero_()

    def products(self) -> Iterator[Tensor | None]:
        """The gradient (O, I) of each matrix; None if it has no rows."""
        inputs = columns_of(self.inputs) if self.again is None else self.again.take(self.inputs[0])
        for gradient, entered in zip(self.gradients, inputs, strict=True):
            yield multiply(gradient, entered, self.dtype) if gradient.values.numel() else None

    def _current_versions(self) -> list[int]:
        return [] if self.again is None else [each._version for each in self.inputs]


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    assert isinstance(weight, ScaledMatrix), "a scaled matrix is the weight of a linear layer, never its input"
    return _apply(input, weight, bias, weight.scaling.entered(input), torch.is_grad_enabled())


def _grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Any:
    assert isinstance(weight, ScaledMatrix), "a scaled stack is the weight of its products, never their input"
    return _apply(x, weight, None, weight.scaling.entered(x, tuple(counts)), torch.is_grad_enabled())


class _Scaled(torch.autograd.Function):
    """x (..., I), weight (O, I), bias (O) -> (..., O); or x (N, I) sorted by matrix, weight (E, O, I) -> (N, O)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: ScaledMatrix, bias: Tensor | None, entered: Entered, trains: bool
    ) -> Tensor:
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        kept = entered.kept(x) if needs_weight and trains else ()
        ctx.save_for_backward(weight if needs_input else None, *kept)
        ctx.weight, ctx.bias, ctx.counts, ctx.again = weight, bias, entered.counts, entered.again
        y = _multiplied(entered.rows, weight, x.dtype)
        if bias is not None:
            y += bias
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        _, *kept = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        (output_gradient,) = gradients
        rows, weight = output_gradient.reshape(-1, output_gradient.shape[-1]), ctx.weight  # (N, O)
        operands = weight.scaling.of_gradient(rows, ctx.counts)
        queue: WeightQueue | None = weight.gradients.current
        input_gradient = weight_gradient = bias_gradient = None
        if needs_input:
            product = _multiplied([each.rows for each in operands], weight, rows.dtype, transposed=True)  # (N, I)
            input_gradient = product.view(*output_gradient.shape[:-1], product.shape[-1])
        if needs_weight:
            record = ScaledProduct(weight, [each.columns for each in operands], kept, ctx.again, rows.dtype)
            if queue is None:
                weight_gradient = _outside(record)
            else:
                queue.add(record)
        if needs_bias and queue is not None and ctx.bias in queue:
            # At once, since a record that waits holds no more than codes.
            queue.add(OperandRecord(rows, None, None, ctx.bias), at_once=True)
        elif needs_bias:
            bias_gradient = rows.sum(0)
        return input_gradient, weight_gradient, bias_gradient, None, None


def _multiplied(rows: Sequence[Codes], weight: ScaledMatrix, dtype: torch.dtype, *, transposed: bool = False) -> Tensor:
    """Rows (N, I) times their matrices (O, I) -> (N, O); if `transposed`, rows (N, O) -> (N, I)."""
    values, scaling = weight.detach(), weight.scaling

    def product(codes: Codes, matrix: Tensor) -> Tensor:
        operand = scaling.of_weight(matrix, weight.scale)
        return multiply(codes, operand.columns if transposed else operand.rows, dtype)

    if values.dim() == 2:
        return product(rows[0], values)
    sizes = [len(each.values) for each in rows]
    found = values.new_empty((sum(sizes), values.shape[2 if transposed else 1]), dtype=dtype)
    for codes, matrix, out in zip(rows, values.unbind(), torch.split(found, sizes), strict=True):
        if len(out):
            out.copy_(product(codes, matrix))
    return found


def _outside(record: ScaledProduct) -> Tensor:
    """The weight gradient of a backward outside a step. Raises `PlanError` if autograd would round it to 8 bits."""
    weight = record.weight
    if weight.scale is not None:
        raise PlanError(
            "a backward outside of a step with a matrix that is held as codes, to whose 8 bits autograd would "
            "round its gradient: write 'fp8:128' in place of 'fp8' in wire.gather and wire.refresh"
        )
    found = [weight.new_zeros(weight.shape[-2:]) if each is None else each for each in record.products()]
    return torch.stack(found) if weight.dim() == 3 else found[0]


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {F.linear: _linear, grouped_linear: _grouped_linear}

# As in terrace.runtime.linear: `apply` of the base looks for transforms, absent here.
_apply: Callable[..., Any] = super(torch.autograd.Function, _Scaled).apply
