"""AdamW in a projected space of each matrix: GaLore and LSP, on the slice of one flat buffer that this rank owns.

For a matrix W with gradient G, and `project` and `project_back` of a projection (terrace.runtime.projections),

    S = project(G)
    M = beta1 M + (1 - beta1) S,  V = beta2 V + (1 - beta2) S^2
    N = (M / (1 - beta1^t)) / (sqrt(V / (1 - beta2^t)) + eps)
    W = W - lr (scale project_back(N) + weight_decay W)

In the first step and every `check_every` steps from there, the projection may replace its projectors, given G.

The projectors and both moments of a matrix are one vector, in the dtype of sums, on every rank whose slice the matrix
reaches into (terrace.plan.projected). They have the same bits on these ranks: a gather ends with the same values
everywhere, and random numbers are seeded by the matrix's name and the step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from terrace.plan.projected import numbers_of, projector_numbers
from terrace.plan.update import parse_update
from terrace.runtime.elementwise import Elementwise
from terrace.runtime.flat_slices import Matrix
from terrace.runtime.projections import projection_of
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.stored import Storage
from terrace.runtime.whole_matrices import ShardedMatrices


class WholeState(NamedTuple):
    """The state of a whole matrix: its projectors and moments, as one vector `numbers`.

    `is_first` on the rank that owns the first element of the matrix, which writes the state to checkpoints.
    """

    name: str
    numbers: Tensor
    is_first: bool


def whole_states(optimizer: object) -> Sequence[WholeState]:
    """The states of whole matrices that an optimizer has, besides those of single elements."""
    return optimizer.wholes if isinstance(optimizer, ShardedProjected) else ()


class ShardedProjected(ShardedMatrices):
    """AdamW in a projected space for the matrices of a slice, plain AdamW for the elements after them."""

    def __init__(
        self,
        master: Tensor,
        gradient: Tensor,
        start: int,
        matrices: Sequence[Matrix],
        num_decayed: int,
        config: OptimizerConfig,
        compute: torch.dtype,
        storage: Storage,
        others: type[Elementwise],
    ) -> None:
        self.group = config.group
        super().__init__(master, gradient, start, matrices, num_decayed, config, compute, storage, others)
        self._rule = parse_update(config.update)
        self._projection = projection_of(config)
        self.wholes = [
            WholeState(
                name=each.name,
                numbers=torch.zeros(numbers_of(self._rule, each.shape), dtype=gradient.dtype, device=master.device),
                is_first=each.start >= start,
            )
            for each in self._matrices
        ]

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(whole.numbers.nbytes for whole in self.wholes)

    def _direction(self, matrix: Tensor, number: int) -> tuple[Tensor, float]:
        config, step, whole = self._config, self.num_steps_made, self.wholes[number]
        matrix = matrix.clone()  # the bits of a product may depend on the alignment, which is the same on all ranks now
        ends = projector_numbers(self._rule, tuple(matrix.shape))
        projectors, moments = whole.numbers[:ends], whole.numbers[ends:].view(2, *self._projection.space(matrix))
        if step % config.check_every == 0:
            self._projection.check(projectors, moments, matrix, whole.name, step)
        projected = self._projection.project(projectors, matrix).to(moments.dtype)
        mean, square = moments
        mean.mul_(config.beta1).add_(projected, alpha=1 - config.beta1)
        square.mul_(config.beta2).addcmul_(projected, projected, value=1 - config.beta2)
        root = (square / (1 - config.beta2 ** (step + 1))).sqrt_().add_(config.eps)
        direction = (mean / (1 - config.beta1 ** (step + 1)) / root).to(matrix.dtype)
        return self._projection.project_back(projectors, direction, matrix), config.scale_or_default
