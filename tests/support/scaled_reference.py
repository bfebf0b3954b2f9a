"""Products in 8-bit floats by definition, in numpy: rounding by exponent and mantissa, sums in fp64.

Nothing here reads the runtime, and torch's 8-bit dtypes are not used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from terrace.model.experts.mixture import Stack
from terrace.model.grouped import Order
from terrace.runtime.settings import OptimizerConfig
from tests.support.parity import flatten, trainable
from tests.support.toys import MODELS, Rows, count_tokens, run_blocks

# Adam divides noise by itself: of a key bias, whose gradient is zero but for rounding, it would make whole steps.
SGD = OptimizerConfig(name="sgd", lr=3e-2, weight_decay=0.0)

NUM_STEPS = 2

Values = NDArray[np.float64]
# Mantissa bits, exponent of the smallest normal number, largest number.
E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


@dataclass(frozen=True)
class Scaled:
    """Products of a plan: scales of rows or not, gradients in "e4m3" or "e5m2"."""

    by_row: bool
    gradients: str


def rounded(x: Values, form: tuple[int, int, float]) -> Values:
    """x rounded to the nearest number of the format, half to even; magnitudes are at most the largest."""
    mantissa, least, largest = form
    exponent = np.maximum(np.frexp(x)[1] - 1, least)
    unit = np.ldexp(1.0, exponent - mantissa)
    return np.asarray(np.clip(np.rint(x / unit) * unit, -largest, largest), np.float64)


def dequantised(x: Tensor, form: tuple[int, int, float], by_row: bool) -> Values:
    """x (M, K) after a rounding with scales of rows, or one for all."""
    values: Any = x.detach().float().numpy()
    most = np.abs(values).max(1 if by_row else None, keepdims=True)
    factor = np.float32(form[2]) * (np.float32(1) / np.maximum(most, np.float32(2.0**-64)))
    assert factor.dtype == np.float32
    codes = rounded((values * factor).astype(np.float64), form)
    inverse = (np.float32(1) / factor).astype(np.float64)
    return np.asarray(codes * inverse)


def product(left: Tensor, right: Tensor, of_left: str, by_row: bool) -> Tensor:
    """left right^T of (M, K) and (N, K), `right` in e4m3."""
    found = dequantised(left, FORMATS[of_left], by_row) @ dequantised(right, E4M3, by_row).T
    return torch.from_numpy(found).to(left.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaled: Scaled) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scaled = scaled
        return product(x, weight, "e4m3", scaled.by_row)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        (dy,), scaled = gradients, ctx.scaled
        dx = product(dy, weight.t(), scaled.gradients, scaled.by_row)
        return dx, product(dy.t(), x.t(), scaled.gradients, scaled.by_row), None


class ScaledLinear(nn.Module):
    """A linear layer whose products are scaled; each of `parts` of its output or input features apart from others."""

    def __init__(self, linear: nn.Linear, scaled: Scaled, parts: int = 1, cuts_inputs: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.scaled, self.parts, self.cuts_inputs = scaled, parts, cuts_inputs

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if self.cuts_inputs:
            pairs = zip(rows.chunk(self.parts, 1), self.weight.chunk(self.parts, 1), strict=True)
            y = torch.stack([self._product(one, weight) for one, weight in pairs]).sum(0)
        else:
            y = torch.cat([self._product(rows, weight) for weight in self.weight.chunk(self.parts)], 1)
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        found: Tensor = _Product.apply(x, weight, self.scaled)  # type: ignore[no-untyped-call]
        return found


class ScaledStack(nn.Module):
    """A linear layer for each expert, scaled apart from the others with its own rows; so is each of `parts` of its
    input features.
    """

    def __init__(self, stack: Stack, scaled: Scaled, parts: int = 1) -> None:
        super().__init__()
        self.weight, self.scaled, self.parts = stack.weight, scaled, parts

    def forward(self, x: Tensor, order: Order, weights: Tensor | None = None) -> Tensor:
        """As `Stack.forward`, without biases."""
        experts = zip(torch.split(x, list(order.counts)), self.weight.unbind(), strict=True)
        return torch.cat([self._product(rows, matrix) for rows, matrix in experts if len(rows)])

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        pairs = zip(x.chunk(self.parts, 1), weight.chunk(self.parts, 1), strict=True)
        found = [_Product.apply(rows, part, self.scaled) for rows, part in pairs]  # type: ignore[no-untyped-call]
        return torch.stack(found).sum(0)


def scale_layers(blocks: Sequence[nn.Module], scaled: Scaled, parts: int = 1, stack_parts: int = 1) -> None:
    """Put a `ScaledLinear` in the place of every linear layer but the gate of a shared expert, and a `ScaledStack` in
    that of every stack; `parts` tensor ranks cut layers as Megatron-LM does, and `stack_parts` ranks experts.
    """
    for block in blocks:
        for name, child in list(block.named_modules()):
            if isinstance(child, Stack):
                parent, _, last = name.rpartition(".")
                # With scales of rows, cutting the outputs of gate and up changes nothing.
                cut = stack_parts if last == "down" else 1
                setattr(block.get_submodule(parent), last, ScaledStack(child, scaled, cut))
            if isinstance(child, nn.Linear) and not name.endswith("shared_gate"):
                parent, _, last = name.rpartition(".")
                cuts_inputs = last in ("output", "down")
                setattr(block.get_submodule(parent), last, ScaledLinear(child, scaled, parts, cuts_inputs))


def trained(
    model_name: str,
    num_micros: int,
    size: int,
    rows: Rows,
    scaled: Scaled,
    parts: int = 1,
    stack_parts: int = 1,
    steps: int = NUM_STEPS,
) -> tuple[list[float], list[float], Tensor]:
    """Losses, gradient norms and parameters of a run in fp32 in this process, micro-batch by micro-batch."""
    model = MODELS[model_name]
    blocks = model.blocks(torch.float32)
    scale_layers(blocks, scaled, parts, stack_parts)
    parameters = trainable(blocks)
    optimizer, losses, norms = torch.optim.SGD(parameters, lr=SGD.lr), list[float](), list[float]()
    for step in range(steps):
        whole = rows.batch(step, num_micros * size)
        optimizer.zero_grad()
        total, count = torch.zeros(()).double(), count_tokens(whole.labels)
        for first in range(0, num_micros * size, size):
            inputs, labels = whole.inputs[first : first + size], whole.labels[first : first + size]
            # The runtime divides by the tokens at the end, and so by none before a gradient is rounded.
            loss = model.objective(run_blocks(blocks, inputs), labels)
            torch.autograd.backward(loss)
            total += loss.detach()
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad /= count
        norms.append(float(nn.utils.clip_grad_norm_(parameters, SGD.clip)))
        optimizer.step()
        losses.append(float(total / count))
    return losses, norms, flatten(blocks)
