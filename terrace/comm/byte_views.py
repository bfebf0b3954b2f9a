"""Tensors as bytes, of any shape and any strides."""

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of `tensor` (..., d) as uint8 (..., d x bytes of an element); a view where its memory allows one.

    `contiguous` alone is not enough: a tensor without elements, or with one in a dim, counts as contiguous whatever its
    strides are, and torch views only rows of stride 1 as bytes.
    """
    tensor = tensor.contiguous()
    if tensor.dim() and tensor.stride(-1) != 1:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(torch.uint8)
