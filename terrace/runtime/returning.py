"""Tensors whose memory is freed after the forward of their readers, and filled again for the backward.

A region's gathered input is gathered again (terrace.runtime.tensor.regathered), and an operation that is recomputed
makes its result again (terrace.runtime.replay). Who could keep something smaller than such a tensor had better keep
the tensor, which takes no memory.
"""

from torch import Tensor

_MARK = "returns"


def mark_returning(x: Tensor) -> Tensor:
    """Say that the values of x will come again; returns x."""
    vars(x)[_MARK] = True
    return x


def is_returning(x: Tensor) -> bool:
    """Whether x, or the tensor that it is a view of, was marked."""
    base = x._base
    return _MARK in vars(x) or (base is not None and _MARK in vars(base))
