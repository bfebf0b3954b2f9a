"""Working copies that are the codes of products in 8-bit floats (terrace.plan.products).

A matrix has one scale for its products, whichever ranks hold parts of it. So the ranks find its largest magnitude
first, each of its part of the masters and then all together, and every rank codes its own part with the scale of the
whole. A product takes codes and scale as they are. Masters are rounded to the compute dtype before anything else, so
that codes are those of a whole matrix in that dtype (`quantise` of terrace.runtime.scaled_products), bit for bit.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from terrace.runtime.scaled_products import factor_of


class MatrixCodes:
    """The scales of the matrices of one flat buffer on one rank, and how parts of these become codes.

    `extents` are the (start, stop) of each matrix in the buffer; the rest is padding. `scales` (M, 1, 1) are fp32, one
    for each matrix, on every rank the same once `settle` has the largest magnitudes of all.
    """

    def __init__(
        self, extents: Sequence[tuple[int, int]], codes: torch.dtype, compute: torch.dtype, device: torch.device
    ) -> None:
        self.dtype, self._compute, self._extents = codes, compute, tuple(extents)
        self.scales = torch.ones(len(extents), 1, 1, device=device)
        self._factors = torch.ones(len(extents), device=device)

    def magnitudes(self, values: Tensor, start: int) -> Tensor:
        """The largest magnitude of each matrix (M), fp32, in `values`, those of the buffer from `start` on."""
        found = torch.zeros_like(self._factors)
        for number, part, _ in self._parts(start, values.numel()):
            found[number] = values[part].to(self._compute).abs().amax()
        return found

    def settle(self, largest: Tensor) -> None:
        """Take the largest magnitudes (M) of whole matrices."""
        self._factors = factor_of(largest, self.dtype).to(self._factors.device)
        self.scales.copy_(self._factors.reciprocal()[:, None, None])

    def encode(self, values: Tensor, start: int, out: Tensor) -> None:
        """Write the codes of `values`, those of the buffer from `start` on, into `out`, uint8; of padding zeros."""
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
