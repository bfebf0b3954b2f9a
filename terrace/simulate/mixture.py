"""Seconds of a mixture of experts (terrace.model.experts.mixture): router, gate, rows, products, sums; no shared MLP.

With T tokens that a rank routes (tensor rows share its tokens), hidden size H, E experts of inner size I, k experts a
token, N = T k rows, e bytes an element of the compute dtype and w of the router's (fp32, or fp64 as the compute dtype),
passes over memory are

    forward    router (e + w)HT, gate (3w + 8)ET, order 64N, spread 2eHN, activation 3eIN, weights 2eIN,
               collect 3eHN + eHT
    backward   router (e + w)HT, gate 4wET, spread 3eHN + eHT, activation 5eIN, weights 6eIN, collect 2eHN,
               sum of the tokens' gradients 3eHT

An expert's products are products of its own, over its rows. Load is taken to be even: N rows are N/E an expert, rounded
up for some and down for others. A skewed load multiplies as many rows and changes the shapes of products alone. Every
rank holds all experts; tensor ranks do not cut them. With `Work.products` they are those of terrace.simulate.scaled,
one expert after the other, and each result is copied into the rows of all.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from terrace.cluster.cluster import Device
from terrace.model.experts.config import ExpertsConfig
from terrace.plan.wire import FORMATS
from terrace.simulate.kernels import gemm_s, memory_s, stream_s
from terrace.simulate.scaled import Matrices, quantisations, scaled_seconds

if TYPE_CHECKING:
    from terrace.simulate.work import Work

Seconds = tuple[float, float, float]  # of the forward, of input gradients, of weight gradients
_INDEX_BYTES = (
    64  # a row: its choice, its place in the sorted rows and the count of its expert, int64, read and written
)
# Operators that a forward launches, counted on the decoder: of a dense layer, and what a mixture adds to it, but for
# the products of experts.
LAYER_OPERATORS, _MIXTURE_OPERATORS = 38, 20
_PASSED_OPERATORS = 14  # of these, the ones between dispatch and combine


def mixture_seconds(
    device: Device, work: "Work", experts: ExpertsConfig, accumulate: bool, divided: "Divided | None" = None
) -> tuple[Seconds, float]:
    """Seconds of a mixture's kernels, and `launches` with them; `accumulate` as in terrace.simulate.layers."""
    hidden, tokens, wide = work.model.hidden_size, work.routed, router_dtype(work.compute)
    products = [(wide, 1, tokens, inputs, outputs) for inputs, outputs in router_products(experts, hidden)]
    if experts.shared_gate:
        products.append((work.compute, 1, work.stream_tokens, hidden, 1))
    seconds = _with_products(device, work.compute, _passes(device, work, experts), products, accumulate)
    passed = passed_seconds(device, work, experts, tokens, accumulate)
    *changes, launched = divided or (0.0, 0.0, 0.0, launches(work, experts))
    forward_s, input_s, weight_s = map(sum, zip(seconds, passed, changes, strict=True))
    return (forward_s, input_s, weight_s), launched


def passed_seconds(device: Device, work: "Work", experts: ExpertsConfig, tokens: int, accumulate: bool) -> Seconds:
    """Seconds of `tokens` that pass their experts: order, spread, products, activation, weights, collect."""
    hidden, again = work.model.hidden_size, work.recompute == "full"
    return _passed_seconds(device, hidden, work.compute, experts, tokens, accumulate, work.products, again)


@lru_cache(maxsize=65536)
def _passed_seconds(
    device: Device,
    hidden: int,
    compute: str,
    experts: ExpertsConfig,
    tokens: int,
    accumulate: bool,
    scaled: str | None = None,
    again: bool = False,
) -> Seconds:
    inner, item = experts.intermediate_size, FORMATS[compute].element_bytes
    products = []
    for count, each in even_loads(tokens, experts):
        products += [(compute, 2 * count, each, hidden, inner), (compute, count, each, inner, hidden)]
    rows, token = tokens * experts.per_token, item * hidden * tokens
    forward = (_INDEX_BYTES + 5 * item * hidden + 5 * item * inner) * rows + token
    backward = (5 * item * hidden + 11 * item * inner) * rows + token
    passes_s = memory_s(device, forward, _PASSED_OPERATORS), memory_s(device, backward, _PASSED_OPERATORS)
    if scaled is not None:
        return _with_scaled(device, compute, passes_s, experts, hidden, tokens, accumulate, scaled, again)
    return _with_products(device, compute, passes_s, products, accumulate)


def shared_seconds(device: Device, work: "Work", experts: ExpertsConfig, accumulate: bool) -> Seconds:
    """Seconds of the shared expert of every token, an MLP, and of its gate."""
    hidden, inner, tokens = work.model.hidden_size, experts.shared_size, work.stream_tokens
    if not inner:
        return 0.0, 0.0, 0.0
    gated = work.model.gated_mlp
    outputs = 2 * inner if gated else inner
    products = [(work.compute, 1, tokens, hidden, outputs), (work.compute, 1, tokens, inner, hidden)]
    if experts.shared_gate:
        products.append((work.compute, 1, tokens, hidden, 1))
    size = FORMATS[work.compute].element_bytes * inner * tokens
    forward_s, backward_s = (memory_s(device, each * size) for each in ((3, 5) if gated else (2, 3)))
    if work.products is None:
        return _with_products(device, work.compute, (forward_s, backward_s), products, accumulate)
    # The gate of the shared expert keeps its dtype.
    found = _with_products(device, work.compute, (forward_s, backward_s), products[2:], accumulate)
    matrices = [Matrices(tokens, hidden, outputs, 2 if gated else 1), Matrices(tokens, inner, hidden, 1)]
    forward_s, input_s, weight_s = scaled_seconds(
        device,
        matrices,
        work.compute,
        work.products,
        work.codes_of_weights,
        accumulate=accumulate,
        again=work.recompute == "full",
    )
    if accumulate:
        weight_s += stream_s(device, 3 * FORMATS[work.compute].element_bytes * (outputs + inner) * hidden, 2)
    return _sum(found, (forward_s, input_s, weight_s))


def _with_scaled(
    device: Device,
    compute: str,
    passes_s: tuple[float, float],
    experts: ExpertsConfig,
    hidden: int,
    tokens: int,
    accumulate: bool,
    scaled: str,
    again: bool,
) -> Seconds:
    """Seconds of the experts' computing with products in 8 bits: those of every expert by themselves, and a copy of
    their results into the rows of all.
    """
    inner, item = experts.intermediate_size, FORMATS[compute].element_bytes
    found: Seconds = (*passes_s, 0.0)
    for count, each in even_loads(tokens, experts):
        matrices = _matrices(each, hidden, inner)
        seconds = scaled_seconds(device, matrices, compute, scaled, accumulate=accumulate, again=again)
        copied = [stream_s(device, 2 * item * each * width, 3) for width in (2 * inner + hidden, 2 * hidden + inner)]
        own = seconds[0] + copied[0], seconds[1] + copied[1], seconds[2]
        if accumulate:
            weights = 3 * hidden * inner
            own = own[0], own[1], own[2] + stream_s(device, 3 * item * weights, 3)
        found = _sum(found, (count * own[0], count * own[1], count * own[2]))
    return found


def _matrices(rows: int, hidden: int, inner: int) -> list[Matrices]:
    """Gate, up and down of an expert."""
    entering = Matrices(rows, hidden, inner, 1)
    return [entering, entering._replace(is_entered=True), Matrices(rows, inner, hidden, 1)]


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


def even_loads(tokens: int, experts: ExpertsConfig) -> list[tuple[int, int]]:
    """(Number of experts, rows of each) of experts with any row, for an even load of `tokens`."""
    fewer, more = divmod(tokens * experts.per_token, experts.num_experts)
    loads = [(more, fewer + 1), (experts.num_experts - more, fewer)]
    return [(count, rows) for count, rows in loads if count and rows]


def router_dtype(compute: str) -> str:
    """The dtype of scores: fp32 at least."""
    return "fp64" if compute == "fp64" else "fp32"


class Divided(NamedTuple):
    """Changes in a layer whose experts are on several ranks.

    Seconds of its passes, messages aside, more or fewer than with all experts on one rank; and the kernels that the
    host launches, over those of a dense layer.
    """

    forward_s: float
    input_s: float
    weight_s: float
    launches: float


def launches(work: "Work", held: ExpertsConfig, pieces: Mapping[int, int] | None = None) -> float:
    """Kernels that the host launches for a layer with a mixture, over those of a dense layer.

    `held` are the experts of a rank; `pieces` the numbers of pieces by tokens in which rows pass them, if not at once.
    """
    # Gate, up and down; in 8 bits their operands are quantised, and a result is copied into its rows.
    each = 3 if work.products is None else 2 * 3 + quantisations(_matrices(1, 1, 1), work.products)
    pieces = {work.routed: 1} if pieces is None else pieces
    products = sum(times * sum(count for count, _ in even_loads(size, held)) for size, times in pieces.items())
    others = _MIXTURE_OPERATORS + (sum(pieces.values()) - 1) * _PASSED_OPERATORS
    return 1 + (others + each * products) / LAYER_OPERATORS


def _passes(device: Device, work: "Work", experts: ExpertsConfig) -> tuple[float, float]:
    item, wide = FORMATS[work.compute].element_bytes, FORMATS[router_dtype(work.compute)].element_bytes
    tokens, hidden = work.routed, work.model.hidden_size
    scores = tokens * experts.num_experts
    router = (item + wide) * hidden * tokens if wide > item else 0
    # A sort by score keeps values and indices. A bias, and groups, are further passes over the scores.
    gate = (3 * wide + 8 + (2 * wide if experts.biased else 0) + (3 * wide if experts.num_groups > 1 else 0)) * scores
    token = item * hidden * tokens
    forward: float = router + gate
    backward: float = router + 4 * wide * scores + 3 * token
    num_kernels = _MIXTURE_OPERATORS - _PASSED_OPERATORS
    if experts.shared_size:  # is added; a gate of its own multiplies it before
        gated = 1 if experts.shared_gate else 0
        stream = item * hidden * work.stream_tokens
        forward += (3 + 2 * gated) * stream
        backward += (3 + 9 * gated) * stream
        num_kernels += 1 + gated
    return memory_s(device, forward, num_kernels), memory_s(device, backward, num_kernels)
