"""Weight gradients that the runtime computes when the program says, directly in the flat gradient.

The backward of y = x W^T + b has two parts. Only the first is needed to continue the backward of the block:

    input gradient    dx = dy W                           computed at once
    weight gradient   dW += dy^T x,  db += sum of dy      recorded in a `WeightQueue`, computed when that is run

The split follows zero-bubble pipelines (Qi et al. 2401.10241, section 2). A record holds dy, x and the parameter;
running it needs neither the graph nor the values of the weights, which may be freed by then. The product is written
to the gradient buffer: the first one of a unit with `mm(out=)`, later ones with `addmm_`. No other tensor of the
weight's size is allocated. If the buffer has a wider dtype, products are computed in their own dtype, part by part,
and added in the buffer's.

Model code is unchanged. Matrices, and stacks of them, that a `WeightGradients` owns become `Matrix` parameters, which
dispatch `F.linear` (and so `nn.Linear`), `grouped_linear` and, on a CPU, `F.embedding` to the functions below. Every
other use of a weight, and every other parameter, goes through autograd and the hook of `GradientViews` into the same
buffer; both kinds may be mixed.

Shape legend: N rows (all leading dims), I inputs and O outputs of the layer, E matrices of a stack, V vocabulary, H
hidden.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from terrace.model.grouped import grouped_linear, products, stack_gradient
from terrace.runtime.weight_records import Product, Record, Sink, StackProduct, Sum, TableRows


class WeightQueue:
    """The weight gradients of one backward, in the order of its layers.

    Without `hold` a record runs when it is added: nothing is kept, and dy is still in the cache. With `hold`, records
    wait for `run` and keep their dy and x, which must not change until then. Any thread may add records (autograd
    uses its own on CUDA), but not while another runs the queue. `fills` says that they may run while routed messages
    travel; otherwise they belong to a separate BACKWARD_WEIGHT.
    """

    def __init__(self, sinks: Mapping[int, Sink], hold: bool, fills: bool = False) -> None:
        self._sinks, self.fills = sinks, fills
        self._hold = hold
        self._records: deque[Record] = deque()

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, parameter: Tensor) -> bool:
        """Whether gradients of `parameter` can be recorded here."""
        return id(parameter) in self._sinks

    def add(self, record: Record, at_once: bool = False) -> None:
        """Add a record; with `at_once` it runs now."""
        if self._hold and not at_once:
            record.hold()
            self._records.append(record)
        elif torch.is_grad_enabled():
            with torch.no_grad():
                record.run(self._sinks)
        else:  # as in a backward
            record.run(self._sinks)

    def run(self) -> None:
        """Compute the recorded gradients in order, and release each record's tensors.

        May be called any time between the opening and the reduction of the block's gradient buffer, even during the
        backward that records, from a function that has just started a message; records added later wait for the next
        call. On CUDA the work is enqueued on the current stream, which must be the backward's, without synchronizing.
        """
        if not self._records:
            return
        with torch.no_grad():
            while self._records:
                record = self._records.popleft()
                record.release()
                record.run(self._sinks)


class WeightGradients:
    """Connects the matrices of one engine to the queue of the running backward.

    A backward outside `recorded_in`, such as one that a user starts, leaves every gradient to autograd.
    """

    def __init__(self) -> None:
        # By `id`, since a tensor's own hash is computed in Python; sinks keep their parameters.
        self._sinks: dict[int, Sink] = {}
        self.current: WeightQueue | None = None

    def own(self, parameters: Iterable[Tensor], sink: Sink) -> None:
        """Record the gradients of `parameters` from now on, into the views of `sink`."""
        for parameter in parameters:
            self._sinks[id(parameter)] = sink
            if parameter.requires_grad and parameter.dim() in (2, 3):
                # Change the class, not the object: modules and lists already hold the object.
                if not isinstance(parameter, Matrix):  # a kind of it stays one
                    parameter.__class__ = Matrix
                assert isinstance(parameter, Matrix)
                parameter.gradients = self

    def queue(self, hold: bool, fills: bool = False) -> WeightQueue:
        return WeightQueue(self._sinks, hold, fills)

    def recorded_in(self, queue: WeightQueue) -> "_Recorded":
        return _Recorded(self, queue)


class _Recorded:
    def __init__(self, gradients: WeightGradients, queue: WeightQueue) -> None:
        self._gradients, self._queue = gradients, queue

    def __enter__(self) -> None:
        self._before, self._gradients.current = self._gradients.current, self._queue

    def __exit__(self, *_: object) -> None:
        # Restored on every exit, so that a nested or failed backward leaves no queue behind.
        self._gradients.current = self._before


def record_product(weight: Tensor, output_gradient: Tensor, inputs: Tensor, at_once: bool = False) -> bool:
    """Record the weight gradient of dy (N, O) and x (..., I) in the current queue. Returns False if there is none.

    With `at_once` it is computed before this returns, after which dy and x may change.
    """
    return _record(weight, Product(output_gradient, inputs, weight), at_once)


def record_sum(weight: Tensor, gradient: Tensor) -> bool:
    """Add a computed weight gradient, in any dtype. Returns False if there is no queue."""
    return _record(weight, Sum(gradient, gradient, weight), at_once=True)


def _record(weight: Tensor, record: Record, at_once: bool) -> bool:
    # Weights of another class, or a backward outside `recorded_in`, are left to autograd.
    queue = weight.gradients.current if isinstance(weight, Matrix) else None
    if queue is None:
        return False
    queue.add(record, at_once)
    return True


class Matrix(nn.Parameter):
    """A trainable matrix, or stack of matrices, whose products are recorded."""

    gradients: WeightGradients

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func`, or this module's recording version of it where one applies."""
        # Compilers trace the plain operator.
        own = _FUNCTIONS.get(func)
        if own is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            result = own(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return _plain(func, (), args, kwargs or {})


# (func, types, args, kwargs): calls `func` as if a `Matrix` were a plain tensor.
_plain: Callable[..., Any] = nn.Parameter.__torch_function__


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if type(weight) is not Matrix or torch.is_autocast_enabled(input.device.type) or _is_transformed():
        return NotImplemented
    return _apply_linear(input, weight, bias, weight.gradients)


def _grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Any:
    if type(weight) is not Matrix or torch.is_autocast_enabled(x.device.type) or _is_transformed():
        return NotImplemented
    return _apply_grouped_linear(x, weight, tuple(counts), weight.gradients)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if type(weight) is not Matrix:
        return NotImplemented
    # On CUDA rows would be added atomically: in no fixed order, and in bf16 rounded at every addition.
    special = padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse
    if special or input.device.type != "cpu" or _is_transformed():
        return NotImplemented
    return _apply_embedding(input, weight, weight.gradients)


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    grouped_linear: _grouped_linear,
}


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`once_differentiable` only if grad mode is on: its mode switch costs as much as a small product."""
    guarded = once_differentiable(backward)

    def run(ctx: Any, *gradients: Tensor) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return run


class _Linear(torch.autograd.Function):
    """x (..., I), weight (O, I), bias (O) -> (..., O)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Matrix, bias: Tensor | None, gradients: WeightGradients) -> Any:
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        # Saving only the operands that a gradient needs frees the rest early.
        ctx.save_for_backward(x if needs_weight else None, weight if needs_input else None)
        ctx.weight, ctx.bias, ctx.gradients = weight, bias, gradients
        return _plain(F.linear, (), (x, weight, bias))

    @staticmethod
    @_once
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = output_gradient.reshape(-1, output_gradient.shape[-1])  # (N, O)
        queue: WeightQueue | None = ctx.gradients.current
        input_gradient = weight_gradient = bias_gradient = None
        # First, since the block before waits for it.
        if needs_input:
            product = _plain(torch.mm, (), (rows, weight))  # (N, I)
            input_gradient = product.view(*output_gradient.shape[:-1], product.shape[-1])
        records_weight = needs_weight and queue is not None
        records_bias = needs_bias and queue is not None and ctx.bias in queue
        if queue is not None and (records_weight or records_bias):
            queue.add(Product(rows, x, ctx.weight if records_weight else None, ctx.bias if records_bias else None))
        # No queue: autograd accumulates the gradients itself.
        if needs_weight and not records_weight:
            weight_gradient = rows.t().mm(x.reshape(-1, x.shape[-1]))
        if needs_bias and not records_bias:
            bias_gradient = rows.sum(0)
        return input_gradient, weight_gradient, bias_gradient, None


class _GroupedLinear(torch.autograd.Function):
    """x (N, I) sorted by matrix, weight (E, O, I) -> (N, O)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Matrix, counts: tuple[int, ...], gradients: WeightGradients) -> Any:
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_input else None)
        ctx.weight, ctx.counts, ctx.gradients = weight, counts, gradients
        return _plain(products, (), (x, weight, counts))

    @staticmethod
    @_once
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        queue: WeightQueue | None = ctx.gradients.current
        input_gradient = weight_gradient = None
        if weight is not None:
            input_gradient = _plain(products, (), (output_gradient, weight, ctx.counts, True))
        if x is not None and queue is None:
            weight_gradient = stack_gradient(output_gradient, x, ctx.counts)
        elif x is not None and queue is not None:
            queue.add(StackProduct(output_gradient, x, ctx.weight, counts=ctx.counts))
        return input_gradient, weight_gradient, None, None


class _Embedding(torch.autograd.Function):
    """tokens (...), weight (V, H) -> (..., H)."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Matrix, gradients: WeightGradients) -> Any:
        ctx.save_for_backward(tokens)
        ctx.weight, ctx.gradients, ctx.shape = weight, gradients, tuple(_plain(Tensor.size, (), (weight,)))
        return _plain(F.embedding, (), (tokens, weight))

    @staticmethod
    @_once
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[None, Tensor | None, None]:
        (tokens,) = ctx.saved_tensors
        rows = output_gradient.reshape(-1, output_gradient.shape[-1])  # (N, H)
        if not ctx.needs_input_grad[1]:
            return None, None, None
        queue: WeightQueue | None = ctx.gradients.current
        if queue is None:
            return None, rows.new_zeros(ctx.shape).index_add_(0, tokens.reshape(-1), rows), None
        queue.add(TableRows(rows, tokens, ctx.weight))
        return None, None, None


# `Function.apply` itself is half of the Python of a layer: it looks for transforms (torch.func), absent here.
_is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
_apply_linear: Callable[..., Any] = super(torch.autograd.Function, _Linear).apply
_apply_grouped_linear: Callable[..., Any] = super(torch.autograd.Function, _GroupedLinear).apply
_apply_embedding: Callable[..., Any] = super(torch.autograd.Function, _Embedding).apply
