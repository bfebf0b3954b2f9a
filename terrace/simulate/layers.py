"""Seconds of a block on a micro-batch, and seconds of an optimizer step.

A block is priced operation by operation, kernel by kernel (`terrace.simulate.kernels`): its matrix products, with those
of a group merged; its attention core, summed over the rounds of a ring and with the heads of a Ulysses rank; the passes
over memory between them (terrace.simulate.passes); and what a rule by type adds. Widths are those of a rank
(`Work.width`): tensor rows cut heads and the inner size of the MLP, columns the residual stream. With `work.products`
the products of a layer are priced by terrace.simulate.scaled. In a layer with a mixture of experts the shared expert,
if any, replaces the MLP, and the mixture is added (`terrace.simulate.mixture`). A block that only declares its
parameters is priced as the chain of all its matrix products, each shared evenly by tensor ranks. Messages are priced in
`terrace.simulate.inside`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from terrace.cluster.cluster import Device
from terrace.cluster.software import OWN
from terrace.model import operations as ops
from terrace.model.loss_chunks import chunk_rows
from terrace.plan.recompute import operations_named
from terrace.plan.state_formats import BLOCK_STATES, element_bytes
from terrace.plan.wire import FORMATS
from terrace.sequence.lengths import WHOLE_ROWS
from terrace.simulate.as_software import casts, core_more_s, layer_more_s, loss_passes_s, saved_s, scaled_s
from terrace.simulate.delta import delta_seconds
from terrace.simulate.kernels import attention_s, gemm_s, memory_s, stream_s
from terrace.simulate.masks import core_keys, core_shares, spread_kernel, work_in
from terrace.simulate.mixture import LAYER_OPERATORS, Divided, Seconds, gate_seconds, launches, mixture_seconds
from terrace.simulate.passes import joined, pass_seconds, recompute_s
from terrace.simulate.scaled import Matrices, scaled_seconds
from terrace.simulate.scaled import launches as scaled_launches
from terrace.simulate.scores import scores_s
from terrace.simulate.work import Work

if TYPE_CHECKING:
    from terrace.model.spec import BlockSpec

# Cross-entropy passes over bf16 logits in fp32 (cast, maximum, exponent and sum; backward, softmax and cast).
LOGIT_BYTES = 26
# Adam in mixed precision: moments, master copy and gradient read and written, norm and clipping included.
_OPTIMIZER_BYTES = 44
# Bytes per element of a state that rounding reads and writes: random bits (64 for four elements) and their addition;
# for codes also lookup, scales, and the search of the nearest point. The step then works on fp32 copies, 8 bytes. On a
# CPU all of it stays in a cache, where it takes about half as long (measured on one core: 4 ns an element for two
# states in bf16, 21 in 8 bits, 2 for parameters in bf16).
_ROUNDING_BYTES = 110
_BLOCK_CODE_BYTES = 175
_IN_CACHE = 0.5


@dataclass(frozen=True, kw_only=True)
class BlockSeconds:
    """Seconds of one block on one micro-batch; `recompute_s` is recomputation.

    `input_s` is the gradient of the input, which the previous block waits for; `weight_s` the gradient of the weights,
    which only the reduction waits for.
    """

    forward_s: float
    input_s: float
    weight_s: float
    recompute_s: float = 0.0
    saved_s: float = 0.0  # of the forward, that recomputing the whole block leaves out

    @property
    def backward_s(self) -> float:
        """Seconds of both gradients and of recomputation."""
        return self.input_s + self.weight_s + self.recompute_s

    def longer(self, forward_s: float, input_s: float, weight_s: float) -> "BlockSeconds":
        """Add seconds, possibly negative, to each part."""
        return replace(
            self,
            forward_s=self.forward_s + forward_s,
            input_s=self.input_s + input_s,
            weight_s=self.weight_s + weight_s,
        )


def seconds_of(
    device: Device, work: Work, block: "BlockSpec", *, accumulate: bool = False, divided: Divided | None = None
) -> BlockSeconds:
    """Seconds of a block on a micro-batch; `accumulate` and `divided` as in `block_seconds`."""
    if not block.declared.each:
        return block_seconds(device, replace(work, layer=block.operations), accumulate=accumulate)
    return block_seconds(device, work_in(work, block, device.type), accumulate=accumulate, divided=divided)


def block_seconds(
    device: Device, work: Work, *, accumulate: bool = False, divided: Divided | None = None
) -> BlockSeconds:
    """Seconds of `work.layer` on a micro-batch.

    `accumulate`: the weight gradient is added to an existing one, which costs another read and write. `divided`: the
    corrections where its experts are on several ranks. Raises `ClusterError` for a dtype without a peak.
    """
    return _block_seconds(device, work, accumulate, divided)


@lru_cache(maxsize=65536)
def _block_seconds(device: Device, work: Work, accumulate: bool, divided: Divided | None) -> BlockSeconds:
    layer = work.layer
    forward_s, input_s, weight_s = _folded(device, work, accumulate)
    if divided is not None:
        forward_s, input_s, weight_s = _sum((forward_s, input_s, weight_s), divided[:3])
    if device.software != OWN:
        forward_s, input_s, weight_s = _sum((forward_s, input_s, weight_s), layer_more_s(device, work))
    if layer.core.heads or layer.delta.heads:
        # A small layer is bound by kernel launches on the host.
        host_s = device.kernels.host_layer_s * _launches(device, work, divided)
        forward_s, input_s, weight_s = _host_bound(forward_s, input_s, weight_s, host_s)
    measured_s = scores_s(device, work)
    forward_s, saved = forward_s + measured_s, saved_s(device, work) + measured_s
    if work.recompute != "full":
        recompute_s = operation_seconds(device, work, work.operations) if work.operations else 0.0
    else:
        # Look-ups are not computed again, and a loss runs in the backward alone.
        at_end = not layer.core.heads and any(
            isinstance(operation, ops.LookUp | ops.Loss | ops.Score) for operation in layer
        )
        recompute_s = 0.0 if at_end else forward_s - saved
    return BlockSeconds(forward_s=forward_s, input_s=input_s, weight_s=weight_s, recompute_s=recompute_s, saved_s=saved)


def _folded(device: Device, work: Work, accumulate: bool) -> Seconds:
    found = _products_seconds(device, work, accumulate)
    for operation in work.layer.passed:
        found = _sum(found, _RULES[type(operation)](device, work, operation, accumulate))
    return _sum(found, (*pass_seconds(device, work), 0.0))


def _sum(one: Seconds, other: Seconds) -> Seconds:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def shared_seconds(device: Device, work: Work, accumulate: bool) -> Seconds:
    """Seconds of a mixture's shared expert (an MLP over all tokens) and its gate."""
    mixture = work.layer.mixture
    own = _folded(device, replace(work, layer=ops.Operations(mixture.shared)), accumulate)
    return _sum(own, gate_seconds(device, work, mixture, accumulate))


def _host_bound(forward_s: float, input_s: float, weight_s: float, host_s: float) -> Seconds:
    # The bound is on the whole backward, so both parts are scaled equally.
    slower = max(1.0, host_s / (input_s + weight_s))
    return max(forward_s, host_s), input_s * slower, weight_s * slower


def _launches(device: Device, work: Work, divided: Divided | None) -> float:
    """Kernel launches of a layer relative to a dense layer without quantisation."""
    found = 1.0
    if work.products is not None and device.software.kernels.scales:
        found += casts(device, joined(work.layer), work.layer) / LAYER_OPERATORS
    elif work.products is not None:
        found = scaled_launches(matrices_of(work), LAYER_OPERATORS, work.products, work.codes_of_weights)
    if divided is not None:
        return found * divided.launches
    return found * launches(work, work.layer.mixture) if work.layer.mixture.each else found


def layer_products(work: Work) -> tuple[tuple[int, int, int], ...]:
    """(Tokens, inputs, outputs) of the products of `work.layer` on a rank; a group is one product."""
    return tuple(
        (
            work.tokens_of(group[0].source.tokens),
            work.width(group[0].inputs),
            sum([work.width(product.outputs) for product in group]),
        )
        for group in joined(work.layer)
    )


def matrices_of(work: Work) -> list[Matrices]:
    """The products of `work.layer` on a rank; a group is one entry."""
    # Inputs that are gathered, or computed, again for the backward (terrace.runtime.pages).
    gathered = work.sequence_parallel and work.rows > 1 and work.recompute != "full"
    again = {operation.target.name for name in work.operations for operation in operations_named(work.layer, name)}
    for operation in work.layer.passed:
        if isinstance(operation, ops.Enter) and (gathered or operation.source.name in again):
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


def _products_seconds(device: Device, work: Work, accumulate: bool) -> Seconds:
    products = layer_products(work)
    if work.products is None:
        found = _gemms_seconds(device, products, work.compute)
    elif device.software.kernels.scales:
        found = scaled_s(device, work, joined(work.layer), products)
    else:
        recomputed, coded = work.recompute == "full", work.codes_of_weights
        found = scaled_seconds(
            device, matrices_of(work), work.compute, work.products, coded, accumulate=accumulate, recomputed=recomputed
        )
    # Later micro-batches accumulate their weight gradients.
    weights = sum(k * n for _, k, n in products)
    return _sum(found, (0.0, 0.0, _accumulation_s(device, work, weights, len(products), accumulate)))


@lru_cache(maxsize=65536)
def _gemms_seconds(device: Device, products: tuple[tuple[int, int, int], ...], dtype: str) -> Seconds:
    """Seconds of products and both their gradients; independent of how context ranks split the tokens."""
    forward_s = sum(gemm_s(device, m, k, n, 1, dtype) for m, k, n in products)
    input_s = sum(gemm_s(device, m, n, k, 1, dtype) for m, k, n in products)
    weight_s = sum(gemm_s(device, k, m, n, 1, dtype) for m, k, n in products)
    return forward_s, input_s, weight_s


def _accumulation_s(device: Device, work: Work, num_weights: int, num_kernels: int, accumulate: bool) -> float:
    num_bytes = 3 * FORMATS[work.compute].element_bytes * num_weights
    return stream_s(device, num_bytes, num_kernels) if accumulate else 0.0


@lru_cache(maxsize=65536)
def core_rounds(device: Device, work: Work) -> tuple[tuple[float, float], tuple[float, float]]:
    """(Forward, backward) seconds of a layer's attention: for the first round of a ring, and for every later one.

    Rows hold one document each, or documents of known lengths (`core_shares`), of which the slowest rank's count, under
    `balance = "cost"` in one round. Without a window every round has equally many products, as a ring rank holds one
    early and one late chunk: the first round computes a causal square over both, later ones half of the full square,
    and add results to earlier ones. With a window nearly all products are in the first rounds: the first counts all.
    """
    core = work.layer.core
    if not core.heads:
        return (0.0, 0.0), (0.0, 0.0)
    shares = core_shares(device, work)
    if work.ragged.lengths and work.balance == "cost":
        own, _ = core_rounds(device, replace(work, ring=1, balance="tokens", ragged=WHOLE_ROWS))
        return (shares.slowest / work.ring * own[0], shares.slowest / work.ring * own[1]), (0.0, 0.0)
    keys, causal = core_keys(work, device.type)
    kernel = spread_kernel(work) if work.is_spread else work.kernel_on(device.type)
    queries = math.ceil(work.attended / work.micro_batch)  # tokens of one row on this rank
    windowed = 0 < core.window < work.sequence
    whole = attention_s(
        device,
        batch=work.micro_batch,
        heads=work.attended_heads,
        queries=queries,
        keys=keys if work.ring == 1 or windowed else queries,
        head_dim=core.head_dim,
        flash=work.flash,
        causal=causal,
        dtype=work.compute,
        kernel=kernel,
        capped=core.cap > 0,
    )
    first = whole[0] * shares.own[0], whole[1] * shares.own[1]
    if work.ring == 1:
        return first, (0.0, 0.0)
    row = work.attended * FORMATS[work.compute].element_bytes * core.head_dim  # bytes of a head
    outputs_s = memory_s(device, 3 * row * work.attended_heads)
    sums_s = memory_s(device, 3 * row * (work.attended_heads + 2 * work.attended_kv_heads), 3)
    later = (0.0, 0.0) if windowed else (whole[0] * shares.later[0], whole[1] * shares.later[1])
    return first, (later[0] + outputs_s, later[1] + sums_s)


@lru_cache(maxsize=65536)
def operation_seconds(device: Device, work: Work, operations: tuple[str, ...]) -> float:
    """Seconds to recompute a layer's operations (terrace.plan.recompute) in its backward.

    Attention is its core; the activation of an MLP and the norms are passes over memory.
    """
    found = 0.0
    for name in operations:
        named = operations_named(work.layer, name)
        is_core = any(isinstance(operation, ops.Core) for operation in named)
        found += _core(device, work, None, False)[0] if is_core else recompute_s(device, work, named)
        found += core_more_s(device, work)[0] if is_core else 0.0
    return found


def _core(device: Device, work: Work, core: ops.Core | None, accumulate: bool) -> Seconds:
    first, later = core_rounds(device, work)
    return first[0] + (work.ring - 1) * later[0], first[1] + (work.ring - 1) * later[1], 0.0


def _plain_product(device: Device, work: Work, product: ops.PlainProduct, accumulate: bool) -> Seconds:
    shape = work.tokens, product.source.features.numel, math.ceil(product.target.features.numel / work.tensor)
    found = _gemms_seconds(device, (shape,), work.compute)
    return _sum(found, (0.0, 0.0, _accumulation_s(device, work, shape[1] * shape[2], 1, accumulate)))


def _look_up(device: Device, work: Work, look_up: ops.LookUp, accumulate: bool) -> Seconds:
    hidden, item = look_up.target.features.numel, FORMATS[work.compute].element_bytes
    row = item * hidden
    rows = work.tokens * (2 + (2 if look_up.positions or look_up.factor != 1.0 else 0)) * row
    # The gradient is dense: zeros for the whole matrix, to which the rows are added.
    weights = math.ceil(look_up.vocabulary / work.tensor) * hidden
    weight_s = memory_s(device, item * weights + rows + work.tokens * row, 2)
    return memory_s(device, rows, 1), 0.0, weight_s + _accumulation_s(device, work, weights, 1, accumulate)


def _loss(device: Device, work: Work, loss: ops.Loss, accumulate: bool) -> Seconds:
    item, tokens = FORMATS[work.compute].element_bytes, loss.depths * work.tokens
    # The hidden size is whole: tensor columns cut the vocabulary, too.
    words, hidden = math.ceil(loss.vocabulary / work.tensor), loss.source.features.units
    if loss.only_reads:
        return memory_s(device, 2 * item * tokens * hidden, 1), 0.0, 0.0
    logits = LOGIT_BYTES * item / 2 * tokens * words / 2  # each way
    if loss.cap:
        logits += 4 * item * tokens * words  # the cap and its slopes, read and written
    products = _gemms_seconds(device, ((tokens, hidden, words),), work.compute)
    # Tensor ranks that do not keep their logits compute them again (terrace.runtime.tensor.loss).
    keeps_none = loss.beside > 0 or tokens > chunk_rows(words, device.type)
    recomputed_products_s = products[0] if work.tensor > 1 and keeps_none else 0.0
    own_s, more_s = memory_s(device, logits, 3), _accumulation_s(device, work, words * hidden, 1, accumulate)
    passes_s, passes_back_s = loss_passes_s(device, work, tokens * words, own_s)
    beside_s = 0.0
    if loss.beside:
        # Another model's logits are computed with the student's, and again where these are; both are read as often.
        beside_s = gemm_s(device, tokens, loss.beside, words, 1, work.compute) + passes_s + passes_back_s
        recomputed_products_s *= 1 + loss.beside / hidden
    return _sum(products, (passes_s + beside_s, passes_back_s + recomputed_products_s, more_s))


def _score(device: Device, work: Work, score: ops.Score, accumulate: bool) -> Seconds:
    # A product with one output is bound by reading the residual stream.
    hidden = score.source.features.numel
    stream = FORMATS[work.compute].element_bytes * work.tokens * hidden
    more_s = _accumulation_s(device, work, hidden, 1, accumulate)
    return memory_s(device, stream, 2), memory_s(device, stream, 2), memory_s(device, stream, 1) + more_s


def _elsewhere(device: Device, work: Work, operation: ops.Operation, accumulate: bool) -> Seconds:
    return 0.0, 0.0, 0.0


# Costs by type, besides products (priced in groups) and passes over memory.
_RULES: Mapping[type[ops.Operation], Callable[[Device, Work, Any, bool], Seconds]] = {
    **dict.fromkeys(
        (
            ops.Enter,
            ops.Product,
            ops.Norm,
            ops.Rotary,
            ops.Join,
            ops.Scale,
            ops.Convolution,
            ops.Gate,
            ops.Activation,
            ops.Sum,
        ),
        _elsewhere,
    ),
    ops.Core: _core,
    ops.Delta: delta_seconds,
    ops.Mixture: mixture_seconds,
    ops.PlainProduct: _plain_product,
    ops.LookUp: _look_up,
    ops.Loss: _loss,
    ops.Score: _score,
}


@lru_cache(maxsize=65536)
def optimizer_s(device: Device, num_params_shard: float, rounding_bytes: float = 0.0) -> float:
    """Seconds of an Adam step on a shard of `num_params_shard` parameters.

    44 bytes a parameter (fp32 master and moments with 16-bit parameters, norm and clipping included), the
    `rounding_bytes` of states in other formats, and the device's constant.
    """
    own_bytes = device.software.kernels.optimizer_bytes or _OPTIMIZER_BYTES
    return stream_s(device, (own_bytes + rounding_bytes) * num_params_shard) + device.kernels.optimizer_s


def rounding_bytes(device: Device, master: str, states: str | None) -> float:
    """Bytes per parameter that an Adam step reads and writes beyond those of fp32 master and moments.

    `master` and `states` are as in a plan. Fewer bytes of state are read, but they are decoded and rounded again.
    """
    total = 0.0
    for stored in (states, states, master if master == "bf16" else None):
        if stored is not None:
            total += 2 * element_bytes(stored) - 8 + recoding_bytes(stored, on_cpu=device.type == "cpu")
    return total


def recoding_bytes(stored: str, *, on_cpu: bool) -> float:
    """Bytes per parameter that decoding and rounding a narrow state reads and writes; on a CPU they are in a cache."""
    return (8 + (_BLOCK_CODE_BYTES if stored == BLOCK_STATES else _ROUNDING_BYTES)) * (_IN_CACHE if on_cpu else 1)


def at_once(logits: BlockSeconds) -> BlockSeconds:
    """Seconds of logits with a chunked loss, whose forward and backward both run in the backward.

    The runtime does this where no tensor ranks share the vocabulary (terrace.runtime.head).
    """
    return BlockSeconds(forward_s=0.0, input_s=logits.forward_s + logits.input_s + logits.weight_s, weight_s=0.0)
