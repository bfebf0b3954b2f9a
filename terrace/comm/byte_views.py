"""Views of tensors as bytes, for any shape and strides."""

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of `tensor` (..., d) as uint8 (..., d x element size); a view if strides allow it, else a copy.

    `contiguous` alone is not enough: a tensor that is empty or has a dim of size 1 counts as contiguous whatever its
    strides are, but torch views only rows of stride 1 as bytes.
    """
    tensor = tensor.contiguous()
    if tensor.dim() and tensor.stride(-1) != 1:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(torch.uint8)
