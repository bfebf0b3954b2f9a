"""Seconds of products in 8-bit floats, with the passes that quantise their operands (terrace.runtime.scaled_operands).

A product of (m, k) and (k, n) reaches `gemm_fp8` of the fp8 peak, times the share that its shape reaches in any
product; it reads a byte an element and writes e bytes, those of the compute dtype. Layers with the same input quantise
it once. In bytes an element, and kernels:

                              GPU       CPU       kernels
    codes                     2e + 1    4e + 9    2          a largest magnitude, and codes
    codes, transposed         2e + 3    4e + 11   3          quantised, then transposed
    transposition alone       2         2         1          of codes with a single scale for the operand
    read by a product         0         5         0          codes in fp32

    forward           codes of x and of W
    for the backward  codes of x over tokens: transposed, and quantised anew with scales of rows; done in the backward
                      where x is gathered or computed again or the layer is recomputed, anew in the former case
    input gradient    codes of dy, codes of W transposed, and codes of dy over tokens as of x
    weight gradient   nothing more; without accumulation, a copy into the gradient, 2e an element of W

A weight held as codes is not quantised: it costs 2 bytes an element where it is transposed. On a CPU the product itself
runs in fp32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Device
from terrace.plan.plan import Plan, scales_rows
from terrace.plan.wire import FORMATS
from terrace.simulate.kernels import fp8_share, gemm_s, memory_s, peak_flops_per_s, stream_s

if TYPE_CHECKING:
    from terrace.simulate.work import Work

_CODES, _TRANSPOSED, _TURNED = 2, 3, 1  # kernels


class Matrices(NamedTuple):
    """`number` matrices (inputs, outputs) side by side that multiply the same tokens.

    `is_entered`: their input was already quantised for earlier matrices. `returns`: it is gathered or computed again
    for the backward.
    """

    tokens: int
    inputs: int
    outputs: int
    number: int
    is_entered: bool = False
    returns: bool = False


def check_same(work: "Work", plan: Plan) -> None:
    """Raise `PlanError` unless a rank's work and its plan agree on the format of products."""
    if (work.products, work.codes_of_weights) != (plan.products, plan.shares_scales):
        own, wanted = (each * ", with weights held as codes" for each in (work.codes_of_weights, plan.shares_scales))
        raise PlanError(
            f"the work has products = {work.products!r}{own}, the plan {plan.products!r}{wanted}: make them the same"
        )


@dataclass(frozen=True)
class _Passes:
    """Bytes that quantisation reads and writes, and its kernels."""

    num_bytes: float
    kernels: int

    def __add__(self, other: "_Passes") -> "_Passes":
        return _Passes(self.num_bytes + other.num_bytes, self.kernels + other.kernels)


_NONE = _Passes(0.0, 0)


class _Form(NamedTuple):
    """How a device quantises: by rows or with one scale; bytes per element for codes (`each`) and for a product
    (`read`).
    """

    by_row: bool
    each: int
    read: int

    @classmethod
    def of(cls, device: Device, compute: str, products: str) -> "_Form":
        item, by_row = FORMATS[compute].element_bytes, scales_rows(products)
        return cls(by_row, 4 * item + 9, 5) if device.type == "cpu" else cls(by_row, 2 * item + 1, 0)

    def codes(self, numel: float, number: int = 1) -> _Passes:
        return _Passes(self.each * numel, _CODES * number)

    def transposed(self, numel: float, number: int = 1) -> _Passes:
        return _Passes((self.each + 2) * numel, _TRANSPOSED * number)

    def other(self, numel: float, number: int = 1) -> _Passes:
        """Codes over the other dim of an operand that is already quantised over one."""
        return self.transposed(numel, number) if self.by_row else _Passes(2 * numel, _TURNED * number)

    def entered(self, matrices: Matrices) -> tuple[_Passes, _Passes]:
        """Codes of an input over its features, and over its tokens for weight gradients."""
        if matrices.is_entered:
            return _NONE, _NONE
        numel = matrices.tokens * matrices.inputs
        return self.codes(numel), self.transposed(numel) if matrices.returns else self.other(numel)


def scaled_seconds(
    device: Device,
    products: Sequence[Matrices],
    compute: str,
    form: str,
    coded: bool = False,
    *,
    accumulate: bool,
    recomputed: bool = False,
) -> tuple[float, float, float]:
    """(Forward, input gradient, weight gradient) seconds of products.

    `form` is the plan's; `coded`: weights are held as codes. If the layer runs `recomputed` in its backward, codes for
    weight gradients are counted there.
    """
    forward_s = input_s = weight_s = 0.0
    item, own = FORMATS[compute].element_bytes, _Form.of(device, compute, form)
    for matrices in products:
        m, k, n, number = matrices[:4]
        tokens, weights, results = number * m * k, k * n, m * n
        entered, kept = own.entered(matrices)
        to_weights = recomputed or matrices.returns
        forward = entered + (_NONE if coded else own.codes(weights, number)) + (_NONE if to_weights else kept)
        backward = own.codes(results, number) + own.other(results, number)
        backward += own.other(weights, number) if coded else own.transposed(weights, number)
        forward_s += product_s(device, m, k, n, compute) + _passes_s(device, forward, own.read * (tokens + weights))
        input_s += product_s(device, m, n, k, compute) + _passes_s(device, backward, own.read * (results + weights))
        weight_s += product_s(device, k, m, n, compute)
        weight_s += _passes_s(device, kept if to_weights else _NONE, own.read * (results + tokens))
        if not accumulate:
            weight_s += stream_s(device, 2 * item * weights)
    return forward_s, input_s, weight_s


def quantisations(products: Sequence[Matrices], form: str, coded: bool = False) -> int:
    """Kernel launches of quantisation in a forward, including inputs for its backward."""
    by_row, found = scales_rows(form), 0
    for each in products:
        found += 0 if coded else _CODES * each.number
        if not each.is_entered:
            found += _CODES + (0 if each.returns else _TRANSPOSED if by_row else _TURNED)
    return found


def launches(products: Sequence[Matrices], of_a_layer: int, form: str, coded: bool = False) -> float:
    """Kernel launches of a layer relative to the same layer without quantisation."""
    return 1 + quantisations(products, form, coded) / of_a_layer


def product_s(device: Device, m: int, k: int, n: int, compute: str) -> float:
    """Seconds of a product of (m, k) and (k, n) codes, with a result in the compute dtype."""
    if device.type == "cpu":
        return gemm_s(device, m, k, n, 1, "fp32")
    compute_s = 2.0 * m * k * n / (peak_flops_per_s(device, "fp8") * fp8_share(device, m, k, n) * device.pace)
    moved = m * k + k * n + FORMATS[compute].element_bytes * m * n
    return max(compute_s, stream_s(device, moved, 0)) + device.kernels.launch_s


def _passes_s(device: Device, passes: _Passes, read_bytes: float) -> float:
    return memory_s(device, passes.num_bytes + read_bytes, passes.kernels)
