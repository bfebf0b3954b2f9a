"""Kernels of pairs against plain products."""

import torch
from torch import Tensor

from terrace.model.pair_kernels import Kernel, PairInputs, plain_backward, plain_forward

# Relative to the largest element. Half precision: weights with 8 significant bits are off by a few 2^-8.
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@torch.no_grad()
def disagreement(
    kernel: Kernel,
    device: torch.device,
    dtype: torch.dtype,
    lengths: tuple[int, int] = (5, 7),
    head_dim: int = 16,
) -> str:
    """Compare a kernel with plain products on pairs of every kind that it takes, forward and backward.

    `lengths` are the queries and keys; odd ones are edge cases. Returns the first difference, or "".
    """
    generator, (num_queries, num_keys) = torch.Generator().manual_seed(0), lengths
    # A fully masked row is a further edge case.
    hidden = torch.zeros(num_queries, num_keys).masked_fill_(torch.ones(num_queries, num_keys).tril(1) == 0, -torch.inf)
    hidden[2] = -torch.inf  # a query that sees nothing
    hidden = hidden.to(device, dtype)
    kinds = (("full", num_queries), ("causal", num_keys), ("mask", num_queries))

    def normal(length: int, heads: int) -> Tensor:
        return torch.randn(1, length, heads, head_dim, generator=generator).to(device, dtype).transpose(1, 2)

    for kind, length in kinds:
        query, key, value = normal(length, 4), normal(num_keys, 2), normal(num_keys, 2)
        pair = PairInputs(query, key, value, kind, hidden if kind == "mask" else None)
        if kind == "mask" and not kernel.takes(pair):
            continue
        grad, out = normal(length, 4), normal(length, 4)
        sums = plain_forward(pair)[1] + 0.5  # as if there were further keys
        found = [*kernel.forward(pair), *kernel.backward(grad, pair, out, sums)]
        wanted = [*plain_forward(pair), *plain_backward(grad, pair, out, sums)]
        for name, one, other in zip(("output", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
            if not _equal(one, other, _TOLERANCE[dtype]):
                return f"{kernel.name} differs from the reference ({name} of a {kind} pair)"
    return ""


def _equal(one: Tensor, other: Tensor, tolerance: float) -> bool:
    # Infinities must be at equal indices; they are excluded from the difference.
    if one.shape != other.shape or not torch.equal(one == -torch.inf, other == -torch.inf):
        return False
    one, other = (part.double().masked_fill(part == -torch.inf, 0.0) for part in (one, other))
    return bool((one - other).abs().max() <= tolerance * other.abs().max())
