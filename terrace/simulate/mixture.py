"""Seconds of a mixture of experts (terrace.model.experts.mixture): router, gate, rows, products, sums; no shared MLP.

With T tokens that a rank routes (tensor rows share its tokens), hidden size H, E experts of inner size I, k experts a
token, N = T k rows, e bytes an element of the compute dtype and w of the router's (fp32, or fp64 as the compute dtype),
passes over memory are

    forward    router (e + w)HT, gate (3w + 8)ET, order 64N, spread 2eHN, activation 3eIN, weights 2eIN,
               collect 3eHN + eHT
    backward   router (e + w)HT, gate 4wET, spread 3eHN + eHT, activation 5eIN, weights 6eIN, collect 2eHN,
               sum of the tokens' gradients 3eHT
    biases     2eON forward and eON backward, of O outputs each

Each expert runs its own products over its rows. Load is assumed to be even: N/E rows per expert, rounded up or down. A
skewed load multiplies as many rows and changes only the shapes of products. Every rank holds all experts; tensor ranks
do not cut them. With `Work.products` products are priced by terrace.simulate.scaled, one expert at a time, and each
result is copied into the rows of all experts.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from terrace.cluster.cluster import Device
from terrace.model.experts.config import ExpertsConfig
from terrace.model.operations import Activation, Mixture, Product
from terrace.plan.dims import rank_numel
from terrace.plan.wire import FORMATS
from terrace.simulate.kernels import gemm_s, memory_s, stream_s
from terrace.simulate.scaled import Matrices, quantisations, scaled_seconds

if TYPE_CHECKING:
    from terrace.simulate.work import Work

Seconds = tuple[float, float, float]  # of the forward, of input gradients, of weight gradients
_INDEX_BYTES = (
    64  # a row: its choice, its place in the sorted rows and the count of its expert, int64, read and written
)
# Operators that a forward launches, counted on the decoder: of a dense layer, and added by a mixture without the
# products of experts.
LAYER_OPERATORS, _MIXTURE_OPERATORS = 38, 20
_PASSED_OPERATORS = 14  # of these, the ones between dispatch and combine


class Held(NamedTuple):
    """A rank's share of a mixture's experts: 1 / `units` of the experts, and 1 / `rows` of each."""

    units: int = 1
    rows: int = 1


_ALL = Held()


def mixture_seconds(device: Device, work: "Work", mixture: Mixture, accumulate: bool) -> Seconds:
    """Seconds of a mixture's kernels with all experts on a rank; `accumulate` as in terrace.simulate.layers."""
    wide, hidden = router_dtype(work.compute), mixture.hidden.numel
    products = [(wide, 1, work.routed, inputs, outputs) for inputs, outputs in router_products(mixture.experts, hidden)]
    found = _with_products(device, work.compute, _passes(device, work, mixture), products, accumulate)
    found = _sum(found, gate_seconds(device, work, mixture, accumulate))
    return _sum(found, passed_seconds(device, work, mixture, work.routed, accumulate))


def gate_seconds(device: Device, work: "Work", mixture: Mixture, accumulate: bool) -> Seconds:
    """Seconds of the shared expert's gate product, if any; it stays in the compute dtype."""
    products = [
        (work.compute, 1, work.stream_tokens, gate.inputs.numel, gate.outputs.numel) for gate in mixture.shared_gate
    ]
    return _with_products(device, work.compute, (0.0, 0.0), products, accumulate)


def passed_seconds(
    device: Device, work: "Work", mixture: Mixture, tokens: int, accumulate: bool, held: Held = _ALL
) -> Seconds:
    """Seconds between dispatch and combine of `tokens`: order, spread, products, activation, weights, collect."""
    recomputed = work.recompute == "full"
    return _passed_seconds(device, mixture, held, work.compute, tokens, accumulate, work.products, recomputed)


@lru_cache(maxsize=65536)
def _passed_seconds(
    device: Device,
    mixture: Mixture,
    held: Held,
    compute: str,
    tokens: int,
    accumulate: bool,
    scaled: str | None,
    recomputed: bool,
) -> Seconds:
    hidden, item = mixture.hidden.numel, FORMATS[compute].element_bytes
    rows, inner = tokens * mixture.experts.per_token, 0
    # Spread, multiplication by weights, and collect; activations cost as those of an MLP.
    forward = _INDEX_BYTES + 5 * item * hidden
    backward = 5 * item * hidden
    for operation in mixture.each:
        if isinstance(operation, Activation):
            inner = rank_numel(operation.target.features, {"rows": held.rows})
            operands = len(operation.reads)
            forward += (operands + 1 + 2) * item * inner
            backward += (2 * operands + 1 + 6) * item * inner
        elif isinstance(operation, Product) and operation.has_bias:  # added in place
            outputs = rank_numel(operation.outputs, {"rows": held.rows})
            forward += 2 * item * outputs
            backward += item * outputs
    token = item * hidden * tokens
    passes_s = (
        memory_s(device, forward * rows + token, _PASSED_OPERATORS),
        memory_s(device, backward * rows + token, _PASSED_OPERATORS),
    )
    loads = even_loads(tokens, mixture.experts, held.units)
    if scaled is not None:
        return _with_scaled(device, compute, passes_s, mixture, held, loads, accumulate, scaled, recomputed)
    products = [
        (compute, count, each, matrices.inputs, matrices.outputs)
        for count, each in loads
        for matrices in _matrices(mixture, each, held)
    ]
    return _with_products(device, compute, passes_s, products, accumulate)


def _with_scaled(
    device: Device,
    compute: str,
    passes_s: tuple[float, float],
    mixture: Mixture,
    held: Held,
    loads: Iterable[tuple[int, int]],
    accumulate: bool,
    scaled: str,
    recomputed: bool,
) -> Seconds:
    """Seconds of the experts' compute with 8-bit products, one expert at a time, plus copies of their results."""
    item = FORMATS[compute].element_bytes
    found: Seconds = (*passes_s, 0.0)
    for count, each in loads:
        matrices = _matrices(mixture, each, held)
        number, weights = len(matrices), sum(one.inputs * one.outputs for one in matrices)
        own = scaled_seconds(device, matrices, compute, scaled, accumulate=accumulate, recomputed=recomputed)
        widths = sum(one.outputs for one in matrices), sum(one.inputs for one in matrices)
        copied_s, copied_back_s = (stream_s(device, 2 * item * each * width, number) for width in widths)
        added_s = stream_s(device, 3 * item * weights, number) if accumulate else 0.0
        own = _sum(own, (copied_s, copied_back_s, added_s))
        found = _sum(found, (count * own[0], count * own[1], count * own[2]))
    return found


def _matrices(mixture: Mixture, rows: int, held: Held = _ALL) -> list[Matrices]:
    """The products of an expert; products that read the same rows quantise them once."""
    found, entered = list[Matrices](), set[str]()
    for operation in mixture.each:
        if isinstance(operation, Product):
            source = operation.source.name
            inputs, outputs = (rank_numel(dim, {"rows": held.rows}) for dim in (operation.inputs, operation.outputs))
            found.append(Matrices(rows, inputs, outputs, 1, is_entered=source in entered))
            entered.add(source)
    return found


def _sum(one: Seconds, other: Seconds) -> Seconds:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def _with_products(
    device: Device,
    compute: str,
    passes_s: tuple[float, float],
    products: Iterable[tuple[str, int, int, int, int]],  # dtype, number, rows of each, inputs, outputs
    accumulate: bool,
) -> Seconds:
    (forward_s, input_s), weight_s = passes_s, 0.0
    for dtype, count, m, k, n in products:
        forward_s += count * gemm_s(device, m, k, n, 1, dtype)
        input_s += count * gemm_s(device, m, n, k, 1, dtype)
        weight_s += count * gemm_s(device, k, m, n, 1, dtype)
        if accumulate:
            weight_s += stream_s(device, 3 * FORMATS[compute].element_bytes * count * k * n, count)
    return forward_s, input_s, weight_s


def router_products(experts: ExpertsConfig, hidden: int) -> list[tuple[int, int]]:
    """(Inputs, outputs) of the matrices of a router."""
    if experts.gate == "cosine":
        return [(hidden, experts.router_size), (experts.router_size, experts.num_experts)]
    return [(hidden, experts.num_experts)] * (2 if experts.gate == "noisy" else 1)


def even_loads(tokens: int, experts: ExpertsConfig, units: int = 1) -> list[tuple[int, int]]:
    """(Number of experts, rows of each) for experts with rows, under an even load of `tokens` on 1 / `units` of
    them.
    """
    number = experts.num_experts // units
    fewer, more = divmod(tokens * experts.per_token, number)
    loads = [(more, fewer + 1), (number - more, fewer)]
    return [(count, rows) for count, rows in loads if count and rows]


def router_dtype(compute: str) -> str:
    """The dtype of scores: fp32 at least."""
    return "fp64" if compute == "fp64" else "fp32"


class Divided(NamedTuple):
    """Corrections for a layer whose experts are on several ranks.

    Extra seconds of its passes, without messages, relative to all experts on one rank (may be negative); and kernel
    launches relative to a dense layer.
    """

    forward_s: float
    input_s: float
    weight_s: float
    launches: float


def launches(work: "Work", mixture: Mixture, held: Held = _ALL, pieces: Mapping[int, int] | None = None) -> float:
    """Kernel launches of a layer with a mixture, relative to a dense layer.

    `held`: a rank's share of the experts. `pieces`: number of pieces by size in tokens, if rows pass in several.
    """
    matrices = _matrices(mixture, 1)
    # In 8 bits the operands of products are quantised, and a result is copied into its rows.
    each = len(matrices)
    if work.products is not None:
        each = 2 * each + quantisations(matrices, work.products)
    pieces = {work.routed: 1} if pieces is None else pieces
    loads = ((times, even_loads(size, mixture.experts, held.units)) for size, times in pieces.items())
    products = sum(times * sum(count for count, _ in each_load) for times, each_load in loads)
    others = _MIXTURE_OPERATORS + (sum(pieces.values()) - 1) * _PASSED_OPERATORS
    return 1 + (others + each * products) / LAYER_OPERATORS


def _passes(device: Device, work: "Work", mixture: Mixture) -> tuple[float, float]:
    item, wide = FORMATS[work.compute].element_bytes, FORMATS[router_dtype(work.compute)].element_bytes
    tokens, hidden, experts = work.routed, mixture.hidden.numel, mixture.experts
    scores = tokens * experts.num_experts
    router = (item + wide) * hidden * tokens if wide > item else 0
    # A sort by score keeps values and indices. A bias, and groups, are further passes over the scores.
    gate = (3 * wide + 8 + (2 * wide if experts.biased else 0) + (3 * wide if experts.num_groups > 1 else 0)) * scores
    token = item * hidden * tokens
    forward: float = router + gate
    backward: float = router + 4 * wide * scores + 3 * token
    num_kernels = _MIXTURE_OPERATORS - _PASSED_OPERATORS
    if mixture.shared:  # is added; a gate of its own multiplies it before
        gates = len(mixture.shared_gate)
        stream = item * hidden * work.stream_tokens
        forward += (3 + 2 * gates) * stream
        backward += (3 + 9 * gates) * stream
        num_kernels += 1 + gates
    return memory_s(device, forward, num_kernels), memory_s(device, backward, num_kernels)
