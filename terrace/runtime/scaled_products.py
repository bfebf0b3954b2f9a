"""Matrix products in 8-bit floats, with scales computed from the current operands.

An operand A (M, K) is stored as codes and a scale, for the whole or for each of its M rows:

    r = largest (1 / max |A|),  codes = fp8(A r),  scale = 1 / r        in fp32, rounded half to even

where `largest` is 448 in e4m3 and 57344 in e5m2. No scale is taken from an earlier step. With B (N, K) the product is

    A B^T ~ (codes_A codes_B^T) scale_A scale_B^T                   added up in fp32, then rounded to the result's dtype

so a row's scale is never inside a sum. Each matrix of a stack has its own product, with only its rows. inf or nan in
an operand makes every element that shares its scale nan. Both operands need K last, the only order in which Hopper's
matrix units read 8-bit operands: a weight gradient transposes both operands (terrace.runtime.scaled_operands), an
input gradient the weight.

On a GPU the product is torch.nn.functional.scaled_mm without fast accumulation, and quantisation is one compiled
kernel and a reduction. Elsewhere codes are converted to fp32 and multiplied, which is exactly the same definition.
Formats follow Micikevicius et al. 2209.05433: e4m3 for activations and weights, e5m2 for gradients.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from terrace.accelerator import has_streams
from terrace.plan.products import MULTIPLE

_LEAST = 2.0**-64  # of the magnitudes that set a scale: products of two scales stay normal numbers in fp32


class Codes(NamedTuple):
    """Codes (M, K) of an operand, with K last in memory, and their scales in fp32, (M, 1) or (1, 1)."""

    values: Tensor
    scale: Tensor


def encode(x: Tensor, dtype: torch.dtype, by_row: bool) -> Codes:
    """The codes of x (M, K), which may be a transposed view, in an 8-bit dtype."""
    if not x.numel():
        return Codes(x.new_empty(x.shape, dtype=dtype), x.new_ones((len(x) if by_row else 1, 1), dtype=torch.float32))
    codes, scale = (compiled_quantise if has_streams(x.device) else quantise)(x, dtype, by_row)
    return Codes(codes.contiguous(), scale)


def multiply(left: Codes, right: Codes, dtype: torch.dtype) -> Tensor:
    """The product (M, N) of codes (M, K) and (N, K), in `dtype`."""
    if not left.values.numel() or not right.values.numel():
        return left.scale.new_zeros((len(left.values), len(right.values)), dtype=dtype)
    product = on_device if has_streams(left.values.device) else emulated
    return product(left.values, right.values, left.scale, right.scale, dtype)


def quantise(x: Tensor, dtype: torch.dtype, by_row: bool) -> tuple[Tensor, Tensor]:
    """Codes (M, K) of x in an 8-bit dtype, in the memory layout of x, and their scales in fp32, (M, 1) or (1, 1)."""
    factor = factor_of(x.abs().amax(1 if by_row else (0, 1), keepdim=True), dtype)
    # A factor with dims: a number without any would leave the product in the dtype of x, which rounds before fp8 does.
    return (x * factor).to(dtype), factor.reciprocal()


def factor_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Factors, fp32, by which values are multiplied before conversion to an 8-bit dtype. A scale is 1 / factor."""
    return largest.float().clamp(min=_LEAST).reciprocal() * torch.finfo(dtype).max


def emulated(left: Tensor, right: Tensor, scale: Tensor, other_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The product (M, N) of codes (M, K) and (N, K) by definition, in `dtype`."""
    product = torch.mm(left.float(), right.float().t())
    return product.mul_(scale).mul_(other_scale.t()).to(dtype)


def on_device(left: Tensor, right: Tensor, scale: Tensor, other_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The same with torch's operator."""
    by_row = scale.numel() > 1 or other_scale.numel() > 1
    recipe = F.ScalingType.RowWise if by_row else F.ScalingType.TensorWise
    if by_row:  # an operand of one row
        scale, other_scale = scale.expand(left.shape[0], 1), other_scale.expand(right.shape[0], 1)
    left, right = _padded(left), _padded(right)
    scales = (scale.contiguous(), other_scale.t().contiguous()) if by_row else (scale.view(()), other_scale.view(()))
    found: Tensor = F.scaled_mm(left, right.t(), scales[0], recipe, scales[1], recipe, output_dtype=dtype)
    return found


def _padded(codes: Tensor) -> Tensor:
    # Tokens are summed over in a weight gradient, and may be any number: zeros add nothing.
    missing = -codes.shape[1] % MULTIPLE
    return F.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype) if missing else codes


def compiled_quantise(x: Tensor, dtype: torch.dtype, by_row: bool) -> tuple[Tensor, Tensor]:
    """`quantise` as compiled kernels. Eager operators would write fp32 copies: four times the bytes."""
    dense = x if x.is_contiguous() else x.t()
    if by_row or not dense.is_contiguous():
        return _in_form(x, dtype, by_row)
    # One scale needs no rows, and a line of elements in the order of memory is one form for all matrices.
    codes, scale = _in_form(dense.reshape(1, -1), dtype, by_row)
    codes = codes.view(dense.shape)
    return codes if dense is x else codes.t(), scale


def _in_form(x: Tensor, dtype: torch.dtype, by_row: bool) -> tuple[Tensor, Tensor]:
    # With `dynamic` a function is compiled for any numbers, but 0 and 1 become constants, and equals one variable.
    numbers = (0, 1, *x.shape, *x.stride(), x.storage_offset())
    equal = tuple(numbers.index(number) for number in numbers)
    with torch.no_grad():  # whether gradients are recorded would make another form
        return _compiled(x.dtype, dtype, by_row, equal)(x.detach(), dtype, by_row)


@cache
def _compiled(*form: object) -> Callable[[Tensor, torch.dtype, bool], tuple[Tensor, Tensor]]:
    """`quantise`, compiled for operands of one form.

    All graphs that torch.compile makes of a code object count against one limit
    (`torch._dynamo.config.recompile_limit`, 8), after which it runs eagerly with a warning. Two formats, two dim
    orders, square operands, stacks with one row and matrices of a stack exceed it, so each form compiles its own copy
    of the code.
    """
    code = quantise.__code__.replace(co_name=quantise.__name__)
    return torch.compile(FunctionType(code, quantise.__globals__), dynamic=True)
