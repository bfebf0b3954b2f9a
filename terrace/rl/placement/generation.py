"""Seconds and memory of generating the responses of an iteration, in closed form.

A pool of n devices has n / rows replicas, each of which generates its share of the responses. The prefill of a prompt
serves all its samples and is compute-bound; its last token yields the first token of each response. Then every pass
adds a token to all running sequences:

    layer       max( products, seconds of the host to launch it ) + attention + 2 sums over the rows
    products    max( bytes of its weights / memory bandwidth, 2 m parameters / peak )    for m sequences
    attention   max( bytes of their keys and values / memory bandwidth, its products )

so it is bound by reading weights while few sequences run, and by keys and values once many do. As many run as the
memory left for keys and values allows, and a finished sequence is replaced at once: n sequences of r tokens, m at a
time, need n (r - 1) / m passes.

Not modelled: sampling and scheduling time, CUDA graphs, partially filled pages.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.model.block_operations import head_operations, layer_operations
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.model.operations import Core, Loss, Operations
from terrace.model.spec import BlockSpec, Computes
from terrace.plan.dims import rank_numel, state_shapes
from terrace.plan.mesh import Mesh
from terrace.plan.slices import slice_blocks
from terrace.plan.wire import FORMATS
from terrace.rl.placement.dataflow import Dataflow
from terrace.simulate.kernels import memory_s, peak_flops_per_s, stream_s
from terrace.simulate.layers import seconds_of
from terrace.simulate.links import hop_s
from terrace.simulate.masks import has_flash_attention
from terrace.simulate.passes import pass_seconds
from terrace.simulate.work import Work

PREFILL_TOKENS = 8192  # of prompts that pass at once: a guess, beyond which products hardly get faster
_SUMS = 2  # all-reduces of a layer over tensor rows: behind attention and behind the MLP
_PRODUCTS = 4  # kernels of a layer's products: into attention, out of it, into the MLP, out of it
_LOGIT_PASSES = 4  # over logits in fp32 until a token is drawn: written, scaled, normalised, searched


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Generation of an iteration's responses: seconds, and bytes of one rank.

    A replica generates `sequences`, `running` of them at a time, with `cache_bytes` of keys, values and states.
    """

    prefill_s: float
    decode_s: float
    running: int
    sequences: int
    weights_bytes: int
    cache_bytes: int

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def working_bytes(self) -> int:
        """Bytes that are freed after generation."""
        return self.weights_bytes + self.cache_bytes


def rows_of(cluster: Cluster, model: ModelConfig) -> list[int]:
    """Possible tensor ranks of a replica: they divide the devices and the heads, and fill a tier before the next."""
    found = [1]
    for index, tier in enumerate(cluster.tiers):
        inside = cluster.ranks_within(index - 1)
        found += [inside * part for part in range(2, tier.size + 1) if tier.size % part == 0]
    linear = {block.operations.delta.key_heads for block in block_specs(model)}
    heads = {layer_operations(model).core.kv_heads, *linear}
    return [rows for rows in found if all(each % rows == 0 for each in heads)]


@dataclass(frozen=True)
class Replica:
    """A replica of a model on the innermost `rows` ranks of a cluster. `blocks` are the slices of a rank."""

    cluster: Cluster
    model: ModelConfig
    rows: int
    compute: Literal["bf16", "fp16", "fp32", "fp64"]
    blocks: tuple[BlockSpec, ...]

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(
        cluster: Cluster, model: ModelConfig, rows: int, compute: Literal["bf16", "fp16", "fp32", "fp64"]
    ) -> "Replica":
        """The replica on `rows` ranks. Raises `PlanError` for rows that do not divide the devices or the heads."""
        if rows < 1 or cluster.world_size % rows:
            raise PlanError(f"rows = {rows} do not divide the {cluster.world_size} devices of a pool: give a divisor")
        kv_heads = layer_operations(model).core.kv_heads
        if kv_heads % rows:
            raise PlanError(
                f"rows = {rows} do not divide the {kv_heads} heads of keys and values: give a divisor of both"
            )
        sliced = slice_blocks(block_specs(model), Mesh.build(1, rows=(rows,)))
        return Replica(cluster, model, rows, compute, sliced)

    def running(self, flow: Dataflow, room_bytes: float) -> int:
        """Sequences that run at a time with `room_bytes` for weights, keys, values and states; at least one."""
        room = (room_bytes - self.weights_bytes) / self._sequence_bytes(flow)
        return max(1, min(self._share(flow)[0], int(room)))

    def generation(self, flow: Dataflow, running: int) -> Generation:
        sequences, prompts = self._share(flow)
        # The keys and values that a pass reads grow by a token a sequence, so their mean counts.
        added, mean = sequences * (flow.response_tokens - 1), flow.prompt_tokens + flow.response_tokens / 2
        return Generation(
            prefill_s=self.prefill_s(prompts, flow.prompt_tokens),
            decode_s=added / running * self.decode_s(running, mean),
            running=running,
            sequences=sequences,
            weights_bytes=self.weights_bytes,
            cache_bytes=math.ceil(running * self._sequence_bytes(flow)),
        )

    def _share(self, flow: Dataflow) -> tuple[int, int]:
        num_replicas = self.cluster.world_size // self.rows
        return -(-flow.sequences // num_replicas), -(-flow.prompts // num_replicas)

    def _sequence_bytes(self, flow: Dataflow) -> float:
        return self._tokens(flow) * self.token_bytes + self.state_bytes

    def _tokens(self, flow: Dataflow) -> float:
        """Tokens of a sequence in memory; samples of a prompt share its keys and values."""
        return flow.response_tokens + flow.prompt_tokens / min(flow.samples, self._share(flow)[0])

    @cached_property
    def kinds(self) -> Counter[BlockSpec]:
        """Number of blocks of each kind, represented by its first block."""
        named = dict[tuple[int, object], BlockSpec]()
        return Counter(named.setdefault((id(block.params), block.computes), block) for block in self.blocks)

    @cached_property
    def item_bytes(self) -> int:
        return FORMATS[self.compute].element_bytes

    @cached_property
    def weights_bytes(self) -> int:
        each = (times * sum(param.numel for param in block.params) for block, times in self.kinds.items())
        return self.item_bytes * sum(each)

    @property
    def token_bytes(self) -> int:
        """Bytes that a rank caches for a token in all layers: keys and values, or latents."""
        return sum(block.operations.core.heads > 0 for block in self.blocks) * self._layer_token_bytes

    @cached_property
    def state_bytes(self) -> int:
        """Bytes that a rank keeps for a sequence of any length in all linear layers: states in fp32 at least."""
        item, found = self.item_bytes, 0
        for block in self.blocks:
            if block.operations.delta.heads:
                tails, states = state_shapes(block.operations.delta, self.rows)
                found += item * math.prod(tails) + max(4, item) * math.prod(states)
        return found

    @property
    def _layer_token_bytes(self) -> int:
        kept = (rank_numel(tensor.features, {"rows": self.rows}) for tensor in self._core.cached)
        return self.item_bytes * sum(kept)

    @cached_property
    def _layer(self) -> Operations:
        return layer_operations(self.model)

    @property
    def _core(self) -> Core:
        return self._layer.core

    def prefill_s(self, prompts: int, tokens: int) -> float:
        """Seconds of the prefill of prompts of `tokens` tokens, in batches of `PREFILL_TOKENS`."""
        parts = -(-prompts // max(1, PREFILL_TOKENS // tokens))
        at_once = -(-prompts // parts)
        device, work = self.cluster.device, self._work(at_once, tokens)
        each_s = self._head_s(at_once)
        for block, times in self.kinds.items():
            if block.computes is not Computes.LOGITS:
                each_s += times * seconds_of(device, work, block).forward_s
            if block.computes is Computes.RESIDUAL:
                each_s += times * self._sums_s(at_once * tokens)
        return parts * each_s

    def decode_s(self, running: int, tokens: float) -> float:
        """Seconds of a pass that adds a token to each of `running` sequences of `tokens` tokens."""
        device = self.cluster.device
        # Norms, residual sums and activation, of one token a sequence.
        passes_s = pass_seconds(device, self._work(running, 1))[0]
        found_s = self._head_s(running)
        for block, times in self.kinds.items():
            if block.computes is Computes.RESIDUAL:
                attention_s = self._mixing_s(block.operations, running, tokens)
                layer_s = self._products_s(block, running) + passes_s + attention_s
                found_s += times * (max(layer_s, device.kernels.host_layer_s) + self._sums_s(running))
        return found_s

    def _work(self, micro_batch: int, sequence: int) -> Work:
        return Work(
            layer=self._layer,
            sequence=sequence,
            micro_batch=micro_batch,
            tensor=self.rows,
            sequence_parallel=False,
            compute=self.compute,
            flash=has_flash_attention(self._core, sequence, self.compute, self.cluster.device.type),
        )

    def _products_s(self, block: BlockSpec, running: int) -> float:
        device, read, met = self.cluster.device, 0.0, 0
        experts = self._layer.mixture.experts
        for param in block.params:
            if not param.is_matrix:
                continue
            # Only experts chosen by some token are read; even routing skips the fewest.
            share = 1.0
            if param.is_stack:
                share = 1 - (1 - experts.per_token / experts.num_experts) ** running
            read += share * param.numel
            met += block.active(param)
        flops_s = 2 * running * met / (peak_flops_per_s(device, self.compute) * device.kernels.gemm)
        # Few rows leave tiles mostly empty, which costs nothing while reading weights is the bound.
        return max(stream_s(device, self.item_bytes * read, 0), flops_s) + _PRODUCTS * device.kernels.launch_s

    def _mixing_s(self, layer: Operations, running: int, tokens: float) -> float:
        """Seconds of attention to `tokens` tokens, or of reading and writing the states of a linear layer in fp32."""
        if not layer.delta.heads:
            return self._attention_s(running, tokens, layer.core.window)
        state_bytes = max(4, self.item_bytes) * layer.delta.state_numel
        return memory_s(self.cluster.device, 2 * running * state_bytes / self.rows)

    def _attention_s(self, running: int, tokens: float, window: int) -> float:
        device, core = self.cluster.device, self._core
        seen = min(tokens, window or tokens)
        # Every head reads a cached latent whole, as key and as value.
        size = core.cached[0].features.size
        flops = 4 * running * seen * core.heads // self.rows * size
        flops_s = flops / (peak_flops_per_s(device, self.compute) * device.kernels.attention_share(size))
        return max(memory_s(device, running * seen * self._layer_token_bytes), flops_s)

    def _head_s(self, running: int) -> float:
        device = self.cluster.device
        (loss,) = head_operations(self.model).of(Loss)
        words = math.ceil(loss.vocabulary / self.rows)
        numel = words * loss.source.features.numel
        flops_s = 2 * running * numel / (peak_flops_per_s(device, self.compute) * device.kernels.gemm)
        logits_s = memory_s(device, _LOGIT_PASSES * 4 * running * words, _LOGIT_PASSES)
        return max(stream_s(device, self.item_bytes * numel), flops_s) + logits_s

    def _sums_s(self, tokens: int) -> float:
        """Seconds of a layer's all-reduces over the rows, each from the innermost tier outward and back."""
        num_bytes, left, found_s = self.item_bytes * tokens * self._layer.hidden.numel, self.rows, 0.0
        for index, tier in enumerate(self.cluster.tiers):
            degree = min(left, tier.size)
            if degree > 1:
                num_bytes //= degree
                hop = hop_s(self.cluster, index, degree, (degree - 1) * num_bytes)
                found_s += 2 * (hop + self.cluster.device.kernels.launch_s)
            left //= degree
        return _SUMS * found_s
