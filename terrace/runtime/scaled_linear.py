"""Linear layers whose three products take 8-bit floats (terrace.runtime.scaled_products).

A matrix that is a `ScaledMatrix` takes `F.linear` to the functions below, and a stack of experts `grouped_linear`, with
and without gradients: an evaluation and a recomputed forward then have the bits of the first. As with any `Matrix`
(terrace.runtime.linear), the input gradient is computed at once and the weight gradient is a record. Layers keep x in
the compute dtype, and quantise it again for the weight gradient.

Shape legend: N rows (all leading dims), I inputs and O outputs, E experts of a stack.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.base.errors import PlanError
from terrace.model.experts.products import grouped_linear
from terrace.model.spec import BlockSpec, ParamSpec
from terrace.plan.products import is_scaled
from terrace.runtime.linear import Matrix, WeightGradients, WeightQueue
from terrace.runtime.scaled_products import Scaling
from terrace.runtime.weight_records import Record

# Functions of a tensor besides its attributes that tell or change no value.
_READS_NO_VALUES = frozenset(
    [
        *("__get__", "__set__", "__hash__", "detach", "dim", "size", "stride", "numel", "storage_offset", "data_ptr"),
        *("untyped_storage", "requires_grad_", "is_floating_point", "register_hook"),
        "register_post_accumulate_grad_hook",
    ]
)


class ScaledMatrix(Matrix):
    """A matrix, or stack of them, whose products as the weight of a linear layer take 8 bits.

    With a `scale` (1, 1) its values are codes (terrace.runtime.matrix_codes), which nothing else than those products
    may read.
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
        """Run `func`, a linear layer with this weight in 8 bits; raises `PlanError` for another that reads codes."""
        own = _FUNCTIONS.get(func)
        if own is not None:
            return own(*args, **(kwargs or {}))
        if func.__name__ not in _READS_NO_VALUES and any(
            isinstance(each, cls) and each.scale is not None for each in args
        ):
            raise PlanError(
                f"a block calls {func.__name__} of a matrix that is held as the codes of its products, which "
                "torch.nn.functional.linear alone takes: write 'fp8:128' in place of 'fp8' in the table wire.gather"
            )
        return super().__torch_function__(func, types, args, kwargs)


def scale_matrices(
    named: Iterable[tuple[ParamSpec, nn.Parameter]],
    blocks: Sequence[BlockSpec],
    index: int,
    scaling: Scaling,
    scales: Sequence[Tensor] | None = None,
) -> None:
    """Give the parameters of block `index` that take 8 bits that form; the objects stay the same.

    `scales` (1, 1) are those of parameters that are codes.
    """
    for number, (spec, parameter) in enumerate(named):
        if is_scaled(blocks, index, spec):
            parameter.__class__ = ScaledMatrix
            assert isinstance(parameter, ScaledMatrix)
            parameter.scaling, parameter.gradients = scaling, WeightGradients()
            parameter.scale = None if scales is None else scales[number]


@dataclass
class ScaledProduct(Record):
    """The weight gradient dy^T x of a scaled linear layer, rounded to the dtype of dy before it is added."""

    def _run_weight(self, inputs: Tensor, gradient: Tensor, first: bool) -> None:
        assert isinstance(self.weight, ScaledMatrix), "recorded by a scaled linear layer"
        found = self.weight.scaling.weight_gradient(self.output_gradient, inputs.reshape(-1, inputs.shape[-1]))
        if first:
            gradient.copy_(found)
        else:
            gradient.add_(found)


@dataclass
class ScaledStackProduct(Record):
    """`ScaledProduct` of each matrix of a stack, of neighbouring rows."""

    counts: Sequence[int] = ()  # rows of each matrix, E of them

    def _run_weight(self, inputs: Tensor, gradient: Tensor, first: bool) -> None:
        assert isinstance(self.weight, ScaledMatrix), "recorded by a scaled stack"
        rows, entered = torch.split(self.output_gradient, list(self.counts)), torch.split(inputs, list(self.counts))
        for part, gradients, tokens in zip(gradient.unbind(), rows, entered, strict=True):
            if len(gradients):
                found = self.weight.scaling.weight_gradient(gradients, tokens)
                part.copy_(found) if first else part.add_(found)
            elif first:
                part.zero_()


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    assert isinstance(weight, ScaledMatrix), "a scaled matrix is the weight of a linear layer, never its input"
    return _apply_linear(input, weight, bias, weight.gradients)


class _ScaledLinear(torch.autograd.Function):
    """x (..., I), weight (O, I), bias (O) to (..., O)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: ScaledMatrix, bias: Tensor | None, gradients: WeightGradients) -> Any:
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_input else None)
        ctx.weight, ctx.bias, ctx.gradients = weight, bias, gradients
        y = weight.scaling.outputs(x.reshape(-1, x.shape[-1]), weight.detach(), weight.scale)
        if bias is not None:
            y += bias
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        (output_gradient,) = gradients
        rows, scaling = output_gradient.reshape(-1, output_gradient.shape[-1]), ctx.weight.scaling  # (N, O)
        queue: WeightQueue | None = ctx.gradients.current
        input_gradient = weight_gradient = bias_gradient = None
        if needs_input:
            product = scaling.input_gradient(rows, weight.detach(), ctx.weight.scale)  # (N, I)
            input_gradient = product.view(*output_gradient.shape[:-1], product.shape[-1])
        records_weight = needs_weight and queue is not None
        records_bias = needs_bias and queue is not None and ctx.bias in queue
        if queue is not None and (records_weight or records_bias):
            own, bias = ctx.weight if records_weight else None, ctx.bias if records_bias else None
            queue.add(ScaledProduct(rows, x, own, bias))
        if needs_weight and not records_weight:
            if ctx.weight.scale is not None:
                raise PlanError(
                    "a backward outside of a step with a matrix that is held as codes, to whose 8 bits autograd would "
                    "round its gradient: write 'fp8:128' in place of 'fp8' in the table wire.gather"
                )
            weight_gradient = scaling.weight_gradient(rows, x.reshape(-1, x.shape[-1]))
        if needs_bias and not records_bias:
            bias_gradient = rows.sum(0)
        return input_gradient, weight_gradient, bias_gradient, None


def _grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Any:
    assert isinstance(weight, ScaledMatrix), "a scaled stack is the weight of its products, never their input"
    return _apply_grouped_linear(x, weight, tuple(counts), weight.gradients)


class _ScaledGroupedLinear(torch.autograd.Function):
    """x (N, I) sorted by expert, weight (E, O, I) to (N, O)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: ScaledMatrix, counts: tuple[int, ...], gradients: WeightGradients) -> Any:
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_input else None)
        ctx.weight, ctx.counts, ctx.gradients = weight, counts, gradients
        return weight.scaling.of_experts(x, weight.detach(), counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        (rows,), scaling = gradients, ctx.weight.scaling  # (N, O)
        queue: WeightQueue | None = ctx.gradients.current
        input_gradient = weight_gradient = None
        if weight is not None:
            input_gradient = scaling.of_experts(rows, weight.detach(), ctx.counts, transposed=True)
        if x is not None and queue is not None:
            queue.add(ScaledStackProduct(rows, x, ctx.weight, counts=ctx.counts))
        elif x is not None:
            pairs = zip(torch.split(rows, list(ctx.counts)), torch.split(x, list(ctx.counts)), strict=True)
            weight_gradient = torch.stack([scaling.weight_gradient(*pair) for pair in pairs])
        return input_gradient, weight_gradient, None, None


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {F.linear: _linear, grouped_linear: _grouped_linear}

# As in terrace.runtime.linear: `apply` of the base looks for transforms, absent here.
_apply_linear: Callable[..., Any] = super(torch.autograd.Function, _ScaledLinear).apply
_apply_grouped_linear: Callable[..., Any] = super(torch.autograd.Function, _ScaledGroupedLinear).apply
