"""LSP: learned sparse projectors (Chen et al., LSP-Offload, arXiv 2406.10181).

P (m, d) and Q (n, d) have r non-zeros in every row, in random columns: S = P^T G Q and project_back(N) = P N Q^T. A
check computes the bias of the projection for the gradient of the step,

    b = P P^T G Q Q^T - G,     relative bias ||b|| / ||G||  (Frobenius norms)

and if it is above alpha, draws columns anew and values from N(0, 1/sqrt(r)), and minimises

    ||b|| / ||G|| + BETA (||P||^2 / m + ||Q||^2 / n)

over the values by Adam, until the relative bias is at most alpha, or for LEARN_STEPS steps. The moments move along:

    M <- P^T P' M Q'^T Q,     V <- (P^T P')^2 V (Q'^T Q)^2     old projectors P', Q'; squares are element-wise

The paper minimises ||b|| + beta (||P||^2 + ||Q||^2); dividing by sizes makes one BETA serve matrices and gradients of
any size. With the values as drawn P P^T G Q Q^T is larger than G by sqrt(m n) / d, and Adam would spend its steps on
shrinking them. So learning begins with the values times c^(1/4), where c minimises ||c P P^T G Q Q^T - G||.

With U = G Q, W = G^T P, S = P^T U, A = P^T P, B = Q^T Q and E = A S B - S = P^T b Q, the bias is never formed:

    ||b||^2          = <A S B, S> - 2 ||S||^2 + ||G||^2
    d ||b|| / d P    = (P S B S^T - U S^T + U E^T) / ||b||
    d ||b|| / d Q    = (Q S^T A S - W S + W E) / ||b||

Projectors are stored as values and column indices, and multiplied as dense matrices: a sparse product would read each
row of the other matrix r times, and a device multiplies dense matrices faster than its memory delivers these rows.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from terrace.plan.projected import LEARN_STEPS
from terrace.runtime.projections.interface import generator, times

BETA = 1e-3  # a guess: orthonormal projectors have norms of sqrt(d), so the penalty is about a thousandth
LEARN_RATE, LEARN_BETAS, LEARN_EPS = 0.03, (0.9, 0.99), 1e-8  # Adam's while it learns values; the best rate of three
_SMALLEST = 1e-30  # lower bound of divisors and of arguments of roots, which may be zero


class Lsp:
    """Projection by sparse projectors `rank` wide, with `density` non-zeros in a row, to a relative bias of `alpha`."""

    def __init__(self, rank: int, density: int, alpha: float) -> None:
        self._rank, self._density, self._alpha = rank, density, alpha

    def space(self, matrix: Tensor) -> tuple[int, int]:
        return self._rank, self._rank

    def project(self, projectors: Tensor, matrix: Tensor) -> Tensor:
        left, right = self._dense(projectors, matrix)
        return (left.t() @ matrix) @ right

    def project_back(self, projectors: Tensor, direction: Tensor, matrix: Tensor) -> Tensor:
        left, right = self._dense(projectors, matrix)
        return (left @ direction) @ right.t()

    def check(self, projectors: Tensor, moments: Tensor, matrix: Tensor, name: str, step: int) -> None:
        wide = torch.promote_types(matrix.dtype, torch.float32)
        norm = torch.linalg.vector_norm(matrix, dtype=wide)
        is_new, has_gradient = not bool(projectors.any()), bool(norm > 0)
        unit = (matrix.to(wide) / norm).to(matrix.dtype) if has_gradient else matrix
        before = [each.to(wide) for each in self._dense(projectors, matrix)]
        if not is_new and not (has_gradient and bias_of(unit, *before).relative > self._alpha):
            return
        self._draw(projectors, matrix, generator(name, step))
        if has_gradient:
            self._learn(projectors, unit)
        if is_new:
            return
        left, right = (each.to(wide) for each in self._dense(projectors, matrix))
        move(moments, left.t() @ before[0], before[1].t() @ right)

    def _draw(self, projectors: Tensor, matrix: Tensor, random: torch.Generator) -> None:
        for (values, columns), size in zip(self._parts(projectors, matrix), matrix.shape, strict=True):
            # The columns of the largest of uniform numbers are random and distinct.
            chosen = torch.rand(size, self._rank, generator=random, dtype=torch.float64).topk(self._density).indices
            drawn = torch.randn(size, self._density, generator=random, dtype=torch.float64)
            values.copy_(drawn / math.sqrt(self._density))
            columns.copy_(chosen)

    def _learn(self, projectors: Tensor, unit: Tensor) -> None:
        """Learn the values for a gradient of norm 1."""
        (left, left_columns), (right, right_columns) = self._parts(projectors, unit)
        first = bias_of(unit, *self._dense(projectors, unit))
        scale = (first.overlap / first.square.clamp_min(_SMALLEST)).clamp_min(_SMALLEST) ** 0.25
        left.mul_(scale)
        right.mul_(scale)
        values, columns = (left, right), (left_columns.to(torch.int64), right_columns.to(torch.int64))
        means, squares = [torch.zeros_like(each) for each in values], [torch.zeros_like(each) for each in values]
        for number in range(LEARN_STEPS):
            bias = bias_of(unit, *self._dense(projectors, unit))
            if bias.relative <= self._alpha:
                return
            for each, column, gradient, mean, square in zip(
                values, columns, bias.gradients, means, squares, strict=True
            ):
                gradient = gradient.gather(1, column).to(each.dtype).add_(each, alpha=2 * BETA / len(each))
                beta1, beta2 = LEARN_BETAS
                mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
                square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                root = (square / (1 - beta2 ** (number + 1))).sqrt_().add_(LEARN_EPS)
                each.addcdiv_(mean / (1 - beta1 ** (number + 1)), root, value=-LEARN_RATE)

    def _dense(self, projectors: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """P (m, d) and Q (n, d), in the dtype of the matrix."""
        left, right = self._parts(projectors, matrix)
        return self._scattered(*left, matrix.dtype), self._scattered(*right, matrix.dtype)

    def _scattered(self, values: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
        found = torch.zeros(len(values), self._rank, dtype=dtype, device=values.device)
        return found.scatter_(1, columns.to(torch.int64), values.to(dtype))

    def _parts(self, projectors: Tensor, matrix: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Values and columns of P (m, r), and of Q (n, r): views of `projectors`."""
        rows, columns = matrix.shape
        left, right = projectors[: 2 * rows * self._density], projectors[2 * rows * self._density :]
        one, other = left.view(2, rows, -1), right.view(2, columns, -1)
        return (one[0], one[1]), (other[0], other[1])


class Bias(NamedTuple):
    """The bias of a projection of a gradient of norm 1."""

    relative: Tensor  # ||b||
    overlap: Tensor  # <P P^T G Q Q^T, G>
    square: Tensor  # ||P P^T G Q Q^T||^2
    gradients: tuple[Tensor, Tensor]  # of the relative bias with respect to P (m, d) and Q (n, d)


def bias_of(unit: Tensor, left: Tensor, right: Tensor) -> Bias:
    """The bias of projectors P (m, d) and Q (n, d) for a gradient of norm 1, in the dtype of products."""
    dtype = unit.dtype
    by_right, by_left = times(unit, right, dtype), times(unit.t(), left, dtype)  # U, W
    left, right = (each.to(by_right.dtype) for each in (left, right))
    space, grams = left.t() @ by_right, (left.t() @ left, right.t() @ right)
    inner = grams[0] @ space @ grams[1]
    overlap, square = space.square().sum(), (inner * space).sum()
    relative = (square - 2 * overlap + 1).clamp_min(_SMALLEST).sqrt()
    rest = inner - space
    of_left = left @ (space @ grams[1] @ space.t()) - by_right @ (space - rest).t()
    of_right = right @ (space.t() @ grams[0] @ space) - by_left @ (space - rest)
    return Bias(relative, overlap, square, (of_left / relative, of_right / relative))


def move(moments: Tensor, left: Tensor, right: Tensor) -> None:
    """Move both moments (2, d, d) into the space of new projectors, in place: `left` is P^T P', `right` Q'^T Q."""
    mean, square = moments
    left, right = left.to(moments.dtype), right.to(moments.dtype)
    mean.copy_(left @ mean @ right)
    square.copy_(left.square() @ square @ right.square())
