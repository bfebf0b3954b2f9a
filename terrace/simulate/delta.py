"""Seconds and memory of the gated delta rule (terrace.model.delta_rule), of its convolutions, and of gates of heads.

Chunks have `CHUNK` tokens, or those of a shorter row.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from terrace.cluster.cluster import Device
from terrace.model.operations import CHUNK, Convolution, Delta, Dim, Gate
from terrace.plan.context import CHUNKS_PER_RING_RANK
from terrace.plan.dims import rank_numel
from terrace.plan.wire import FORMATS
from terrace.simulate.kernels import gemm_s, memory_s
from terrace.simulate.tape import Node

if TYPE_CHECKING:
    from terrace.simulate.block_tape import BlockTape
    from terrace.simulate.work import Work


def _num_runs(work: "Work") -> int:
    """Runs of a rank: rows, or on a ring two chunks of each."""
    return work.micro_batch * (CHUNKS_PER_RING_RANK if work.ring > 1 else 1)


def _chunk(work: "Work", delta: Delta) -> int:
    size = min(CHUNK, math.ceil(work.tokens / _num_runs(work)))
    return size if delta.decays.size == 1 else 1 << (size - 1).bit_length()


def _num_halvings(size: int, delta: Delta) -> int:
    """How often a chunk is halved for the scores of its tokens: a decay for each head takes none."""
    return 0 if delta.decays.size == 1 else size.bit_length() - 1


@lru_cache(maxsize=65536)
def _scan_s(device: Device, work: "Work", delta: Delta) -> tuple[float, float]:
    """(Seconds of all products in chunks, of those with the state alone) of the gated delta rule in a forward.

    Chunks are computed together, up to the products with the state, which wait for the chunk before.
    """
    size, key, value = _chunk(work, delta), delta.key_dim, delta.value_dim
    halvings = _num_halvings(size, delta)
    heads = rank_numel(Dim("heads", delta.heads), {"rows": work.rows})
    number = math.ceil(work.tokens / size)  # chunks of all rows
    num_steps = math.ceil(number / _num_runs(work))
    dtype, batch, launch_s = work.compute, number * heads, device.kernels.launch_s

    def products_s(*shapes: tuple[int, int, int]) -> float:
        return sum(gemm_s(device, *shape, batch, dtype) for shape in shapes)

    # Each step launches its products again.
    state_s = products_s((size, key, value), (key, size, value)) + 2 * (num_steps - 1) * launch_s
    reads_s = products_s((size, key, value), (size, size, value)) + 2 * (num_steps - 1) * launch_s
    # Scores of keys and of queries, the solution (half of a product), and passes over the factors.
    inside_s = products_s((size, key, size), (size, key, size)) + products_s((size, size, key + value)) / 2
    # A halving reads decays, keys and queries, and writes half of each of three factors, from two of exponents.
    factors = (6 * size + 8 * key + 6 * value + halvings * 8 * key) * work.tokens * heads
    passes_s = memory_s(device, max(4, FORMATS[dtype].element_bytes) * factors, 12 + 10 * halvings)
    return state_s + reads_s + inside_s + passes_s, state_s


def delta_seconds(device: Device, work: "Work", delta: Delta, accumulate: bool) -> tuple[float, float, float]:
    """The backward computes the forward again, then twice as many products; ranks of a ring also scan maps."""
    forward_s, state_s = _scan_s(device, work, delta)
    maps_s = 0.0 if work.ring == 1 else state_s * (1 + delta.key_dim / delta.value_dim)
    return forward_s + maps_s, 3 * forward_s + 2 * maps_s, 0.0


def gate_nodes(tape: "BlockTape", gate: Gate) -> Iterator[Node]:
    source, other = (each.name for each in gate.reads)
    target = gate.target.name
    active = tape.size(f"activated {source}", tape.sizes[target])
    yield Node((source,), active, (active if gate.function == "sigmoid" else source,))
    yield Node((active, other), target, (active, other))


def convolution_nodes(tape: "BlockTape", convolution: Convolution) -> Iterator[Node]:
    work, source, whole = tape.work, convolution.source.name, tape.sizes[convolution.target.name]
    keeps = [source]
    if work.is_masked or work.is_spread:  # a byte for each token, the same for all convolutions of a layer
        keeps.append(tape.size("ages of tokens", work.tokens))
    if work.ring > 1:
        width, runs = tape.width(convolution.source.features), _num_runs(work)
        keeps.append(tape.size(f"before {source}", runs * (convolution.taps - 1) * width * tape.item))
    yield Node((source,), convolution.target.name, tuple(keeps), 2 * whole, 6 * whole)


def delta_nodes(tape: "BlockTape", delta: Delta) -> Iterator[Node]:
    """Chunks of `CHUNK` tokens in fp32 at least.

    The forward holds decays and scores of the pairs of a chunk, and its factors; the backward also autograd's tensors,
    the gradients of the factors, and the state before each chunk. Which of them are alive together depends on the
    sizes, so both are bounds, fitted to measurements: too high by at most a fifth of the peak
    (tests/simulate/test_linear_layers.py).
    """
    work, key, value = tape.work, delta.key_dim, delta.value_dim
    heads, size, runs = tape.units(Dim("heads", delta.heads)), _chunk(work, delta), _num_runs(work)
    tokens = size * math.ceil(work.tokens / runs / size) * runs
    of_head, of_key = tokens * heads * tape.wide, tokens * tape.units(Dim("kv_heads", delta.key_heads)) * tape.wide
    state = heads * key * value * tape.wide
    keeps = [each.name for each in delta.reads]
    if work.is_masked or work.is_spread:
        keeps.append(tape.size("begins of documents", work.tokens))
    if work.ring > 1:
        keeps.append(tape.size("states before", runs * state))
    forward_adds = of_head * (8 * size + 5 * key + 7 * value) // 2 + of_key * 6 * key
    states = 2 * math.ceil(tokens / size) * state
    backward_adds = of_head * (10 * size + 6 * key + 6 * value) + of_key * 12 * key + states
    if _num_halvings(size, delta):  # factors of each halving, which the backward keeps
        forward_adds += of_head * (5 * size // 4 + key // 2)
        backward_adds += of_head * (33 * key // 2 - 2 * size)
    yield Node(tuple(each.name for each in delta.reads), delta.target.name, tuple(keeps), forward_adds, backward_adds)
