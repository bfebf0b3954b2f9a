"""Noisy gate: learned noise on the logits in training, then the softmax of the best k (GShard, 2006.16668).

    z = x R^T + N(0, 1) softplus(x R'^T)        (Shazeer et al. 1701.06538, section 2.1)

The noise depends only on the seed, the layer, the token's position in the run and the expert: a counter is hashed
(splitmix64, Steele et al. 2014) and converted to a normal number (Box and Muller 1958). It is therefore the same on any
rank and in a recomputation.

Shape legend: T tokens, E experts, H hidden.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_MASK, _LARGEST = 2**64 - 1, float(2**53)
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of splitmix64


def logits(x: Tensor, weight: Tensor, size: Tensor, noise: Tensor | None) -> Tensor:
    """Logits (T, E) of x (T, H), from `weight` R, `size` R' (E, H) and `noise` (T, E); None in evaluation."""
    clean = F.linear(x, weight)
    return clean if noise is None else clean + noise.to(x.dtype) * F.softplus(F.linear(x, size))


def normal(seed: int, layer: int, places: Tensor, num_experts: int) -> Tensor:
    """Normal numbers (T, E), fp64, for tokens at positions `places` (T) of the run."""
    key = _scrambled_int(_scrambled_int(seed & _MASK) + layer)
    counters = places.unsqueeze(1) * num_experts + torch.arange(num_experts, device=places.device)
    one, other = (_uniform(2 * counters + half, key) for half in (0, 1))
    return (-2 * one.log()).sqrt() * (2 * math.pi * other).cos()


def _uniform(counters: Tensor, key: int) -> Tensor:
    """Uniform numbers in the open interval (0, 1)."""
    bits = counters * _signed(_GAMMA) + _signed(key)  # int64 wraps around
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        bits = (bits ^ _shifted(bits, shift)) * _signed(factor)
    return (_shifted(bits ^ _shifted(bits, 31), 11).double() + 0.5) / _LARGEST


def _shifted(bits: Tensor, by: int) -> Tensor:
    # Logical (unsigned) right shift.
    return (bits >> by) & (_MASK >> by)


def _scrambled_int(number: int) -> int:
    bits = (number + _GAMMA) & _MASK
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        bits = ((bits ^ (bits >> shift)) * factor) & _MASK
    return bits ^ (bits >> 31)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
