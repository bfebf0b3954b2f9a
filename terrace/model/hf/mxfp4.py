"""Weights in MXFP4, read as plain floats: 4-bit floats in blocks of 32 with a common power of two (OCP MX 1.0).

A tensor NAME (E, in, out), one matrix per expert, is stored as two tensors of bytes:

    NAME_blocks (E, out, in / 32, 16)    two floats (e2m1: sign, two bits of exponent, one of mantissa) per byte, the
                                         first one in the lower half
    NAME_scales (E, out, in / 32)        the exponent of each block, plus 127; 255 stands for no number

The value of an element is its float times 2^(scale - 127). bf16 holds it exactly, except for values of 2^128 and more,
which become infinite.

Shape legend: E experts, G = in / 32 blocks of a row.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from terrace.base.errors import ModelError

PACKED = "weights in MXFP4"  # in place of a file's name
BLOCKS, SCALES = "_blocks", "_scales"
_BLOCK, _BIAS, _NO_NUMBER = 32, 127, 255
_FLOATS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the lower three bits; the fourth is the sign


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Values (..., 32 G) in bf16 of `blocks` (..., G, 16) and `scales` (..., G), both uint8."""
    values = torch.tensor((*_FLOATS, *(-each for each in _FLOATS)), dtype=torch.bfloat16)
    pairs = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # (..., G, 32)
    exponents = scales.to(torch.int32) - _BIAS
    return torch.ldexp(values[pairs.int()], exponents.unsqueeze(-1)).flatten(-2)


class PackedWeights:
    """The tensors of a folder that are stored in MXFP4, with the interface of an open safetensors file.

    `files` has the file of each stored tensor, `file` opens one by name. Raises `ModelError` for blocks without scales.
    """

    def __init__(self, files: Mapping[str, str], file: Callable[[str], Any]) -> None:
        self._files, self._file = files, file
        self.names = [name.removesuffix(BLOCKS) for name in files if name.endswith(BLOCKS)]
        for name in self.names:
            if name + SCALES not in files:
                raise ModelError(f"{name}{BLOCKS} is there without {name}{SCALES}: download the weights again")

    def with_own(self) -> dict[str, str]:
        """The files of all tensors, with those in MXFP4 as one tensor each, in the file `PACKED`."""
        stored = {name + ending for name in self.names for ending in (BLOCKS, SCALES)}
        plain = {name: file for name, file in self._files.items() if name not in stored}
        return plain | dict.fromkeys(self.names, PACKED)

    def metadata(self) -> None:
        """Checksums are of other tensors."""

    def get_slice(self, name: str) -> "PackedSlice":
        """The tensor `name`, read expert by expert."""
        parts = (self._file(self._files[name + ending]).get_slice(name + ending) for ending in (BLOCKS, SCALES))
        return PackedSlice(name, *parts)


class PackedSlice:
    """A tensor (E, in, out) in MXFP4.

    Raises `ModelError` for blocks and scales of other shapes or types, and when scales that are no numbers are read.
    """

    def __init__(self, name: str, blocks: Any, scales: Any) -> None:
        self._name, self._blocks, self._scales = name, blocks, scales
        of_blocks, of_scales = (tuple(each.get_shape()) for each in (blocks, scales))
        dtypes = {str(each.get_dtype()) for each in (blocks, scales)}
        if dtypes != {"U8"} or len(of_blocks) != 4 or of_blocks != (*of_scales, _BLOCK // 2):
            raise ModelError(
                f"{name}{BLOCKS} is {list(of_blocks)} and {name}{SCALES} {list(of_scales)}, of {' and '.join(dtypes)}: "
                "MXFP4 has blocks of 16 bytes (E, out, in / 32, 16) and a scale for each, in U8; download them again"
            )

    def get_shape(self) -> list[int]:
        """Its shape (E, in, out)."""
        number, rows, groups = self._scales.get_shape()
        return [number, groups * _BLOCK, rows]

    def get_dtype(self) -> str:
        """The dtype that holds its values."""
        return "BF16"

    def __getitem__(self, experts: slice) -> Tensor:
        """The matrices (e, in, out) of `experts`."""
        scales = self._scales[experts]
        if bool((scales == _NO_NUMBER).any()):
            raise ModelError(
                f"{self._name}{SCALES} has scales of {_NO_NUMBER}, which stand for no number: download them again"
            )
        return unpacked(self._blocks[experts], scales).transpose(1, 2)
