"""The sum of squares behind the gradient norm must not depend on how large a rank's shard is."""

import pytest
import torch

from terrace.runtime.norm import squared_norm


@pytest.mark.parametrize("numel", [1, 4095, 4096, 4097, 1_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_squared_norm_equals_the_fp64_sum(numel: int, dtype: torch.dtype) -> None:
    values = torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(numel))
    exact = values.double().square().sum()
    assert squared_norm(values).item() == pytest.approx(exact.item(), rel=1e-6 if dtype == torch.float32 else 1e-14)


def test_a_large_shard_keeps_its_precision() -> None:
    """One fp32 sum over these is low by more than a percent."""
    values = torch.full((64_000_000,), 1e-3)
    assert squared_norm(values).item() == pytest.approx(64.0, rel=1e-5)


def test_nothing_has_norm_zero() -> None:
    assert squared_norm(torch.empty(0)).item() == 0.0
