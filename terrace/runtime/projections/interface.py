"""The interface of projections, and the random numbers that they draw."""

import hashlib
from typing import Protocol

import torch
from torch import Tensor


class Projection(Protocol):
    """Projects a gradient G (m, n), in the dtype of products, into a smaller space, and projects directions back.

    `projectors` are those of one matrix as a 1-D tensor in the dtype of sums, all zero before the first `check`.
    """

    def space(self, matrix: Tensor) -> tuple[int, int]:
        """Shape of the projected gradient of a matrix."""

    def check(self, projectors: Tensor, moments: Tensor, matrix: Tensor, name: str, step: int) -> None:
        """Compare the projectors with the gradient of a step, and replace them in place where the rule asks for it.

        `moments` (2, *space) are AdamW's first and second, which the rule may move into the new space, in place.
        `name` and `step`, from 0, seed what is drawn at random.
        """

    def project(self, projectors: Tensor, matrix: Tensor) -> Tensor:
        """The projected gradient."""

    def project_back(self, projectors: Tensor, direction: Tensor, matrix: Tensor) -> Tensor:
        """The direction (m, n) in the space of the matrix of a `direction` in the projected space."""


def generator(name: str, step: int) -> torch.Generator:
    """A generator seeded by a matrix's name and a step: the same numbers under every plan and after a resume."""
    digest = hashlib.blake2b(f"{name}:{step}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def times(one: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of two matrices, computed in `dtype` and returned in fp32 at least."""
    return (one.to(dtype) @ other.to(dtype)).to(torch.promote_types(dtype, torch.float32))
