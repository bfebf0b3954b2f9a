"""Tensors as bytes, of any shape and any strides."""

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """`tensor` (..., d) as uint8, (..., d times the bytes of an element), in the order of its elements; a view of it
    where that can be had.

    `contiguous` alone does not do: a tensor without elements, or with one in a dim, counts as contiguous whatever its
    strides are, and torch views only rows of stride 1 as bytes.
    """
    tensor = tensor.contiguous()
    if tensor.dim() and tensor.stride(-1) != 1:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(torch.uint8)
