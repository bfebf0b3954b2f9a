"""Working copies stored as the 8-bit float codes that products take (terrace.plan.products).

A matrix has one scale, whichever ranks hold parts of it. Each rank finds the largest magnitude of its part of the
masters, the ranks combine them, and every rank encodes its own part with the scale of the whole matrix. A product
uses codes and scale directly. Masters are first rounded to the compute dtype, so that codes equal those of the whole
matrix in that dtype (`quantise` of terrace.runtime.scaled_products), bit for bit.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from terrace.runtime.scaled_products import factor_of


class MatrixCodes:
    """Scales of the matrices in one flat buffer on one rank, and the encoding of slices of that buffer.

    `extents` are the (start, stop) of each matrix in the buffer; the rest is padding. `scales` (M, 1, 1), fp32, are
    equal on every rank once `settle` has been called with the global magnitudes.
    """

    def __init__(
        self, extents: Sequence[tuple[int, int]], codes: torch.dtype, compute: torch.dtype, device: torch.device
    ) -> None:
        self.dtype, self._compute, self._extents = codes, compute, tuple(extents)
        self.scales = torch.ones(len(extents), 1, 1, device=device)
        self._factors = torch.ones(len(extents), device=device)

    def magnitudes(self, values: Tensor, start: int) -> Tensor:
        """Largest magnitude of each matrix (M), fp32, in `values`, the elements of the buffer from `start` on."""
        found = torch.zeros_like(self._factors)
        for number, part, _ in self._parts(start, values.numel()):
            found[number] = values[part].to(self._compute).abs().amax()
        return found

    def settle(self, largest: Tensor) -> None:
        """Set the scales from the largest magnitudes (M) of whole matrices."""
        self._factors = factor_of(largest, self.dtype).to(self._factors.device)
        self.scales.copy_(self._factors.reciprocal()[:, None, None])

    def encode(self, values: Tensor, start: int, out: Tensor) -> None:
        """Encode `values`, the elements of the buffer from `start` on, into `out`, uint8; padding becomes 0."""
        end = 0
        for _, part, factor in self._parts(start, values.numel()):
            out[part].view(self.dtype).copy_((values[part].to(self._compute) * factor).to(self.dtype))
            end = part.stop
        out[end:].zero_()

    def _parts(self, start: int, numel: int) -> Iterator[tuple[int, slice, Tensor]]:
        # (Number of a matrix, its part of a slice of the buffer, its factor) of those that reach into the slice.
        for number, (first, last) in enumerate(self._extents):
            begin, end = max(first - start, 0), min(last - start, numel)
            if begin < end:
                # A factor with a dim: a number without any would leave the product in the dtype of the values.
                yield number, slice(begin, end), self._factors[number : number + 1]
