"""Muon on the slice of one flat buffer that this rank owns.

The update of a matrix W (n, m) with gradient G (Jordan 2024, https://kellerjordan.github.io/posts/muon; scale and
weight decay after Liu et al., arXiv 2502.16982, section 2.2, so that AdamW's learning rates fit):

    M = momentum M + G
    W = W - lr (0.2 sqrt(max(n, m)) NewtonSchulz(G + momentum M) + weight_decay W)

`prepare` replaces the gradient of the slice by G + momentum M, which the ranks of the optimizer tier gather
(terrace.runtime.whole_matrices). The iteration runs in the compute dtype, which is bf16 in Jordan's code.
"""

import torch
from torch import Tensor

from terrace.plan.keep import MOMENTUM
from terrace.plan.newton_schulz import COEFFICIENTS, NORM_EPS, UPDATE_RMS
from terrace.runtime.states import MUON
from terrace.runtime.stored import State, Storage, chunks
from terrace.runtime.whole_matrices import ShardedMatrices


class ShardedMuon(ShardedMatrices):
    """Muon for the matrices of a slice, AdamW for the elements after them."""

    group = MUON

    def _make_states(self, storage: Storage, device: torch.device) -> tuple[State, ...]:
        number, start = self._num_matrix, self._start
        self._momentum = storage.group(MOMENTUM, number, start).zeros("momentum", number, start, device)
        return (self._momentum,)

    @torch.no_grad()
    def prepare(self) -> None:
        """Add the gradient to the momentum, then replace it by G + momentum M."""
        decay = self._config.momentum_or_default
        for part in chunks([self._momentum], self._num_matrix, self._start, self._gradient.device):
            gradient, momentum = self._gradient[part], self._momentum.read(part)
            # Nesterov momentum: the matrix to orthogonalise looks one step ahead.
            momentum.mul_(decay).add_(gradient)
            gradient.add_(momentum, alpha=decay)
            self._momentum.write(part, momentum, self.num_steps_made + 1)

    def _direction(self, matrix: Tensor, number: int) -> tuple[Tensor, float]:
        return newton_schulz(matrix, self._config.newton_schulz_steps), UPDATE_RMS * max(matrix.shape) ** 0.5


def newton_schulz(matrix: Tensor, num_steps: int) -> Tensor:
    """Approximates U V^T, where U S V^T is the singular value decomposition of a matrix (n, m).

    Jordan's quintic iteration: singular values end between 0.7 and 1.2, and zero stays zero. Singular values far
    below `NORM_EPS` end near zero too, so that a matrix whose gradient has vanished is not updated.
    """
    a, b, c = COEFFICIENTS
    # X X^T is smallest with the short side first.
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.t() if is_tall else matrix
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x / (torch.linalg.vector_norm(x, dtype=wide) + NORM_EPS).to(x.dtype)
    for _ in range(num_steps):
        square = x @ x.t()
        x = a * x + torch.addmm(square, square, square, beta=b, alpha=c) @ x
    result: Tensor = x.t() if is_tall else x
    return result
