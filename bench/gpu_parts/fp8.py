"""Products in fp8 beside bf16: torch's scaled products, the rounding of an operand, and whole steps.

A device of compute capability 9.0 or later must take all of them, scales of rows included; on another one a refusal is
skipped, with its reason.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.common import local_cluster
from bench.gpu_parts import training
from bench.gpu_parts.setting import Row, Setting
from terrace.base.errors import TerraceError
from terrace.plan.presets import command_plan

SHAPES = ((8192, 8192, 8192), (8192, 2048, 5504), (4096, 4096, 14336))  # rows, depth, columns
_LARGEST = 448.0  # of e4m3: 1.75 x 2^8
_WITH_ROWS = (9, 0)  # compute capability


def rows(setting: Setting) -> Iterator[Row]:
    """Rates by shape and recipe of scales, then a step."""
    for shape in SHAPES:
        sizes = tuple(setting.size(size, 64) for size in shape)
        for recipe in ("tensor-wise", "row-wise"):
            subject = f"{recipe} {' x '.join(map(str, sizes))}"
            try:
                yield _product(setting, subject, sizes, recipe == "row-wise")
            except (RuntimeError, ValueError, NotImplementedError) as error:  # no kernel for this device or shape
                yield Row.refused(subject, error, must=_must_have(setting))
    for products in ("fp8", "fp8:row"):
        yield _step(setting, products)


def _must_have(setting: Setting) -> bool:
    return setting.is_cuda and torch.cuda.get_device_capability() >= _WITH_ROWS


def _product(setting: Setting, subject: str, sizes: tuple[int, ...], by_row: bool) -> Row:
    num_rows, depth, columns = sizes
    left = torch.randn(num_rows, depth, device=setting.device).to(torch.bfloat16)
    right = torch.randn(columns, depth, device=setting.device).to(torch.bfloat16)  # (out, in), as a weight lies
    (first, first_scale), (second, second_scale) = rounded(left, by_row), rounded(right, by_row)
    product: Callable[[], Tensor] = partial(
        F.scaled_mm,
        first,
        second.t(),
        first_scale,
        F.ScalingType.RowWise if by_row else F.ScalingType.TensorWise,
        second_scale.t() if by_row else second_scale,
        F.ScalingType.RowWise if by_row else F.ScalingType.TensorWise,
        output_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    exact, found = torch.mm(left, right.t()), product()
    error = float((found.double() - exact.double()).norm() / exact.double().norm())
    flops = 2 * num_rows * depth * columns
    wide_s, narrow_s = setting.median_s(partial(torch.mm, left, right.t())), setting.median_s(product)
    round_s = setting.median_s(partial(rounded, left, by_row))
    words = (
        f"{flops / narrow_s / 1e12:.0f} TFLOP/s, {wide_s / narrow_s:.2f} times bf16, rounding of the rows takes "
        f"{round_s / narrow_s:.0%} of the product, relative error {error:.1%}"
    )
    return Row(subject, words, error < 0.1)  # two roundings of 3 bits are 4 %; a wrong scale is far off


def rounded(values: Tensor, by_row: bool) -> tuple[Tensor, Tensor]:
    """`values` (R, C) in e4m3 and the factors of their products: fp32, () or (R, 1)."""
    largest = values.abs().amax(1, keepdim=True) if by_row else values.abs().amax()
    scale = largest.float().clamp(min=1e-12) / _LARGEST
    return (values / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scale


def _step(setting: Setting, products: str) -> Row:
    subject = f"step with products = {products}"
    try:
        plan = command_plan({"preset": "ddp", "compute": "bf16", "products": products}, local_cluster({"node": 1}))
        config, shape = training.stack(setting, is_large=False)
        step = training.engine(setting, config, not setting.tiny, plan)
        step_s, losses, first_s = training.timed(setting, step, config, shape)
    except TerraceError as error:
        return Row.refused(subject, error, must=_must_have(setting))
    words = f"{step_s * 1e3:.1f} ms{training.beside_bf16(setting, step_s)}, first step {first_s:.1f} s"
    return Row(subject, f"{words}, loss {losses[0]:.3f} -> {losses[-1]:.3f}", losses[-1] < losses[0])
