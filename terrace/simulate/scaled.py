"""Seconds of products in 8-bit floats, with the passes that quantise their operands (terrace.runtime.scaled_operands).

A product of (m, k) and (k, n) has the share `gemm_fp8` of the fp8 peak, and of that what its shape has of any other
product; it reads a byte an element and writes e bytes, those of the compute dtype. Layers with the same input quantise
it once. In bytes an element, and kernels:

                          GPU       CPU       kernels
    codes                 2e + 1    4e + 9    2          a largest magnitude, and codes
    the same transposed   2e + 3    4e + 11   3          codes are turned after they were made
    turned alone          2         2         1          codes of the other order, with the one scale of the operand
    read by a product     0         5         0          codes in fp32

    forward            codes of x and of W
    for the backward   those of x over tokens: turned, with scales of rows made anew; where x comes again, and where
                       the layer is recomputed, in the backward, and then anew if x comes again
    input gradient     codes of dy, those of W transposed, and those of dy over tokens as of x
    weight gradient    nothing more; where nothing is added, it is copied into its place, 2e an element of W

A weight held as codes is not quantised: it costs 2 bytes an element where it is turned. On a CPU the
product itself is one in fp32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from terrace.cluster.cluster import Device
from terrace.model.operations import Enter
from terrace.plan.plan import scales_rows
from terrace.plan.recompute import operations_named
from terrace.plan.wire import FORMATS
from terrace.simulate.kernels import fp8_share, gemm_s, memory_s, peak_flops_per_s, stream_s
from terrace.simulate.passes import joined

if TYPE_CHECKING:
    from terrace.simulate.work import Work

_CODES, _TRANSPOSED, _TURNED = 2, 3, 1  # kernels


class Matrices(NamedTuple):
    """Matrices (inputs, outputs) side by side that multiply the same tokens: `number` of them.

    `is_entered`: their input was quantised for the matrices before. `returns`: it comes again for the backward.
    """

    tokens: int
    inputs: int
    outputs: int
    number: int
    is_entered: bool = False
    returns: bool = False


def matrices_of(work: "Work") -> list[Matrices]:
    """The products of `work.layer` on a rank, those of a group as one."""
    # Inputs that are gathered, or computed, again for the backward (terrace.runtime.returning).
    gathered = work.sequence_parallel and work.rows > 1 and work.recompute != "full"
    again = {operation.target.name for name in work.operations for operation in operations_named(work.layer, name)}
    for operation in work.layer.passed:
        if isinstance(operation, Enter) and (gathered or operation.source.name in again):
            again.add(operation.target.name)
    return [
        Matrices(
            work.tokens_of(group[0].source.tokens),
            work.width(group[0].inputs),
            sum(work.width(product.outputs) for product in group),
            len(group),
            returns=group[0].source.name in again,
        )
        for group in joined(work.layer)
    ]


@dataclass(frozen=True)
class _Passes:
    """Bytes that quantising reads and writes, and kernels."""

    num_bytes: float
    kernels: int

    def __add__(self, other: "_Passes") -> "_Passes":
        return _Passes(self.num_bytes + other.num_bytes, self.kernels + other.kernels)


_NONE = _Passes(0.0, 0)


class _Form(NamedTuple):
    """How a device quantises: by rows or with one scale, `each` byte an element for codes, `read` for a product."""

    by_row: bool
    each: int
    read: int

    @classmethod
    def of(cls, device: Device, compute: str, products: str) -> "_Form":
        item, by_row = FORMATS[compute].element_bytes, scales_rows(products)
        return cls(by_row, 4 * item + 9, 5) if device.backend == "cpu" else cls(by_row, 2 * item + 1, 0)

    def codes(self, numel: float, number: int = 1) -> _Passes:
        return _Passes(self.each * numel, _CODES * number)

    def transposed(self, numel: float, number: int = 1) -> _Passes:
        return _Passes((self.each + 2) * numel, _TRANSPOSED * number)

    def other(self, numel: float, number: int = 1) -> _Passes:
        """Codes over the other dim of an operand that has been quantised over one."""
        return self.transposed(numel, number) if self.by_row else _Passes(2 * numel, _TURNED * number)

    def entered(self, matrices: Matrices) -> tuple[_Passes, _Passes]:
        """Codes of an input over its features, and over its tokens for the weight gradients."""
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
    again: bool = False,
) -> tuple[float, float, float]:
    """Seconds of products, of their input gradients and of their weight gradients.

    `form` is the plan's; `coded`: weights are codes. If the layer runs `again` in its backward, codes for weight
    gradients count there.
    """
    forward_s = input_s = weight_s = 0.0
    item, own = FORMATS[compute].element_bytes, _Form.of(device, compute, form)
    for matrices in products:
        m, k, n, number = matrices[:4]
        tokens, weights, results = number * m * k, k * n, m * n
        entered, kept = own.entered(matrices)
        to_weights = again or matrices.returns
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
    """Kernels that the host launches to quantise the operands of a forward, and inputs for its backward."""
    by_row, found = scales_rows(form), 0
    for each in products:
        found += 0 if coded else _CODES * each.number
        if not each.is_entered:
            found += _CODES + (0 if each.returns else _TRANSPOSED if by_row else _TURNED)
    return found


def launches(products: Sequence[Matrices], of_a_layer: int, form: str, coded: bool = False) -> float:
    """Kernels that the host launches for a layer, over those of the layer without quantisations."""
    return 1 + quantisations(products, form, coded) / of_a_layer


def product_s(device: Device, m: int, k: int, n: int, compute: str) -> float:
    """Seconds of a product of (m, k) and (k, n) that are codes already, with a result in the compute dtype."""
    if device.backend == "cpu":
        return gemm_s(device, m, k, n, 1, "fp32")
    compute_s = 2.0 * m * k * n / (peak_flops_per_s(device, "fp8") * fp8_share(device, m, k, n) * device.pace)
    moved = m * k + k * n + FORMATS[compute].element_bytes * m * n
    return max(compute_s, stream_s(device, moved, 0)) + device.kernels.launch_s


def _passes_s(device: Device, passes: _Passes, read_bytes: float) -> float:
    return memory_s(device, passes.num_bytes + read_bytes, passes.kernels)
