"""Products of matrices in 8-bit floats, with scales computed from the operands as they are.

An operand A (M, K) becomes codes and a scale, for all of it or for each of its M rows:

    r = largest (1 / max |A|),  codes = fp8(A r),  scale = 1 / r        in fp32, rounded half to even

where `largest` is 448 in e4m3 and 57344 in e5m2. No scale is taken from an earlier step. With B (N, K) the product is

    A B^T ~ (codes_A codes_B^T) scale_A scale_B^T                   added up in fp32, then rounded to the result's dtype

so a scale of rows is never inside a sum. Each expert of a mixture has products of its own, with its rows alone. inf or
nan in an operand makes nan of every element that shares its scale. A product takes both operands with K last, since the
matrix units of Hopper read 8-bit operands in no other order: input and weight gradients quantise a transposed operand.

On a GPU the product is torch.nn.functional.scaled_mm, without fast accumulation, and the quantisation one compiled
kernel and a reduction. Elsewhere codes are turned back into fp32 and multiplied: the same definition, exactly.
Formats follow Micikevicius et al. 2209.05433: e4m3 for activations and weights, e5m2 for gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType

import torch
import torch.nn.functional as F
from torch import Tensor

from terrace.base.errors import PlanError
from terrace.plan.plan import Plan
from terrace.plan.products import MULTIPLE, ProductFormat, parse_products

_LEAST = 2.0**-64  # of the magnitudes that set a scale: products of two scales stay normal numbers in fp32
_ADA, _HOPPER = (8, 9), (9, 0)  # first with 8-bit floats; first whose kernels scale rows


@dataclass(frozen=True)
class Scaling:
    """How operands become 8-bit floats: scales of rows or of the whole, and the dtypes of values and of gradients."""

    by_row: bool
    values: torch.dtype = torch.float8_e4m3fn
    gradients: torch.dtype = torch.float8_e5m2

    @staticmethod
    def of(plan: Plan, device: torch.device) -> "Scaling | None":
        """The scaling of a plan's products, None without; raises `PlanError` where the device has none."""
        if plan.products is None:
            return None
        wanted = parse_products(plan.products)
        values, gradients = torch.float8_e4m3fn, torch.float8_e5m2
        if device.type == "cuda" and _check_gpu(wanted, plan.compute, device):
            values, gradients = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
        return Scaling(wanted.by_row, values, values if wanted.gradients == "e4m3" else gradients)

    def outputs(self, x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
        """x W^T (N, O) of x (N, I) and W (O, I), in the dtype of x; with a `scale` (1, 1), W is codes."""
        return scaled_product(x, weight, self.values, self.values, self.by_row, scale)

    def input_gradient(self, output_gradient: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
        """dy W (N, I) of dy (N, O) and W (O, I); with a `scale` (1, 1), W is codes."""
        return scaled_product(output_gradient, weight.t(), self.gradients, self.values, self.by_row, scale)

    def weight_gradient(self, output_gradient: Tensor, x: Tensor) -> Tensor:
        """dy^T x (O, I) of dy (N, O) and x (N, I)."""
        return scaled_product(output_gradient.t(), x.t(), self.gradients, self.values, self.by_row)

    def of_experts(self, rows: Tensor, weight: Tensor, counts: Sequence[int], *, transposed: bool = False) -> Tensor:
        """`outputs`, or `input_gradient` if `transposed`, of rows (N, ..) sorted by expert and a stack (E, O, I)."""
        product = self.input_gradient if transposed else self.outputs
        found = rows.new_empty(len(rows), weight.shape[2 if transposed else 1])
        parts = zip(weight.unbind(), torch.split(rows, list(counts)), torch.split(found, list(counts)), strict=True)
        for matrix, own, out in parts:
            if len(own):
                out.copy_(product(own, matrix))
        return found


def scaled_product(
    left: Tensor,
    right: Tensor,
    of_left: torch.dtype,
    of_right: torch.dtype,
    by_row: bool,
    right_scale: Tensor | None = None,
) -> Tensor:
    """left right^T (M, N) of left (M, K) and right (N, K), each rounded to its dtype; in the dtype of `left`.

    With a `right_scale` (1, 1), fp32, the right operand is codes already.
    """
    if not left.numel() or not right.numel():
        return left.new_zeros(left.shape[0], right.shape[0])
    on_gpu = left.device.type == "cuda"
    quantised = compiled_quantise if on_gpu else quantise
    codes, scale = quantised(left, of_left, by_row)
    others, other_scale = (right, right_scale) if right_scale is not None else quantised(right, of_right, by_row)
    multiply = on_device if on_gpu else emulated
    return multiply(codes.contiguous(), others.contiguous(), scale, other_scale, left.dtype)


def quantise(x: Tensor, dtype: torch.dtype, by_row: bool) -> tuple[Tensor, Tensor]:
    """Codes (M, K) of x in an 8-bit dtype, laid out as x is, and their scales in fp32, (M, 1) or (1, 1)."""
    factor = factor_of(x.abs().amax(1 if by_row else (0, 1), keepdim=True), dtype)
    # A factor with dims: a number without any would leave the product in the dtype of x, which rounds before fp8 does.
    return (x * factor).to(dtype), factor.reciprocal()


def factor_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Factors, fp32, that make codes in an 8-bit dtype of values, from largest magnitudes; a scale is 1 / factor."""
    return largest.float().clamp(min=_LEAST).reciprocal() * torch.finfo(dtype).max


def emulated(left: Tensor, right: Tensor, scale: Tensor, other_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The product (M, N) of codes (M, K) and (N, K) by definition, in `dtype`."""
    product = torch.mm(left.float(), right.float().t())
    return product.mul_(scale).mul_(other_scale.t()).to(dtype)


def on_device(left: Tensor, right: Tensor, scale: Tensor, other_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The same by torch's operator."""
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
    """`quantise` by compiled kernels. Eager operators would pass over fp32 copies: four times the bytes."""
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
    """`quantise`, compiled for operands of a form.

    All that torch.compile makes of a code object counts against one limit (`torch._dynamo.config.recompile_limit`, 8),
    and what comes then runs uncompiled after a warning. Two formats, two orders of dims, square operands, experts with
    one row and parts of a stack are more together, so each form has a copy of the code.
    """
    code = quantise.__code__.replace(co_name=quantise.__name__)
    return torch.compile(FunctionType(code, quantise.__globals__), dynamic=True)


def _check_gpu(wanted: ProductFormat, compute: str, device: torch.device) -> bool:
    """Whether the device takes the "fnuz" forms (AMD's MI300); raises `PlanError` where it has no such products."""
    asked, found = f"products = {wanted.name!r}", torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        architecture = str(found.gcnArchName).split(":")[0]
        if not architecture.startswith(("gfx94", "gfx95")):
            raise PlanError(f"{asked}: {found.name} ({architecture}) has no 8-bit floats, an MI300 is the first with")
        return architecture.startswith("gfx94")
    capability, least = (found.major, found.minor), _HOPPER if wanted.by_row else _ADA
    if capability < least:
        of_rows = ", with scales of rows" if wanted.by_row else ""
        raise PlanError(
            f"{asked}: {found.name} has compute capability {capability[0]}.{capability[1]}, and products of 8-bit "
            f"floats{of_rows} need {least[0]}.{least[1]}: leave products out"
        )
    if wanted.by_row and compute != "bf16":
        raise PlanError(f"{asked} with compute = {compute!r}: products with scales of rows give bf16; use that")
    return False
