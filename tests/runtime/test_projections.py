"""GaLore and LSP against numpy in fp64, and what their projections promise: bases, biases, moved moments, FLOPs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from terrace.plan.keep import Keep
from terrace.plan.projected import OVERSAMPLE, POWER, numbers_of, products_of, projected_bytes, projector_numbers
from terrace.plan.update import EVERY, parse_update
from terrace.runtime.adamw import ShardedAdamW
from terrace.runtime.flat_slices import Matrix, MatrixPart
from terrace.runtime.projected import ShardedProjected
from terrace.runtime.projections import projection_of
from terrace.runtime.projections.galore import leading_vectors
from terrace.runtime.projections.interface import generator
from terrace.runtime.projections.lsp import BETA, bias_of, move
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.stored import Storage
from tests.support import projected_reference as reference
from tests.support.parity import exact
from tests.support.toys import cluster_of

GALORE = OptimizerConfig(name="galore", lr=1e-2, rank=3, check_every=3)
LSP = OptimizerConfig(name="lsp", lr=1e-2, rank=4, density=2, check_every=3, alpha=0.3)
SHAPES = [(6, 9), (9, 6), (7, 7), (3, 40)]


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def decaying(rows: int, columns: int, power: float) -> Tensor:
    """A matrix with singular values 1 / k^power."""
    short = min(rows, columns)
    left, right = (torch.linalg.qr(rand(size, short, seed=size)).Q for size in (rows, columns))
    found: Tensor = left * torch.arange(1, short + 1).pow(-power) @ right.t()
    return found


def updated(config: OptimizerConfig, shape: tuple[int, int], gradients: list[Tensor]) -> Tensor:
    """A matrix after steps with these gradients."""
    value, gradient = rand(*shape).reshape(-1), torch.zeros(shape).double().reshape(-1)
    storage = Storage(torch.float64)
    whole = tuple(slice(0, size) for size in shape)
    matrix = Matrix("x.w%0", shape, shape, 0, value.numel(), (MatrixPart(0, whole),), whole)
    optimizer = ShardedProjected(
        value, gradient, 0, [matrix], value.numel(), config, torch.float64, storage, ShardedAdamW
    )
    assert optimizer.nbytes == 8 * numbers_of(parse_update(config.update), shape)
    for each in gradients:
        gradient.copy_(each.reshape(-1))
        optimizer.update(config.lr)
    return value.view(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("config", [GALORE, replace(LSP, rank=3), replace(LSP, rank=3, alpha=0.9)], ids=str)
def test_an_update_is_that_of_the_papers(config: OptimizerConfig, shape: tuple[int, int]) -> None:
    gradients = [rand(*shape, seed=step) for step in range(1, 9)]
    gradients[4] = rand(shape[0], 1, seed=50) @ rand(1, shape[1], seed=51)  # of one rank, where galore has a check
    rule = (reference.Galore if config.name == "galore" else reference.Lsp)(config)
    wanted, scale = rand(*shape).numpy(), 0.25 if config.name == "galore" else 1.0
    for step, gradient in enumerate(gradients, 1):
        direction = rule.direction(gradient.numpy(), "x.w%0", step)
        wanted = wanted - config.lr * (scale * direction + config.weight_decay * wanted)
    np.testing.assert_allclose(updated(config, shape, gradients).numpy(), wanted, rtol=0, atol=1e-10)
    if isinstance(rule, reference.Lsp):
        assert rule.num_learned >= (2 if config.alpha < 0.5 else 1)


def test_slopes_are_those_of_the_objective() -> None:
    gradient, left, right = rand(6, 9), rand(6, 4, seed=1), rand(9, 4, seed=2)
    gradient = gradient / gradient.norm()
    slopes = bias_of(gradient, left, right).gradients
    pair = [left.clone().requires_grad_(), right.clone().requires_grad_()]
    bias = pair[0] @ pair[0].t() @ gradient @ pair[1] @ pair[1].t() - gradient
    bias.norm().backward()
    plain = reference.slopes(*map(_numpy, (gradient, left, right)))
    for found, wanted, of_numpy in zip(slopes, pair, plain, strict=True):
        assert wanted.grad is not None
        torch.testing.assert_close(found, wanted.grad, rtol=1e-10, atol=1e-12)
        whole = found + 2 * BETA * wanted.detach() / len(wanted)
        np.testing.assert_allclose(whole.numpy(), of_numpy, rtol=1e-10, atol=1e-12)


def _numpy(value: Tensor) -> reference.Array:
    found: reference.Array = value.numpy()
    return found


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_leading_vectors_hold_what_the_best_ones_hold(power: float) -> None:
    matrix = decaying(120, 300, power)
    found = leading_vectors(matrix, 20, generator("x", 0))
    torch.testing.assert_close(found.t() @ found, torch.eye(20).double(), rtol=0, atol=1e-12)
    assert bool((found.gather(0, found.abs().argmax(0, keepdim=True)) > 0).all())
    best = torch.linalg.svdvals(matrix)[:20].square().sum()
    assert (found.t() @ matrix).square().sum() > 0.99 * best
    for dtype in (torch.float32, torch.bfloat16):
        narrow = leading_vectors(matrix.to(dtype), 20, generator("x", 0)).double()
        assert (narrow.t() @ matrix).square().sum() > 0.98 * best, dtype


def test_a_matrix_without_a_gradient_has_a_basis_too() -> None:
    found = leading_vectors(torch.zeros(8, 12), 3, generator("x", 0))
    torch.testing.assert_close(found.t() @ found, torch.eye(3), rtol=0, atol=1e-6)
    for config in (GALORE, LSP):
        after = updated(config, (6, 9), [torch.zeros(6, 9).double(), rand(6, 9)])
        assert bool(after.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_projectors_learn_to_hold_a_gradient(dtype: torch.dtype) -> None:
    config = replace(LSP, rank=32, density=4, alpha=0.55)
    projection, matrix = projection_of(config), decaying(96, 160, 1.0).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    numbers = torch.zeros(projector_numbers(parse_update(config.update), (96, 160)), dtype=wide)
    moments = torch.zeros(2, 32, 32, dtype=wide)
    projection.check(numbers, moments, matrix, "x", 0)
    image = projection.project_back(numbers, projection.project(numbers, matrix), matrix).to(wide)
    assert (image - matrix.to(wide)).norm() < 0.56 * matrix.to(wide).norm()
    before = numbers.clone()
    projection.check(numbers, moments, matrix, "x", 200)  # its bias is small enough
    assert torch.equal(numbers, before)
    other = rand(96, 160).to(dtype)
    projection.check(numbers, moments, other, "x", 400)
    assert not torch.equal(numbers, before)


def test_moments_of_a_space_that_only_turns_turn_with_it() -> None:
    """Where the new projectors are the old ones times permutations, moments are permuted: nothing is lost."""
    left, right = (torch.linalg.qr(rand(9, 4, seed=seed)).Q for seed in (1, 2))
    moments, order = torch.stack([rand(4, 4), rand(4, 4, seed=3).square()]), torch.tensor([2, 0, 3, 1])
    moved = moments.clone()
    move(moved, left[:, order].t() @ left, right.t() @ right[:, order])
    torch.testing.assert_close(moved, moments[:, order][:, :, order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("update", ["galore:20", "lsp:20:3"])
@pytest.mark.parametrize("shape", [(64, 96), (96, 64)], ids=str)
def test_priced_products_are_the_ones_that_run(update: str, shape: tuple[int, int]) -> None:
    rule = parse_update(update)
    config = replace(GALORE, rank=20, check_every=EVERY)
    if rule.density:
        config = replace(LSP, rank=20, density=3, alpha=1e-6, check_every=EVERY)
    projection, matrix = projection_of(config), rand(*shape)
    numbers = torch.zeros(projector_numbers(rule, shape)).double()
    moments = torch.zeros(2, *projection.space(matrix)).double()

    def counted(of_check: bool) -> int:
        with FlopCounterMode(display=False) as counter:
            if of_check:
                projection.check(numbers, moments, matrix, "x", 0)
            else:
                projection.project_back(numbers, projection.project(numbers, matrix), matrix)
        return int(counter.get_total_flops())

    flops = [(times, 2 * m * k * n) for times, m, k, n in products_of(rule, shape)]
    checked, stepped = counted(True), counted(False)
    assert stepped == sum(each for times, each in flops if times == 1)
    priced = EVERY * sum(times * each for times, each in flops if times != 1)
    if rule.name == "galore":  # QR decompositions are not counted by torch
        width, long = min(shape[0], shape[1], rule.rank + OVERSAMPLE), max(shape)
        priced -= (2 * POWER + 1) * 2 * long * width**2
    assert checked == pytest.approx(priced, rel=0.1)


def test_only_moments_of_other_parameters_rest_below() -> None:
    plan, slices = exact("ddp", cluster_of(1), update="galore:2"), ((((8, 8),), 10),)
    numbers = 8 * 2 + 2 * 8 * 2  # of a projector and both moments
    for keep, moments in ((Keep(), 20), (Keep(grads="disk", params="disk"), 20), (Keep(optimizer="disk"), 0)):
        assert projected_bytes(replace(plan, keep=keep), slices) == 8 * (numbers + moments), keep
