"""Weight gradients computed by the runtime: when the program says, into their place in the flat gradient.

The backward of y = x W^T + b has two parts. The backward of the block goes on with the first; nothing in the
block waits for the second:

    input gradient    dx = dy W                           computed at once
    weight gradient   dW += dy^T x,  db += sum of dy      recorded in a `WeightQueue`, computed when that is run

The split follows zero-bubble pipelines (Qi et al. 2401.10241, section 2). A record holds dy, x and the
parameter: running it needs neither the graph nor the values of the weights, which may be freed by then. The
product is written into the gradient buffer itself: the first one of a unit there (`mm(out=)`), later ones
added by the product (`addmm_`). No other tensor of the weight's size is made. Where the buffer has a wider dtype,
products are rounded to their own, part by part, and added in the buffer's.

Model code is unchanged. Matrices that a `WeightGradients` owns become `Matrix` parameters, which take `F.linear`, and
so `nn.Linear`, and on a CPU `F.embedding`, to the functions below. Every other use of a weight, and every
other parameter, goes through autograd and the hook of `GradientViews`, into the same buffer and in any mix with this.

Shape legend: N rows (all leading dims), I inputs and O outputs of the layer, V vocabulary, H hidden.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_PART_NUMEL = {"cpu": 1 << 19, "cuda": 1 << 24}  # of a product that is converted; on a GPU a guess


class Sink(Protocol):
    """Where gradients are kept; `GradientViews` is one."""

    def gradient_of(self, parameter: Tensor) -> tuple[Tensor, bool]:
        """The gradient of `parameter`, and whether it is the caller who gives it its first values."""


@dataclass
class _Record:
    # weight and bias are None where the layer has none or does not train it

    output_gradient: Tensor  # (N, O)
    inputs: Tensor | None  # (..., I), or tokens (...)
    weight: Tensor | None  # (O, I)
    bias: Tensor | None = None  # (O)

    def hold(self) -> None:
        """Remember the versions of dy and x, to check them when the record runs."""
        self._versions = self._current_versions()

    def release(self) -> None:
        assert self._versions == self._current_versions(), "dy or x was changed before the weight gradient was taken"

    def run(self, sinks: Mapping[int, Sink]) -> None:
        """Add the gradients to the views in `sinks`."""
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


class _Product(_Record):
    # of a linear layer

    def _run_weight(self, inputs: Tensor, gradient: Tensor, first: bool) -> None:
        left, right = self.output_gradient.t(), inputs.reshape(-1, inputs.shape[-1])  # (O, N), (N, I)
        if gradient.dtype != left.dtype:
            # In parts: a part is still in the cache when it is converted, and no buffer of the weight's size is made.
            step = max(1, _PART_NUMEL[left.device.type] // right.shape[1])
            for start in range(0, len(left), step):
                part = torch.mm(left[start : start + step], right)
                gradient[start : start + step].copy_(part) if first else gradient[start : start + step].add_(part)
        elif first:
            torch.mm(left, right, out=gradient)
        else:
            gradient.addmm_(left, right)


class _Sum(_Record):
    # of code that has summed up the weight gradient itself, which stands for dy and for x

    def _run_weight(self, inputs: Tensor, gradient: Tensor, first: bool) -> None:
        if first:
            gradient.copy_(inputs)
        else:
            gradient.add_(inputs)


class _Rows(_Record):
    # of an embedding: only the rows of its tokens are touched

    def _run_weight(self, inputs: Tensor, gradient: Tensor, first: bool) -> None:
        tokens, rows = inputs.reshape(-1), self.output_gradient
        if gradient.dtype != rows.dtype:
            rows = rows.to(gradient.dtype)
        elif rows.dtype.itemsize < torch.float32.itemsize:
            # A half-precision row rounds whenever something is added: let that be once, not once a token.
            tokens, places = torch.unique(tokens, return_inverse=True)
            total = torch.zeros(len(tokens), rows.shape[1], dtype=torch.float32, device=rows.device)
            rows = total.index_add_(0, places, rows.float()).to(rows.dtype)
        if first:
            gradient.zero_()
        gradient.index_add_(0, tokens, rows)


class WeightQueue:
    """The weight gradients of one backward, in the order of its layers.

    Without `hold` a record is run when it is added: nothing is kept, and dy is still in the cache. With it,
    records wait for `run` and hold their dy and x, which must not change until then. Any thread may add, as
    autograd does on CUDA, but not while another runs the queue.
    """

    def __init__(self, sinks: Mapping[int, Sink], hold: bool) -> None:
        self._sinks = sinks
        self._hold = hold
        self._records: deque[_Record] = deque()

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, parameter: Tensor) -> bool:
        """Whether a gradient of `parameter` may be recorded here."""
        return id(parameter) in self._sinks

    def add(self, record: _Record, at_once: bool = False) -> None:
        """Take a record; one that is to be run at once is never held."""
        if self._hold and not at_once:
            record.hold()
            self._records.append(record)
        elif torch.is_grad_enabled():
            with torch.no_grad():
                record.run(self._sinks)
        else:  # as in a backward
            record.run(self._sinks)

    def run(self) -> None:
        """Compute the recorded gradients in order, and drop each record's tensors.

        May be called at any time after the block's gradient buffer was opened and before it is reduced, also in the
        middle of the backward that records, from a function that has just started a message; later records wait
        for the next call. On CUDA the work is enqueued on the current stream, which must be the stream of the
        backward, and the host does not wait.
        """
        if not self._records:
            return
        with torch.no_grad():
            while self._records:
                record = self._records.popleft()
                record.release()
                record.run(self._sinks)


class WeightGradients:
    """Joins the matrices of one engine to the queue of the backward that is running.

    A backward outside `recorded_in`, such as one that a user starts by hand, leaves every gradient to autograd.
    """

    def __init__(self) -> None:
        # By `id`, since a tensor's own hash is computed in Python; sinks keep their parameters.
        self._sinks: dict[int, Sink] = {}
        self.current: WeightQueue | None = None

    def own(self, parameters: Iterable[Tensor], sink: Sink) -> None:
        """Record the gradients of `parameters` from now on, for the views of `sink`."""
        for parameter in parameters:
            self._sinks[id(parameter)] = sink
            if parameter.requires_grad and parameter.dim() == 2:
                # The class changes and not the object: modules, and lists made of them, have it already.
                parameter.__class__ = Matrix
                assert isinstance(parameter, Matrix)
                parameter.gradients = self

    def queue(self, hold: bool) -> WeightQueue:
        return WeightQueue(self._sinks, hold)

    def recorded_in(self, queue: WeightQueue) -> "_Recorded":
        """Record in `queue` the weight gradients of the backward that the body of a `with` runs."""
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
    """Record the weight gradient of dy (N, O) and x (..., I) in the current queue; returns whether a queue took it.

    With `at_once` it is computed before this returns, and dy and x may change then.
    """
    return _record(weight, _Product(output_gradient, inputs, weight), at_once)


def record_sum(weight: Tensor, gradient: Tensor) -> bool:
    """Add a computed weight gradient, in any dtype; returns whether a queue took it."""
    return _record(weight, _Sum(gradient, gradient, weight), at_once=True)


def _record(weight: Tensor, record: _Record, at_once: bool) -> bool:
    # Weights of another class, or a backward outside `recorded_in`, are left to autograd.
    queue = weight.gradients.current if isinstance(weight, Matrix) else None
    if queue is None:
        return False
    queue.add(record, at_once)
    return True


class Matrix(nn.Parameter):
    """A trainable 2-D parameter with recordable products."""

    gradients: WeightGradients

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func`, or its recording form in this module where it has one that fits."""
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


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {F.linear: _linear, F.embedding: _embedding}


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`once_differentiable` only where the backward's own graph is recorded: its mode switch costs as much as a small
    product.
    """
    guarded = once_differentiable(backward)

    def run(ctx: Any, *gradients: Tensor) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return run


class _Linear(torch.autograd.Function):
    """x (..., I), weight (O, I), bias (O) to (..., O)."""

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
            queue.add(_Product(rows, x, ctx.weight if records_weight else None, ctx.bias if records_bias else None))
        # No queue: autograd accumulates the gradients itself.
        if needs_weight and not records_weight:
            weight_gradient = rows.t().mm(x.reshape(-1, x.shape[-1]))
        if needs_bias and not records_bias:
            bias_gradient = rows.sum(0)
        return input_gradient, weight_gradient, bias_gradient, None


class _Embedding(torch.autograd.Function):
    """tokens (...), weight (V, H) to (..., H)."""

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
        queue.add(_Rows(rows, tokens, ctx.weight))
        return None, None, None


# `Function.apply` itself is half of the Python of a layer: it looks for transforms (torch.func), absent here.
_is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
_apply_linear: Callable[..., Any] = super(torch.autograd.Function, _Linear).apply
_apply_embedding: Callable[..., Any] = super(torch.autograd.Function, _Embedding).apply
