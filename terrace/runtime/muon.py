"""Muon on the slice of one flat buffer that this rank owns.

The update of a matrix W (n, m) with gradient G (Jordan 2024, https://kellerjordan.github.io/posts/muon; scale and
weight decay after Liu et al., arXiv 2502.16982, section 2.2, so that AdamW's learning rates fit):

    M = momentum M + G
    W = W - lr (0.2 sqrt(max(n, m)) NewtonSchulz(G + momentum M) + weight_decay W)

A slice may begin and end in the middle of a matrix, and Newton-Schulz needs the whole. So `prepare` replaces the
gradient of the slice by G + momentum M; the ranks of the optimizer tier gather it (ORTHOGONALISE), in the compute
dtype; and `update` orthogonalises every matrix that reaches into the slice, and keeps its part. The iteration runs in
the compute dtype as well, bf16 in Jordan's code. Parameters other than the matrices of layers take AdamW.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from terrace.plan.flats import Extent
from terrace.plan.newton_schulz import COEFFICIENTS, NORM_EPS, UPDATE_RMS
from terrace.runtime.adamw import ShardedAdamW
from terrace.runtime.elementwise import StatePart, whole_part
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.states import MUON
from terrace.runtime.stored import State, Storage, chunks


class ShardedMuon:
    """Muon for the matrices `extents` in `master`, AdamW for the elements after them.

    `master` is the slice of the flat buffer from `start` on. `gradient` holds the finished gradient of the same
    elements when `prepare` is called. `compute` is the dtype of Newton-Schulz, `storage` how states are stored.
    """

    def __init__(
        self,
        master: Tensor,
        gradient: Tensor,
        start: int,
        extents: Sequence[Extent],
        config: OptimizerConfig,
        compute: torch.dtype,
        storage: Storage,
    ) -> None:
        self.master = master
        self.num_steps_made = 0
        self._gradient, self._start, self._config, self._compute = gradient, start, config, compute
        # Matrices stand at the beginning of the buffer; behind them AdamW's elements follow.
        self._num_matrix = min(max(extents[-1][2] - start, 0), master.numel())
        stop = start + self._num_matrix
        # Only matrices that overlap this rank's slice are orthogonalised here.
        self._extents = [extent for extent in extents if extent[1] < stop and extent[2] > start]
        matrices, rest = slice(0, self._num_matrix), slice(self._num_matrix, master.numel())
        self._parameters = storage.parameters(master[matrices], start)
        self._momentum = storage.zeros("momentum", self._num_matrix, start, master.device)
        self._rest: ShardedAdamW | None = None
        if rest.start < rest.stop:
            self._rest = ShardedAdamW(
                master[rest], gradient[rest], 0, config, start=start + rest.start, storage=storage
            )

    @property
    def nbytes(self) -> int:
        return self._momentum.nbytes + (self._rest.nbytes if self._rest is not None else 0)

    @property
    def states(self) -> tuple[State, ...]:
        return (self._parameters, self._momentum, *(self._rest.states if self._rest is not None else ()))

    @property
    def num_steps(self) -> int:
        return self.num_steps_made

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        self.num_steps_made = value
        if self._rest is not None:
            self._rest.num_steps = value

    @property
    def parts(self) -> list[StatePart]:
        found = []
        if self._num_matrix:
            found.append(whole_part(MUON, self._parameters.tensor, self._momentum.tensor))
        for part in self._rest.parts if self._rest is not None else ():
            elements = slice(self._num_matrix + part.elements.start, self._num_matrix + part.elements.stop)
            found.append(StatePart(group=part.group, elements=elements, values=part.values))
        return found

    @torch.no_grad()
    def prepare(self) -> None:
        """Add the gradient to the momentum, then replace it by G + momentum M."""
        decay = self._config.momentum_or_default
        for part in chunks([self._momentum], self._num_matrix, self._start, self.master.device):
            gradient, momentum = self._gradient[part], self._momentum.read(part)
            # Nesterov momentum: the matrix to orthogonalise looks one step ahead.
            momentum.mul_(decay).add_(gradient)
            gradient.add_(momentum, alpha=decay)
            self._momentum.write(part, momentum, self.num_steps_made + 1)

    @torch.no_grad()
    def update(self, lr: float, muon_momentum: Tensor | None = None) -> None:
        """Take one step. `muon_momentum` is the gathered flat buffer; None if the slice is the whole buffer."""
        config = self._config
        source, first = (self._gradient, self._start) if muon_momentum is None else (muon_momentum, 0)
        for shape, start, stop in self._extents:
            matrix = source[start - first : stop - first].to(self._compute).view(shape)
            whole = newton_schulz(matrix, config.newton_schulz_steps).reshape(-1)
            # The part of the whole update that lies in this rank's slice.
            low, high = max(start, self._start), min(stop, self._start + self._num_matrix)
            scale = UPDATE_RMS * max(shape) ** 0.5
            place = slice(low - self._start, high - self._start)
            parameters = self._parameters.read(place)
            # Decoupled weight decay, as in AdamW.
            parameters.mul_(1 - lr * config.weight_decay)
            parameters.add_(whole[low - start : high - start].to(parameters.dtype), alpha=-lr * scale)
            self._parameters.write(place, parameters, self.num_steps_made + 1)
        if self._rest is not None:
            self._rest.update(lr)
        self.num_steps_made += 1


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
