"""Blocks of matrices that are zero in the working copy, and the penalty that prepares them.

The penalty is the reweighted group lasso on blocks (Li et al., 2009.08065, section 3; the weights are those of Candes,
Wakin and Boyd, 0711.1612). With the Frobenius norm n_b of block b,

    R = weight * sum over b of  n_b / (n'_b + epsilon)          n'_b = n_b, held constant

so its gradient in a block W_b is  weight * W_b / (n_b (n_b + epsilon)), and 0 where n_b = 0. The norms n'_b are
computed anew in every step from the parameters alone, so checkpoints have no state of them. A step follows the gradient
of the mean loss plus R. Gradients are sums over tokens, which CLIP divides by the step's tokens, so each micro-batch
adds the gradient of R times its number of tokens. The reductions of gradients then sum it over ranks without a message
of its own, and the gradient norm includes it.

Shape legend: R rows and C columns of a matrix, b and c of a block; a stack has leading dims, and its own masks for each
of its matrices.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from terrace.plan.flats import FlatParamSpec
from terrace.plan.pruning import NO_PRUNING, BlockPruning, has_blocks

_PART = 1 << 24  # elements of the penalty's gradient in memory at a time: 64 MiB in fp32
EPSILON = 1e-2  # added to norms, which begin at about 0.3 (16 x 16 elements of 0.02): a guess


def in_blocks(matrix: Tensor, blocks: tuple[int, ...]) -> Tensor:
    """View of matrices (..., R, C) as (..., R / b, b, C / c, c)."""
    *leading, rows, columns = matrix.shape
    height, width = blocks
    return matrix.view(*leading, rows // height, height, columns // width, width)


def in_parts(matrix: Tensor, blocks: tuple[int, ...]) -> Iterator[tuple[int | slice, ...]]:
    """Indices of consecutive rows of whole blocks, of about `_PART` elements, of each of matrices (..., R, C)."""
    *leading, rows, columns = matrix.shape
    step = max(1, _PART // (blocks[0] * columns)) * blocks[0]
    for each in product(*map(range, leading)):
        for first in range(0, rows, step):
            yield (*each, slice(first, first + step))


def block_norms(matrix: Tensor, blocks: tuple[int, ...]) -> Tensor:
    """Norms of the blocks of matrices (..., R, C), in fp32 at least: (..., R / b, C / c)."""
    wide = torch.promote_types(matrix.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(in_blocks(matrix, blocks), dim=(-3, -1), dtype=wide)
    return norms


def smallest_blocks(matrix: Tensor, settings: BlockPruning) -> Tensor:
    """Which blocks of matrices (..., R, C) are zero: bool (..., R / b, C / c). Of equal norms, the first."""
    norms = block_norms(matrix, settings.blocks)
    flat = norms.flatten(-2)
    order = flat.argsort(dim=-1, stable=True)[..., : settings.num_zero(flat.shape[-1])]
    return torch.zeros_like(flat, dtype=torch.bool).scatter_(-1, order, True).view(norms.shape)


def zero_(matrix: Tensor, which: Tensor, settings: BlockPruning) -> None:
    """Set blocks of matrices (..., R, C) to zero in place: those of `which` (..., R / b, C / c)."""
    in_blocks(matrix, settings.blocks).masked_fill_(which.unsqueeze(-1).unsqueeze(-3), 0.0)


def penalty_gradient(matrix: Tensor, settings: BlockPruning) -> Tensor:
    """Gradient (..., R, C) of the penalty, in fp32 at least."""
    norms = block_norms(matrix, settings.blocks)
    factors = torch.where(norms > 0, settings.weight / (norms * (norms + EPSILON)), 0.0)
    scaled = in_blocks(matrix, settings.blocks) * factors.unsqueeze(-1).unsqueeze(-3)
    return scaled.view(matrix.shape)


@dataclass(frozen=True)
class PrunedBlocks:
    """The matrices of a flat buffer whose blocks are set to zero: (index of the parameter, start, stop, shape)."""

    settings: BlockPruning = NO_PRUNING
    matrices: tuple[tuple[int, int, int, tuple[int, ...]], ...] = ()

    @staticmethod
    def of(spec: FlatParamSpec, settings: BlockPruning) -> "PrunedBlocks":
        """Those of a layer's flat buffer."""
        found = [
            (index, start, stop, param.shape)
            for index, (param, start, stop) in enumerate(spec.extents)
            if has_blocks(param)
        ]
        return PrunedBlocks(settings, tuple(found))

    def penalises(self, num_updates: int) -> bool:
        """Whether the penalty acts in the step after `num_updates` updates."""
        return bool(self.matrices) and self.settings.weight > 0 and num_updates < self.settings.after

    @torch.no_grad()
    def zero_(self, full: Tensor, num_updates: int) -> None:
        """Set blocks of a whole buffer to zero, if `num_updates` is at least `settings.after`."""
        if num_updates < self.settings.after:
            return
        for _, start, stop, shape in self.matrices:
            matrix = full[start:stop].view(shape)
            zero_(matrix, smallest_blocks(matrix, self.settings), self.settings)


NOT_PRUNED = PrunedBlocks()
