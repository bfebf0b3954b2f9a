"""Random bits for stochastic rounding to bf16, the same under every plan.

A value x between two neighbours a < b of its dtype becomes b with probability (x - a) / (b - a), so that its
expectation is x: a bf16 parameter follows updates far smaller than its rounding step, each of which round-to-nearest
would drop (Gupta et al., arXiv 1502.02551; for bf16 Zamirai et al., arXiv 2010.06192). fp32 to bf16 drops 16 bits, so
16 random bits are added to the dropped ones, and the sum is truncated.

The bits are a hash of the seed, the parameter's name, the state, the step number, and the element's index in the
whole parameter. So they depend neither on the ranks nor on the order of work, and a resumed run draws the same. Four
consecutive elements share the 64 bits of one SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from terrace.model.params import ParamSpec

_GAMMA, _MIX, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64
_KEPT = -(1 << 16)  # mask of the bits of an fp32 that a bf16 has
_ELEMENTS_OF_WORD = 4


@dataclass(frozen=True)
class _Placed:
    """A rank's slice of a parameter (`shape`, at `offsets` of `whole`), stored at element `start` of a flat buffer."""

    name: str
    start: int
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    offsets: tuple[int, ...]


class Noise:
    """Random bits for the elements of a flat buffer of `block`.

    `params` are the buffer's parameters in order, `offsets` the start of this rank's slice of each, by dim.
    """

    def __init__(
        self, seed: int, block: str, params: Sequence[ParamSpec], offsets: Sequence[tuple[int, ...]], numel: int
    ) -> None:
        self._prefix, self._numel = f"{seed}:{block}", numel
        self._placed, start = list[_Placed](), 0
        for param, offset in zip(params, offsets, strict=True):
            if param.numel:
                self._placed.append(_Placed(param.name, start, param.shape, param.whole or param.shape, offset))
            start += param.numel
        self._starts = [placed.start for placed in self._placed]

    def bits(self, state: str, step: int, start: int, stop: int, device: torch.device) -> Tensor:
        """Integers from 0 to 65535, int32, for rounding elements [start, stop) of the buffer in `step` (from 1)."""
        found = torch.zeros(stop - start, dtype=torch.int32, device=device)  # of padding, which is zero: no matter
        for placed, first, last in self._parts(start, min(stop, self._numel)):
            key = _key(f"{self._prefix}.{placed.name}/{state}", step)
            part = found[first - start : last - start]
            part.copy_(_bits(placed, key, first - placed.start, last - placed.start, device))
        return found.bitwise_and_((1 << 16) - 1)  # int16 has a sign

    def _parts(self, start: int, stop: int) -> Iterator[tuple[_Placed, int, int]]:
        for number in range(max(0, bisect_right(self._starts, start) - 1), len(self._placed)):
            placed = self._placed[number]
            first, last = max(start, placed.start), min(stop, placed.start + math.prod(placed.shape))
            if placed.start >= stop:
                return
            if first < last:
                yield placed, first, last


def round_to_bf16(values: Tensor, bits: Tensor, out: Tensor) -> None:
    """Write fp32 `values` into `out`, bf16, rounded by random `bits`. Values that bf16 represents are unchanged."""
    out.copy_((values.view(torch.int32) + bits).bitwise_and_(_KEPT).view(torch.float32))


def _key(text: str, step: int) -> int:
    name = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return name ^ (step * _MIX & (1 << 64) - 1)


def _bits(placed: _Placed, key: int, start: int, stop: int, device: torch.device) -> Tensor:
    """16 bits of elements [start, stop) of a slice, int16."""
    if placed.shape[1:] == placed.whole[1:]:  # the slice's elements follow one another in the whole
        base = placed.offsets[0] * math.prod(placed.whole[1:]) if placed.offsets else 0
        start, stop = start + base, stop + base
        first = start // _ELEMENTS_OF_WORD
        words = torch.arange(first, -(-stop // _ELEMENTS_OF_WORD), dtype=torch.int64, device=device)
        lanes = _hashed(words, key).view(torch.int16)  # the lowest bits first, on every machine that torch runs on
        return lanes[start - first * _ELEMENTS_OF_WORD : stop - first * _ELEMENTS_OF_WORD]
    places = _places(placed, torch.arange(start, stop, dtype=torch.int64, device=device))
    lane = 16 * places.remainder(_ELEMENTS_OF_WORD)
    return (_hashed(places // _ELEMENTS_OF_WORD, key) >> lane).to(torch.int16)


def _places(placed: _Placed, elements: Tensor) -> Tensor:
    """Row-major index in the whole parameter of elements of the slice."""
    found, stride = torch.zeros_like(elements), 1
    for size, whole, offset in reversed(list(zip(placed.shape, placed.whole, placed.offsets, strict=True))):
        found.add_(elements.remainder(size).add_(offset), alpha=stride)
        elements, stride = elements.div(size, rounding_mode="floor"), stride * whole
    return found


def _hashed(words: Tensor, key: int) -> Tensor:
    """SplitMix64's output for each counter. Overwrites `words`."""
    found = words.mul_(_signed(_GAMMA)).add_(_signed(key))
    for shift, factor in ((30, _MIX), (27, _MIX_2), (31, 1)):
        # Shifts of int64 repeat the sign, which an unsigned one does not.
        found.bitwise_xor_((found >> shift).bitwise_and_((1 << 64 - shift) - 1))
        if factor != 1:
            found.mul_(_signed(factor))
    return found


def _signed(word: int) -> int:
    """The int64 with the same bits. Its products wrap like unsigned ones."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word
