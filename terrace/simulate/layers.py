"""Seconds of a block on a micro-batch, its FLOPs, and the seconds of an optimizer step.

A layer is priced kernel by kernel (`terrace.simulate.kernels`): its matrix products, its attention core, and the passes
over memory between them. With T tokens on a rank, hidden size H, intermediate size I, query width Q, key and value
width K each, t tensor rows and e bytes an element, the passes are

    forward    2 norms 2eHT, 2 residual sums 3eHT; activation 2eIT/t (gated 3eIT/t), RoPE 2e(Q + K)T/t
    backward   2 norms 5eHT, 2 residual sums 3eHT; activation 3eIT/t (gated 5eIT/t), RoPE 2e(Q + K)T/t

and, where queries and keys have norms of their own, 2e(Q + K)T/t forward and 5e(Q + K)T/t backward; where attention is
not flash, 2e(Q + 2K)T/t each way to lay its operands out. The gradient of a bias reads that of its result once:
e(Q + 2K)T/t + eHT for attention, eIT/t + eHT for the MLP. For GPT this is (20 + 28/t)TH forward and (36 + 50/t)TH
backward in bf16. A layer with a mixture of experts has the shared expert for its MLP,
or none, and the mixture on top (`terrace.simulate.mixture`). Sequence parallelism cuts everything outside the
tensor-parallel products over the rows. Tensor columns cut the residual stream and the hidden side of every product, and
repeat the rest. With `work.products` the products of a layer are those of terrace.simulate.scaled. Query, key and value
count as one product, and so do gate and up. Attention is summed over the rounds of a ring and covers the heads of a
Ulysses rank. A block that declares its parameters alone is priced as a chain of matrix products: all its matrices, in
order, each shared evenly by tensor ranks. Messages are priced in `terrace.simulate.inside`.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from terrace.cluster.cluster import Device
from terrace.model.blocks import forward_flops
from terrace.model.config import ModelConfig
from terrace.model.loss_chunks import chunk_rows
from terrace.model.spec import BlockSpec, Computes
from terrace.plan.state_formats import BLOCK_STATES, element_bytes
from terrace.plan.wire import FORMATS
from terrace.simulate.kernels import attention_s, gemm_s, memory_s, stream_s
from terrace.simulate.masks import core_keys, spread_kernel, work_in
from terrace.simulate.mixture import LAYER_OPERATORS, Divided, mixture_seconds
from terrace.simulate.scaled import launches as scaled_launches
from terrace.simulate.scaled import matrices_of, scaled_seconds
from terrace.simulate.work import Work

# Cross-entropy passes over bf16 logits in fp32 (cast, maximum, exponent and sum; backward, softmax and cast).
LOGIT_BYTES = 26
# Adam in mixed precision: moments, master copy and gradient read and written, norm and clipping included.
_OPTIMIZER_BYTES = 44
# What rounding adds for each element of a state, in bytes that its operations read and write: random bits, 64 for four
# elements, and their addition; codes looked up, scales, and the search of the nearest point. The step itself then works
# on fp32 copies, 8 bytes. On a CPU all of it stays in a cache, where it takes about half as long (measured on one core:
# 4 ns an element for two states in bf16, 21 in 8 bits, 2 for parameters in bf16).
_ROUNDING_BYTES = 110
_BLOCK_CODE_BYTES = 175
_IN_CACHE = 0.5


@dataclass(frozen=True, kw_only=True)
class BlockSeconds:
    """Seconds of one block on one micro-batch; a backward is its two parts, and `again_s` when it recomputes.

    `input_s` computes the gradient of the input, which the block before waits for; `weight_s` the gradient of the
    weights, which only the reduction waits for.
    """

    forward_s: float
    input_s: float
    weight_s: float
    again_s: float = 0.0

    @property
    def backward_s(self) -> float:
        """Seconds of both gradients and of recomputation."""
        return self.input_s + self.weight_s + self.again_s

    def longer(self, forward_s: float, input_s: float, weight_s: float) -> "BlockSeconds":
        """The seconds of a block whose parts take that much longer, or shorter."""
        return replace(
            self,
            forward_s=self.forward_s + forward_s,
            input_s=self.input_s + input_s,
            weight_s=self.weight_s + weight_s,
        )


def seconds_of(
    device: Device, work: Work, block: BlockSpec, *, accumulate: bool = False, divided: Divided | None = None
) -> BlockSeconds:
    """Seconds of a block on a micro-batch; `accumulate` as in `block_seconds`, `divided` if its experts are."""
    if block.computes is None:
        return chain_seconds(device, work, block.matrices, accumulate)
    if divided is not None:
        return _residual_seconds(device, work_in(work, block, device.backend), accumulate, divided)
    return block_seconds(device, work_in(work, block, device.backend), block.computes, accumulate=accumulate)


def block_seconds(device: Device, work: Work, computes: Computes, *, accumulate: bool = False) -> BlockSeconds:
    """Seconds of a block on a micro-batch.

    `accumulate`: the weight gradient is added to an existing one, which reads and writes it once more. Raises
    `ClusterError` for a dtype without a peak.
    """
    return _SECONDS[computes](device, work, accumulate)


@lru_cache(maxsize=65536)
def chain_seconds(device: Device, work: Work, matrices: tuple[tuple[int, int], ...], accumulate: bool) -> BlockSeconds:
    """Seconds of products with (inputs, outputs), one after the other; `work.recompute` counts as for other blocks."""
    cut = [(work.tokens, inputs, math.ceil(outputs / work.tensor)) for inputs, outputs in matrices]
    weight_s = sum(gemm_s(device, k, m, n, 1, work.compute) for m, k, n in cut)
    if accumulate:
        weight_s += _accumulation_s(device, work, sum(k * n for _, k, n in cut), len(cut))
    forward_s = sum(gemm_s(device, m, k, n, 1, work.compute) for m, k, n in cut)
    input_s = sum(gemm_s(device, m, n, k, 1, work.compute) for m, k, n in cut)
    again_s = forward_s if work.recompute == "full" else 0.0
    return BlockSeconds(forward_s=forward_s, input_s=input_s, weight_s=weight_s, again_s=again_s)


@lru_cache(maxsize=65536)
def optimizer_s(device: Device, num_params_shard: float, rounding_bytes: float = 0.0) -> float:
    """Seconds of an Adam step on a shard of `num_params_shard` parameters.

    44 bytes a parameter (fp32 master and moments with 16-bit parameters, norm and clipping included), the
    `rounding_bytes` of states that are stored otherwise, and the device's constant for all costs that do not grow with
    the shard.
    """
    return stream_s(device, (_OPTIMIZER_BYTES + rounding_bytes) * num_params_shard) + device.kernels.optimizer_s


def rounding_bytes(device: Device, master: str, states: str | None) -> float:
    """Bytes a parameter that an Adam step reads and writes beyond those of fp32 master and moments.

    `master` and `states` are as in a plan. Fewer bytes of state are read, but they are decoded and rounded again.
    """
    total = 0.0
    for stored in (states, states, master if master == "bf16" else None):
        if stored is not None:
            work = 8 + (_BLOCK_CODE_BYTES if stored == BLOCK_STATES else _ROUNDING_BYTES)
            total += 2 * element_bytes(stored) - 8 + work * (_IN_CACHE if device.backend == "cpu" else 1)
    return total


def at_once(logits: BlockSeconds) -> BlockSeconds:
    """Seconds of logits whose loss is computed in chunks: forward and backward both run in the backward.

    The runtime does this where no tensor ranks share the vocabulary (terrace.runtime.head).
    """
    return BlockSeconds(forward_s=0.0, input_s=logits.forward_s + logits.input_s + logits.weight_s, weight_s=0.0)


def model_flops(model: ModelConfig, sequence: int, batch: int) -> int:
    """FLOPs that `batch` sequences need: three times the forward's products, the full S x S square.

    For GPT this is 72 B S L H^2 (1 + S / 6H + V / 12LH): Korthikanti et al. 2205.05198, section 6, from which they take
    the model FLOPs utilization (MFU).
    """
    return 3 * sum(forward_flops(model, block, batch, sequence) for block in range(model.num_blocks))


def hardware_flops(work: Work, batch: int) -> int:
    """FLOPs that `batch` sequences of `work.sequence` cost, recomputation included.

    With full recomputation of the layers, for GPT, 96 B S L H^2 (1 + S / 6H + V / 16LH): Narayanan et al.
    2104.04473, equation 3, as used in their Table 1. Recomputation inside a flash kernel is not counted.
    """
    model, sequence = work.model, work.sequence
    # Recomputation runs every layer's forward a second time.
    layers = range(1, model.num_layers + 1) if work.recompute == "full" else ()
    return model_flops(model, sequence, batch) + sum(forward_flops(model, layer, batch, sequence) for layer in layers)


@lru_cache(maxsize=65536)
def _residual_seconds(device: Device, work: Work, accumulate: bool, divided: Divided | None = None) -> BlockSeconds:
    products = layer_products(work)
    forward_s, input_s, weight_s = _products_seconds(device, products, work.compute)
    host_s = device.kernels.host_layer_s
    if work.products is not None:
        matrices, coded, again = matrices_of(work, products), work.codes_of_weights, work.recompute == "full"
        forward_s, input_s, weight_s = scaled_seconds(
            device, matrices, work.compute, work.products, coded, accumulate=accumulate, again=again
        )
        host_s *= scaled_launches(matrices, LAYER_OPERATORS, work.products, coded)
    if accumulate:
        # Later micro-batches add their weight gradients to the ones of the first.
        weight_s += _accumulation_s(device, work, sum(k * n for _, k, n in products), len(products))
    core = _core_seconds(device, work)
    # Norms, residual sums, activation and RoPE are bound by memory.
    passes = pass_seconds(device, work)
    forward_s, input_s = forward_s + core[0] + passes[0], input_s + core[1] + passes[1]
    if work.model.experts is not None:
        mixture, launched = mixture_seconds(device, work, work.model.experts, accumulate, divided)
        forward_s, input_s, weight_s = forward_s + mixture[0], input_s + mixture[1], weight_s + mixture[2]
        host_s *= launched
    seconds = BlockSeconds(forward_s=forward_s, input_s=input_s, weight_s=weight_s)
    # A small layer takes as long as the host needs to launch its kernels.
    seconds = _host_bound(seconds, host_s)
    again_s = seconds.forward_s if work.recompute == "full" else operation_seconds(device, work, work.operations)
    return replace(seconds, again_s=again_s)


@lru_cache(maxsize=65536)
def _products_seconds(
    device: Device, products: tuple[tuple[int, int, int], ...], dtype: str
) -> tuple[float, float, float]:
    """Seconds of products and of both their gradients; the same for all context forms of as many tokens."""
    forward_s = sum(gemm_s(device, m, k, n, 1, dtype) for m, k, n in products)
    input_s = sum(gemm_s(device, m, n, k, 1, dtype) for m, k, n in products)
    weight_s = sum(gemm_s(device, k, m, n, 1, dtype) for m, k, n in products)
    return forward_s, input_s, weight_s


def _host_bound(seconds: BlockSeconds, host_s: float) -> BlockSeconds:
    # The bound holds for the backward as a whole, so both parts stretch alike.
    slower = max(1.0, host_s / (seconds.input_s + seconds.weight_s))
    forward_s = max(seconds.forward_s, host_s)
    return BlockSeconds(forward_s=forward_s, input_s=seconds.input_s * slower, weight_s=seconds.weight_s * slower)


def layer_products(work: Work) -> tuple[tuple[int, int, int], ...]:
    model, tokens = work.model, work.tokens
    query, key = _widths(work)
    intermediate = math.ceil(model.mlp_size / work.rows)
    hidden = math.ceil(model.hidden_size / work.columns)
    attention = ((tokens, hidden, query + 2 * key), (tokens, query, hidden))
    if not intermediate:
        return attention
    return (
        *attention,
        (tokens, hidden, intermediate * (2 if model.gated_mlp else 1)),
        (tokens, intermediate, hidden),
    )


def _widths(work: Work) -> tuple[int, int]:
    # A key-value head is never cut: the rank with most heads sets the width.
    heads, kv_heads = (math.ceil(count / work.rows) for count in (work.model.num_heads, work.model.num_kv_heads))
    return heads * work.model.head_dim, kv_heads * work.model.head_dim


@lru_cache(maxsize=65536)
def core_rounds(device: Device, work: Work) -> tuple[tuple[float, float], tuple[float, float]]:
    """(forward, backward) seconds of a layer's attention: of the first round of a ring, and of every later one.

    Rows are assumed to hold one document each. Without a window every round has the same number of products, because a
    ring rank holds one early and one late chunk: the first round computes a causal square over both, later rounds half
    of the full square. From the second round on, results are added to earlier ones: outputs in the forward, gradients
    of queries and keys in the backward. With a window nearly all work is in the first rounds, so all products are
    counted in the first one, and later rounds have none for messages to hide behind.
    """
    keys, causal = core_keys(work, device.backend)
    kernel = spread_kernel(work) if work.is_spread else work.kernel_on(device.backend)
    queries = math.ceil(work.attended / work.micro_batch)  # tokens of one row on this rank
    windowed = 0 < work.model.sliding_window < work.sequence
    first = attention_s(
        device,
        batch=work.micro_batch,
        heads=work.attended_heads,
        queries=queries,
        keys=keys if work.ring == 1 or windowed else queries,
        head_dim=work.model.head_dim,
        flash=work.flash,
        causal=causal,
        dtype=work.compute,
        kernel=kernel,
        capped=work.model.scales.attention_cap > 0,
    )
    if work.ring == 1:
        return first, (0.0, 0.0)
    row = work.attended * FORMATS[work.compute].element_bytes * work.model.head_dim  # bytes of a head
    outputs_s = memory_s(device, 3 * row * work.attended_heads)
    sums_s = memory_s(device, 3 * row * (work.attended_heads + 2 * work.attended_kv_heads), 3)
    # Under a window the first round has counted all products already.
    own = (0.0, 0.0) if windowed else first
    return first, (own[0] + outputs_s, own[1] + sums_s)


def _core_seconds(device: Device, work: Work) -> tuple[float, float]:
    first, later = core_rounds(device, work)
    return first[0] + (work.ring - 1) * later[0], first[1] + (work.ring - 1) * later[1]


def pass_seconds(device: Device, work: Work) -> tuple[float, float]:
    """(forward, backward) seconds of a layer's passes over memory: norms, residual sums, activation, RoPE."""
    model, item, tokens = work.model, FORMATS[work.compute].element_bytes, work.tokens
    query, key = _widths(work)
    intermediate = math.ceil(model.mlp_size / work.rows)
    # Two residual sums read two operands and write one.
    residual = 2 * 3 * item * model.hidden_size / work.stream_cut
    norms = 2 * item * model.hidden_size / work.stream_cut
    rope = 2 * item * (query + key) if model.rotary_dim else 0
    # Plain products need contiguous operands: read and written once.
    layout = 0 if work.flash else 2 * item * (query + 2 * key)
    biases, num_sums = _bias_gradients(work)
    norms += item * (query + key) if model.qk_norm else 0
    doubled = model.norms == "both"
    norms *= 2 if doubled else 1
    # A pass of its own over the queries, and over the gradients of what each half of a layer adds.
    rope += 2 * item * query if model.query_factor != 1.0 else 0
    forward = 2 * norms + residual + (3 if model.gated_mlp else 2) * item * intermediate + rope + layout
    backward = (
        5 * norms + residual + (5 if model.gated_mlp else 3) * item * intermediate + rope + layout + item * biases
    )
    num_kernels = (5 if intermediate else 4) + (1 if rope else 0) + (1 if layout else 0) + (2 if model.qk_norm else 0)
    num_kernels += (2 if doubled else 0) + (1 if model.query_factor != 1.0 else 0)
    backward_kernels = num_kernels + 2 + num_sums
    return memory_s(device, tokens * forward, num_kernels), memory_s(device, tokens * backward, backward_kernels)


def _bias_gradients(work: Work) -> tuple[float, int]:
    """Elements a token that a layer's gradients of biases sum, and the number of sums: one over each biased result."""
    model = work.model
    query, key = _widths(work)
    found: list[float] = []
    if model.attention_bias or model.qkv_bias:
        found.append(query + 2 * key)
    if model.attention_bias:
        found.append(model.hidden_size / work.stream_cut)
    if model.mlp_bias and model.mlp_size:
        found += [math.ceil(model.mlp_size / work.rows), model.hidden_size / work.stream_cut]
    return sum(found), len(found)


@lru_cache(maxsize=65536)
def operation_seconds(device: Device, work: Work, operations: tuple[str, ...]) -> float:
    """Seconds of a layer's operations (terrace.plan.recompute) when a backward runs them again.

    Attention is its core; the activation of an MLP passes over 2eIT/t bytes (gated 3eIT/t), the norms over 4eHT, as in
    a forward.
    """
    model, row = work.model, FORMATS[work.compute].element_bytes * work.tokens
    found = 0.0
    for operation in operations:
        if operation == "attention":
            found += _core_seconds(device, work)[0]
        elif operation == "mlp":
            inner = math.ceil(model.mlp_size / work.rows)
            found += memory_s(device, (3 if model.gated_mlp else 2) * row * inner, 1)
        else:
            assert operation == "norms", f"{operation} has no price"
            found += memory_s(device, 2 * 2 * row * model.hidden_size / work.stream_cut, 2)
    return found


def _accumulation_s(device: Device, work: Work, num_weights: int, num_kernels: int) -> float:
    return stream_s(device, 3 * FORMATS[work.compute].element_bytes * num_weights, num_kernels)


@lru_cache(maxsize=65536)
def _look_up_seconds(device: Device, work: Work, accumulate: bool) -> BlockSeconds:
    model, item = work.model, FORMATS[work.compute].element_bytes
    row = item * model.hidden_size
    scaled = model.scales.embedding != 1.0
    rows = work.tokens * (2 + (2 if model.learned_positions or scaled else 0)) * row
    # The gradient is dense: zeros for the whole matrix, to which the rows are added.
    weights = math.ceil(model.vocab_size / work.tensor) * model.hidden_size
    weight_s = memory_s(device, item * weights + rows + work.tokens * row, 2)
    if accumulate:
        weight_s += _accumulation_s(device, work, weights, 1)
    return BlockSeconds(forward_s=memory_s(device, rows, 1), input_s=0.0, weight_s=weight_s)


@lru_cache(maxsize=65536)
def _logits_seconds(device: Device, work: Work, accumulate: bool) -> BlockSeconds:
    model, item, tokens = work.model, FORMATS[work.compute].element_bytes, work.tokens
    # The hidden size is whole: tensor columns cut the vocabulary, too.
    words, hidden = math.ceil(model.vocab_size / work.tensor), model.hidden_size
    logits = LOGIT_BYTES * item / 2 * tokens * words / 2  # each way
    if model.scales.logit_cap:
        logits += 4 * item * tokens * words  # the cap and its slopes, read and written
    norm = item * tokens * hidden / work.stream_cut
    weight_s = gemm_s(device, hidden, tokens, words, 1, work.compute)
    if accumulate:
        weight_s += _accumulation_s(device, work, words * hidden, 1)
    logits_s = gemm_s(device, tokens, hidden, words, 1, work.compute)
    # Tensor ranks that do not keep their logits compute them again (terrace.runtime.tensor.loss).
    again_s = logits_s if work.tensor > 1 and tokens > chunk_rows(words, device.backend) else 0.0
    return BlockSeconds(
        forward_s=logits_s + memory_s(device, 2 * norm + logits, 4),
        input_s=gemm_s(device, tokens, words, hidden, 1, work.compute)
        + memory_s(device, 5 * norm + logits, 4)
        + again_s,
        weight_s=weight_s,
    )


@lru_cache(maxsize=65536)
def _values_seconds(device: Device, work: Work, accumulate: bool) -> BlockSeconds:
    item, tokens, hidden = FORMATS[work.compute].element_bytes, work.tokens, work.model.hidden_size
    # The norm is of a rank's part of the stream; a product with one output reads the whole stream and little else.
    norm, stream = item * tokens * hidden / work.stream_cut, item * tokens * hidden
    weight_s = memory_s(device, stream, 1) + (_accumulation_s(device, work, hidden, 1) if accumulate else 0.0)
    return BlockSeconds(
        forward_s=memory_s(device, 2 * norm + stream, 3),
        input_s=memory_s(device, 5 * norm + stream, 3),
        weight_s=weight_s,
    )


_SECONDS = {
    Computes.LOOK_UP: _look_up_seconds,
    Computes.RESIDUAL: _residual_seconds,
    Computes.LOGITS: _logits_seconds,
    Computes.VALUES: _values_seconds,
}
