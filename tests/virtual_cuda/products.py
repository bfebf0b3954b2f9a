"""Products that only a CUDA device has: of 8-bit floats, and those that are fused with messages.

Shape legend: M rows of the left operand, N columns of the right one, K is summed over.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import _symmetric_memory

_FLOATS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_WIDE = (torch.float8_e5m2, torch.float8_e5m2fnuz)
_FUSED = {
    "fused_all_gather_matmul": "_fused_all_gather_matmul",
    "fused_matmul_reduce_scatter": "_fused_matmul_reduce_scatter",
}


def scaled(
    left: Tensor,
    right: Tensor,
    left_scale: Sequence[Tensor],
    left_recipe: Sequence[int],
    left_swizzle: Sequence[int],
    right_scale: Sequence[Tensor],
    right_recipe: Sequence[int],
    right_swizzle: Sequence[int],
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """`_scaled_mm_v2` of 8-bit floats (M, K) and (K, N), whose scales are of a matrix, or (M, 1) and (1, N).

    Refuses what CUDA does, by aten/src/ATen/native/cuda/ScaledBlas.cpp and RowwiseScaledMM.cu of torch 2.13 and, for
    orders and multiples, torch/_meta_registrations.py.
    """
    assert not left_swizzle
    assert not right_swizzle
    assert bias is None
    assert not contraction_dim
    assert left.stride(1) == 1, f"the left operand is not row-major: {left.stride()}"
    assert right.stride(0) == 1, f"the right operand is not column-major: {right.stride()}"
    assert left.shape[1] % 16 == right.shape[0] % 16 == right.shape[1] % 16 == 0, (left.shape, right.shape)
    assert left.dtype in (*_FLOATS, *_WIDE), left.dtype
    assert right.dtype in (*_FLOATS, *_WIDE), right.dtype
    assert left.dtype not in _WIDE or right.dtype not in _WIDE, "two matrices of e5m2"
    (one,), (other,) = left_scale, right_scale
    assert one.dtype == other.dtype == torch.float32
    if left_recipe == right_recipe == [F.ScalingType.RowWise.value]:
        assert one.shape == (left.shape[0], 1), one.shape
        assert other.shape == (1, right.shape[1]), other.shape
        assert one.is_contiguous()
        assert other.is_contiguous()
        assert right.dtype in _FLOATS, "scales of rows ask for a right operand of e4m3"
        assert out_dtype == torch.bfloat16, "products with scales of rows are in bf16 on every device"
    else:
        assert left_recipe == right_recipe == [F.ScalingType.TensorWise.value]
        assert one.numel() == other.numel() == 1
    product = torch.mm(left.float(), right.float())
    return product.mul_(one).mul_(other).to(out_dtype)


DEFINITIONS: dict[str, Callable[..., Any]] = {"_scaled_mm_v2": scaled}


def fused(name: str) -> Callable[..., Any]:
    """Torch's own Python for a product that is fused with messages, operator by operator (`symmetric.py`)."""
    found: Callable[..., Any] = getattr(_symmetric_memory, _FUSED[name])
    return found
