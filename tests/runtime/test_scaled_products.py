"""Products of 8-bit floats: against their definition in numpy, torch's operator and the compiled quantisation."""

import copy
import re
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.base.errors import PlanError
from terrace.plan.plan import Plan
from terrace.runtime.linear import WeightGradients
from terrace.runtime.scaled_linear import ScaledMatrix
from terrace.runtime.scaled_operands import Operand
from terrace.runtime.scaled_products import (
    _compiled,
    compiled_quantise,
    emulated,
    encode,
    multiply,
    on_device,
    quantise,
)
from terrace.runtime.scaling import Scaling
from tests.support.adopted import Adopted
from tests.support.scaled_reference import FORMATS, Scaled, ScaledLinear, dequantised, product, rounded

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {E4M3: "e4m3", E5M2: "e5m2"}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_reference_has_every_number_of_a_format(dtype: torch.dtype) -> None:
    """All finite codes, and the halves between neighbours, to the even one."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    values = values[values.isfinite()].unique()  # type: ignore[no-untyped-call]
    assert np.array_equal(rounded(values.numpy(), FORMATS[NAMES[dtype]]), values.numpy())
    between = (values[1:] + values[:-1]) / 2
    assert np.array_equal(rounded(between.numpy(), FORMATS[NAMES[dtype]]), between.float().to(dtype).double().numpy())


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_codes_and_scales(by_row: bool, dtype: torch.dtype, held: torch.dtype) -> None:
    """Of rows of very different magnitudes, zeros and a transposed operand, the bits of the reference."""
    x = normal(48, 32) * torch.logspace(-12, 9, 48).unsqueeze(1)
    x[3], x[:, 5] = 0.0, 0.0
    for each in (x.to(held), x.t().to(held)):
        codes, scale = quantise(each, dtype, by_row)
        assert codes.dtype is dtype
        found = codes.double().numpy() * scale.double().numpy()
        assert np.array_equal(found, dequantised(each, FORMATS[NAMES[dtype]], by_row))
        assert scale.shape == ((len(each), 1) if by_row else (1, 1))


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.nn.functional.scaled_mm on a CPU. Torch 2.11 has it on CUDA alone, and for operands without values."""
    of_torch = F.scaled_mm
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"):
        return

    def by_definition(left: Tensor, right: Tensor, scale: Tensor, recipe: Any, other: Tensor, _: Any, **to: Any) -> Any:
        a, b, of_a, of_b = (each.to("meta") for each in (left, right, scale, other))
        checked = of_torch(a, b, of_a, recipe, of_b, recipe, **to)
        found = (torch.mm(left.float(), right.float()) * scale * other).to(checked.dtype)
        assert found.shape == checked.shape
        return found

    monkeypatch.setattr(F, "scaled_mm", by_definition)


@pytest.mark.usefixtures("operator")
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("shape", [(40, 48, 32), (1, 16, 16), (33, 16, 37), (17, 16, 1)])
@pytest.mark.parametrize("of_left", [E4M3, E5M2])
def test_a_product(by_row: bool, shape: tuple[int, int, int], of_left: torch.dtype) -> None:
    """The emulation, and torch's operator for as many rows and an inner dim of any size, are the definition."""
    m, n, k = shape
    left, right = normal(m, k, seed=1), normal(k, n, seed=2).t()
    wanted = product(left, right, NAMES[of_left], by_row)
    found = multiply(encode(left, of_left, by_row), encode(right, E4M3, by_row), torch.float32)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max()))
    (codes, scale), (others, other) = quantise(left, of_left, by_row), quantise(right, E4M3, by_row)
    parts = codes.contiguous(), others.contiguous(), scale, other
    torch.testing.assert_close(
        on_device(*parts, torch.float32), wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max())
    )
    # bf16 once, from the sum in fp32.
    assert torch.equal(emulated(*parts, torch.bfloat16), emulated(*parts, torch.float32).bfloat16())
    torch.testing.assert_close(on_device(*parts, torch.bfloat16), wanted.bfloat16(), rtol=2**-7, atol=1e-6)


@pytest.mark.nightly  # compiles
def test_the_compiled_quantisation_has_the_same_bits() -> None:
    x = normal(48, 32, dtype=torch.bfloat16)
    for each in (x, x.t()):
        for found, wanted in zip(compiled_quantise(each, E4M3, True), quantise(each, E4M3, True), strict=True):
            assert torch.equal(found.float(), wanted.float())


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[..., Any]]]:
    """A list of the functions that the quantisation gives to torch.compile, which runs their graphs as they are."""
    found, compile_ = list[Callable[..., Any]](), torch.compile

    def kept(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
        found.append(function)
        return compile_(function, dynamic=dynamic, backend="eager")

    monkeypatch.setattr(torch, "compile", kept)
    _compiled.cache_clear()
    yield found
    _compiled.cache_clear()


def test_no_operand_of_a_run_is_quantised_uncompiled(forms: list[Callable[..., Any]]) -> None:
    """Of both formats, as values and transposed, square and not, of one token, with gradients and without."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    shapes = [(16, 16), (16, 48), (32, 8), (1, 16), (16, 1)]
    sides = [(shape, turned) for shape in shapes for turned in (False, True)]
    for by_row, dtype in ((False, E4M3), (False, E5M2), (True, E5M2)):
        for shape, turned in sides:
            for each in (normal(*shape), normal(*shape).requires_grad_(), normal(3, *shape)[2]):
                x = each.t() if turned else each
                with torch.set_grad_enabled(each.requires_grad):
                    codes, scale = compiled_quantise(x, dtype, by_row)
                assert not codes.requires_grad
                wanted, other = quantise(x.detach(), dtype, by_row)
                assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
                assert torch.equal(scale, other)
    # Of 8 a form's code may have; a form has all shapes that differ in sizes alone.
    assert {len(_debug_get_cache_entry_list(form.__code__)) for form in forms} == {1}
    assert len(forms) < 4 * len(sides)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_makes_nan(by_row: bool, bad: float) -> None:
    """Of its row, or of everything, so that a step with it is given up."""
    x = normal(16, 16)
    x[2, 3] = bad
    found = multiply(encode(x, E4M3, by_row), encode(normal(32, 16), E4M3, by_row), torch.float32)
    assert found[2].isnan().all()
    assert bool(found[0].isfinite().all()) == by_row


@pytest.mark.parametrize("by_row", [False, True])
def test_no_rows(by_row: bool) -> None:
    """Neither way; a weight gradient of no rows is zero."""
    x, matrix = Operand(torch.empty(0, 16), E4M3, by_row), Operand(normal(32, 16), E4M3, by_row)
    assert multiply(x.rows, matrix.rows, torch.bfloat16).shape == (0, 32)
    gradient = Operand(torch.empty(0, 32), E5M2, by_row)
    found = multiply(gradient.columns, x.columns, torch.bfloat16)
    assert torch.equal(found, torch.zeros(32, 16, dtype=torch.bfloat16))


def squares(module: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = module(x).square().sum()
    return found


def scaled(module: nn.Module, scaling: Scaling) -> Adopted:
    """The module in flat buffers, its matrices scaled."""
    adopted = Adopted.of(module)
    for parameter in adopted.module.parameters():
        if parameter.dim() == 2:
            parameter.__class__ = ScaledMatrix
            assert isinstance(parameter, ScaledMatrix)
            parameter.scaling, parameter.gradients = scaling, adopted.weights
    return adopted


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize(("by_row", "gradients"), [(False, "e5m2"), (True, "e4m3")])
def test_a_linear_layer(hold: bool, by_row: bool, gradients: str) -> None:
    """Results and gradients of two passes, against the reference under autograd; without gradients the same bits."""
    module = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 16, bias=False))
    for index, parameter in enumerate(module.parameters()):
        parameter.data = normal(*parameter.shape, seed=index)
    adopted = scaled(module, Scaling(by_row, gradients=E4M3 if gradients == "e4m3" else E5M2))
    form = Scaled(by_row, gradients)
    plain = copy.deepcopy(module)
    plain[0], plain[2] = ScaledLinear(plain[0], form), ScaledLinear(plain[2], form)  # type: ignore[arg-type]
    inputs = [normal(2, 5, 32, seed=seed).requires_grad_() for seed in (7, 8)]
    wanted = [plain(x) for x in inputs]
    for x, y in zip(inputs, wanted, strict=True):
        with torch.no_grad():
            without = adopted.module(x)
        assert torch.equal(adopted.module(x), without)
        torch.testing.assert_close(without, y, rtol=1e-6, atol=1e-5)
        torch.autograd.backward(y.square().sum())
    passes: list[Callable[[nn.Module], Tensor]] = [partial(squares, x=x) for x in inputs]
    by_reference = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    found = adopted.gradients(passes, hold)
    for (name, value), parameter in zip(found.items(), plain.parameters(), strict=True):
        torch.testing.assert_close(value, parameter.grad, rtol=1e-5, atol=1e-5 * float(value.abs().max()), msg=name)
    for x, gradient in zip(inputs, by_reference, strict=True):
        assert gradient is not None
        torch.testing.assert_close(x.grad, gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))


def test_outside_of_an_engine_gradients_are_autograds() -> None:
    layer = nn.Linear(16, 32)
    for parameter in layer.parameters():
        if parameter.dim() == 2:
            parameter.__class__ = ScaledMatrix
            parameter.scaling, parameter.gradients = Scaling(by_row=True), WeightGradients()  # type: ignore[attr-defined]
    plain = ScaledLinear(copy.deepcopy(layer), Scaled(True, "e5m2"))
    plain.weight = nn.Parameter(layer.weight.detach().clone())
    for each in (layer, plain):
        torch.autograd.backward(each(normal(3, 16)).square().sum())
    for name in ("weight", "bias"):
        found, wanted = (getattr(each, name).grad for each in (layer, plain))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def gpu(major: int, minor: int, architecture: str = "") -> SimpleNamespace:
    return SimpleNamespace(name="card", major=major, minor=minor, gcnArchName=architecture)


CUDA = [
    ("fp8", "bf16", gpu(8, 0), "has compute capability 8.0, and products of 8-bit floats need 8.9"),
    ("fp8", "fp32", gpu(8, 9), ""),
    ("fp8:row", "bf16", gpu(8, 9), "8.9, and products of 8-bit floats, with scales of rows need 9.0"),
    ("fp8:row", "bf16", gpu(9, 0), ""),
    ("fp8:row", "fp32", gpu(10, 0), "products with scales of rows give bf16; use that"),
]


@pytest.mark.parametrize(("products", "compute", "properties", "words"), CUDA)
def test_gpus(
    products: str, compute: Any, properties: SimpleNamespace, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    plan = Plan(params="device", grads="device", optimizer="device", products=products, compute=compute)
    if words:
        with pytest.raises(PlanError, match=re.escape(words)):
            Scaling.of(plan, torch.device("cuda"))
    else:
        assert Scaling.of(plan, torch.device("cuda")) == Scaling(products == "fp8:row")


def test_amd_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MI300 has formats of its own, which the definition takes as they are; those after it have the others."""
    plan = Plan(params="device", grads="device", optimizer="device", products="fp8", compute="bf16")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    found = []
    for architecture in ("gfx942:sramecc+", "gfx950"):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, name=architecture: gpu(9, 4, name))
        found.append(Scaling.of(plan, torch.device("cuda")))
    assert found == [Scaling(False, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), Scaling(False)]
    x = normal(16, 32)
    codes, scale = quantise(x, torch.float8_e4m3fnuz, False)
    assert float((codes.float() * scale - x).abs().max()) <= float(x.abs().max()) / 16
    assert float(codes.float().abs().max()) == 240.0
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu(9, 0, "gfx90a"))
    with pytest.raises(PlanError, match=r"card \(gfx90a\) has no 8-bit floats"):
        Scaling.of(plan, torch.device("cuda"))
