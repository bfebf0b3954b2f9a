"""Products of experts in 8-bit floats: each expert's, by definition, with its rows alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from terrace.model.grouped import grouped_linear
from terrace.runtime.linear import WeightGradients
from terrace.runtime.scaled_linear import ScaledMatrix
from terrace.runtime.scaling import Scaling
from tests.support.scaled_reference import Scaled, product

COUNTS = (5, 0, 16, 3)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def stack_of(by_row: bool, gradients: torch.dtype) -> ScaledMatrix:
    # Experts of very different magnitudes, so that a scale of the whole stack would show.
    values = normal(4, 32, 16, seed=0) * torch.logspace(-3, 3, 4)[:, None, None]
    parameter = torch.nn.Parameter(values)
    parameter.__class__ = ScaledMatrix
    assert isinstance(parameter, ScaledMatrix)
    parameter.scaling, parameter.gradients = Scaling(by_row, gradients=gradients), WeightGradients()
    return parameter


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_all_three_products_are_the_definition(by_row: bool, form: Any) -> None:
    weight = stack_of(by_row, {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[form])
    x = (normal(24, 16, seed=1) * torch.logspace(-2, 2, 24)[:, None]).requires_grad_()
    y = grouped_linear(x, weight, COUNTS)
    dy = normal(24, 32, seed=2)
    torch.autograd.backward(y, dy)
    assert x.grad is not None
    assert weight.grad is not None
    scaled, start = Scaled(by_row, form), 0
    for expert, count in enumerate(COUNTS):
        rows = slice(start, start + count)
        start += count
        matrix, own, gradient = weight.detach()[expert], x.detach()[rows], dy[rows]
        if not count:
            assert not weight.grad[expert].any()
            continue
        wanted = (
            product(own, matrix, "e4m3", by_row),
            product(gradient, matrix.t(), form, scaled.by_row),
            product(gradient.t(), own.t(), form, scaled.by_row),
        )
        for found, one in zip((y[rows], x.grad[rows], weight.grad[expert]), wanted, strict=True):
            assert float((found - one).abs().max() / one.abs().max()) < 1e-6
    # As they must: an expert's scales are not those of all rows.
    alone = grouped_linear(x.detach()[:5], weight, (5, 0, 0, 0)).detach()
    assert torch.equal(alone, y.detach()[:5])


def test_no_rows_at_all() -> None:
    weight = stack_of(False, torch.float8_e5m2)
    y = grouped_linear(torch.zeros(0, 16, requires_grad=True), weight, (0, 0, 0, 0))
    assert y.shape == (0, 32)
    torch.autograd.backward(y.sum())
    assert weight.grad is not None
    assert not weight.grad.any()
