"""Norms of long tensors, and a check for finite values."""

import math

import torch
from torch import Tensor

_NORM_ROW = 4096


def squared_norm(values: Tensor) -> Tensor:
    """Sum of squares of a 1-D tensor as an fp64 scalar.

    A single fp32 sum over a large shard is several percent too low on a CPU, by an amount that depends on the shard
    size and so on the plan. Therefore rows of 4096 are summed in the tensor's dtype, and the rows in fp64.
    """
    cut = values.numel() // _NORM_ROW * _NORM_ROW
    rows, rest = values[:cut].view(-1, _NORM_ROW), values[cut:]
    total: Tensor = torch.linalg.vector_norm(rest).double().square()
    if cut:
        total = total + torch.linalg.vector_norm(rows, dim=1).double().square().sum()
    return total


def is_finite(values: Tensor) -> bool:
    """Whether a float tensor has neither inf nor nan. Allocates nothing of its size."""
    if not values.numel():
        return True
    # nan passes on to both.
    return all(math.isfinite(float(edge)) for edge in torch.aminmax(values.detach()))
