"""Tensors whose memory is freed after the forward of their readers, and filled again in the backward.

A region's gathered input is gathered again (terrace.runtime.tensor.regathered), and a recomputed operation produces
its result again (terrace.runtime.replay). Saving such a tensor for the backward costs no memory, so it is better than
saving something smaller derived from it.
"""

from torch import Tensor

_MARK = "returns"


def mark_returning(x: Tensor) -> Tensor:
    """Mark x as a tensor whose values will be filled again. Returns x."""
    vars(x)[_MARK] = True
    return x


def is_returning(x: Tensor) -> bool:
    """Whether x, or the tensor that it is a view of, is marked."""
    base = x._base
    return _MARK in vars(x) or (base is not None and _MARK in vars(base))
