"""GaLore: projection onto the gradient's leading singular vectors (Zhao et al., arXiv 2403.03507, Algorithm 2).

With m <= n the projector P (m, r) has the leading left singular vectors, S = P^T G and project_back(N) = P N; a tall
matrix is treated as its transpose. Every check computes P anew by a randomised SVD with power iteration (Halko et al.,
arXiv 0909.4061, Algorithms 4.4 and 5.1), as follow-up work does (arXiv 2504.20437); the paper takes a full SVD, whose
time is cubic in the short side. The moments do not change in a check, as in the paper.

The sign of a singular vector is arbitrary, and moments of the projected gradient outlive a check, so the largest
element of each vector is made positive. Where the rank of the gradient is below r, as with an expert that saw few
tokens, the further vectors of an SVD are rounding errors; random directions replace them, so that later gradients are
not projected to zero.
"""

import torch
from torch import Tensor

from terrace.plan.projected import OVERSAMPLE, POWER
from terrace.runtime.projections.interface import generator, times


class Galore:
    """Projection onto the `rank` leading singular vectors of the short side."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def space(self, matrix: Tensor) -> tuple[int, int]:
        rows, columns = matrix.shape
        return (self._rank, columns) if rows <= columns else (rows, self._rank)

    def check(self, projectors: Tensor, moments: Tensor, matrix: Tensor, name: str, step: int) -> None:
        wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.t()
        projectors.copy_(leading_vectors(wide, self._rank, generator(name, step)).reshape(-1))

    def project(self, projectors: Tensor, matrix: Tensor) -> Tensor:
        projector = projectors.view(-1, self._rank).to(matrix.dtype)
        return projector.t() @ matrix if matrix.shape[0] <= matrix.shape[1] else matrix @ projector

    def project_back(self, projectors: Tensor, direction: Tensor, matrix: Tensor) -> Tensor:
        projector = projectors.view(-1, self._rank).to(matrix.dtype)
        return projector @ direction if matrix.shape[0] <= matrix.shape[1] else direction @ projector.t()


def leading_vectors(matrix: Tensor, rank: int, random: torch.Generator) -> Tensor:
    """Approximate the `rank` leading left singular vectors of a matrix (m, n), m <= n: (m, rank), in fp32 at least."""
    rows, columns = matrix.shape
    width, dtype = min(rows, rank + OVERSAMPLE), matrix.dtype
    drawn = torch.randn(columns, width, generator=random, dtype=torch.float64).to(matrix.device, dtype)
    basis = torch.linalg.qr(times(matrix, drawn, dtype)).Q
    for _ in range(POWER):
        # An orthogonal basis after each product: powers alone would lose the small singular values.
        other = torch.linalg.qr(times(matrix.t(), basis, dtype)).Q
        basis = torch.linalg.qr(times(matrix, other, dtype)).Q
    inner, sizes, _ = torch.linalg.svd(times(basis.t(), matrix, dtype), full_matrices=False)
    vectors: Tensor = basis @ inner[:, :rank]
    vectors.mul_(_signs(vectors.gather(0, vectors.abs().argmax(0, keepdim=True))))
    # The tolerance of numpy.linalg.matrix_rank: smaller singular values are rounding errors.
    is_real = sizes[:rank] > columns * torch.finfo(sizes.dtype).eps * sizes[0]
    others = torch.randn(rows, rank, generator=random, dtype=torch.float64).to(vectors)
    # The vectors that are kept come first and are orthonormal, so QR changes only their signs.
    found, triangle = torch.linalg.qr(torch.where(is_real, vectors, others))
    whole: Tensor = found.mul_(_signs(triangle.diagonal()))
    return whole


def _signs(values: Tensor) -> Tensor:
    return torch.where(values < 0, -1.0, 1.0).to(values.dtype)
