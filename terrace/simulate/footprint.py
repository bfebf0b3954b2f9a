"""Memory of one rank by category, in each phase of a step.

A phase's figure is the memory at its worst moment, not the sum of all peaks:

- forward: a block runs forward while all that earlier blocks and other micro-batches keep is alive;
- backward: a block runs backward (or is recomputed first), with gradients of activations and parameters;
- update: model state only.

The categories are the model state's (terrace.simulate.states) and

    activations   kept by forwards for backwards, over all micro-batches in flight, without the logits
    logits        kept by the head, of a size that grows with the vocabulary
    working       taken by the running block beyond its activations: outputs, gradients, temporary tensors
    batch         tokens and labels of the step's micro-batches, int64; positions and masks where rows hold documents
    context       taken by a process before any tensor: libraries, kernels, communicators
    allocator     lost to fragmentation, as a share of all tensors

Scratch memory of kernels and RoPE's tables are in no category.
"""

import math
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.model.config import ModelConfig
from terrace.model.spec import Computes
from terrace.plan.memory import tensor_buffers
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.tensor_traffic import TensorTraffic
from terrace.plan.wire import FORMATS
from terrace.simulate.activations import BlockActivations, block_activation_bytes
from terrace.simulate.block_tape import Backend
from terrace.simulate.masks import has_flash_attention, mask_bytes
from terrace.simulate.states import (
    KINDS,
    BlockKind,
    Stage,
    axis_degree,
    kind_blocks,
    model_states,
    stage_of,
    state_layout,
)
from terrace.simulate.work import Work

# A CUDA context with loaded kernels and the buffers of a few NCCL communicators: a guess from 1 to 2 GB.
CUDA_CONTEXT_BYTES = 1_500_000_000
# Resident memory of a process after importing torch 2.13 (CPU), with gloo groups and one small step: measured 324 MB.
CPU_CONTEXT_BYTES = 324_000_000
# Caching allocators round blocks up and split them; 1.03 to 1.08 has been seen. On a CPU nothing is cached.
CUDA_ALLOCATOR_FACTOR = 1.05

_TOKEN_BYTES = 8
_COMPUTES: dict[BlockKind, Computes] = dict(zip(KINDS, Computes, strict=True))

Phase = Literal["forward", "backward", "update"]


def footprint(
    cluster: Cluster,
    plan: Plan,
    model: ModelConfig,
    sequence: int,
    num_micros: int,
    *,
    stage: int = 0,
    in_flight: float | None = None,
    layers: range | None = None,
    whole: tuple[int, int] | None = None,
    backend: Backend | None = None,
    context_bytes: int | None = None,
    allocator_factor: float | None = None,
    phase: Phase | None = None,
    documents: bool = False,
) -> dict[str, int]:
    """Bytes of one rank by category at the worst moment of a step, or of its `phase`; their sum is the peak.

    - `in_flight`: the most micro-batches pipeline stage `stage` holds, as its schedule says (5.5 is possible when
      interleaved). Default: min(num_micros, stages - stage), as under 1F1B; without a pipeline, the micros of a unit.
    - `layers`: the layers of the stage, where they are not spread evenly.
    - `whole`: bytes of parameters and of gradients that are whole at once, where blocks do not pass one by one.
    - `documents`: rows may hold several; their masks and copies are counted at their upper bound.
    - `backend`: the device's by default; decides the tensors that kernels keep, and the defaults of `context_bytes`
      and `allocator_factor`.

    Raises `PlanError` for an invalid stage, backend or number in flight, and `ClusterError` for an unknown tier.
    """
    backend = backend or cluster.device.backend
    layout = state_layout(cluster, plan)
    num_stages = axis_degree(cluster, plan, "pipeline")
    work = work_of(cluster, plan, model, sequence, backend, documents)
    held = stage_of(model, work.tensor, num_stages, stage, layout.degree, layers, work.columns)
    if in_flight is None:
        # 1F1B: stage s has run num_stages - s forwards before its first backward.
        in_flight = min(num_micros, plan.unit if num_stages == 1 else num_stages - stage)
    if not 1 <= in_flight <= num_micros:
        raise PlanError(
            f"in_flight = {in_flight} of {num_micros} micro-batches: a stage holds at least 1 and at most all"
        )
    states = model_states(layout, plan, held, num_micros, lambda axes: state_layout(cluster, plan, axes))
    steady = dict(states.steady)
    # Tensor ranks have message buffers of their own.
    if work.tensor > 1:
        steady["buffers"] += _tensor_buffers(cluster, plan, work, held)
    stream = work.tokens * model.hidden_size * FORMATS[plan.compute].element_bytes
    if num_stages > 1:  # one message on its way out and one coming in, in each direction
        steady["buffers"] += 4 * stream // work.stream_cut
    steady["batch"] = num_micros * (3 if documents else 2) * work.tokens * _TOKEN_BYTES
    steady["batch"] += (num_micros if documents else 1) * mask_bytes(work, backend)
    # Of the micro-batch before, the last two blocks may still be reduced while the next runs forward.
    pending = next(iter(states.gradients.values())) if num_micros > plan.unit else 0
    candidates = [steady] if phase in (None, "update") else []
    for moment in _moments(work, held, plan.recompute, backend, in_flight, num_stages > 1):
        if phase in (None, moment.phase):
            running = {
                "gathered": whole[0] if whole else states.gathered[moment.kind],
                "grads_full": states.gradients[moment.kind] if moment.phase == "backward" else pending,
                "activations": moment.activations,
                "logits": moment.logits,
                "working": moment.working,
            }
            if whole:
                running["grads_full"] = whole[1]
            candidates.append(steady | running)
    worst = max(candidates, key=lambda categories: sum(categories.values()))
    # The factor applies to tensors only; the context is outside the allocator.
    factor = (CUDA_ALLOCATOR_FACTOR if backend == "cuda" else 1.0) if allocator_factor is None else allocator_factor
    if context_bytes is None:
        context_bytes = {"cuda": CUDA_CONTEXT_BYTES, "cpu": CPU_CONTEXT_BYTES}[backend]
    return worst | {"allocator": int((factor - 1) * sum(worst.values())), "context": context_bytes}


def _tensor_buffers(cluster: Cluster, plan: Plan, work: Work, held: Stage) -> int:
    tiers = [tier.name for tier in cluster.tiers]
    tensor = TensorTraffic.of(Mesh.of(cluster, plan), tiers, plan, work.sequence)
    indexes = [index for index, size in enumerate((held.embedding, len(held.layers), held.head)) if size]
    return tensor_buffers(tensor, kind_blocks(work.model, tensor.degrees), indexes)


def work_of(
    cluster: Cluster,
    plan: Plan,
    model: ModelConfig,
    sequence: int,
    backend: Backend | None = None,
    documents: bool = False,
) -> Work:
    """The work of one micro-batch on a rank, nothing recomputed, with the attention that the decoder takes.

    `documents` tells that a row may hold several.
    """
    # Nothing is recomputed here: the plan's patterns are applied per block.
    return Work(
        model=model,
        sequence=sequence,
        micro_batch=plan.micro_batch,
        tensor=axis_degree(cluster, plan, "tensor"),
        columns=axis_degree(cluster, plan, "columns"),
        sequence_parallel=plan.sequence_parallel,
        ulysses=axis_degree(cluster, plan, "ulysses"),
        ring=axis_degree(cluster, plan, "ring"),
        balance=plan.balance,
        pooled=axis_degree(cluster, plan, "data"),
        compute=plan.compute,
        flash=has_flash_attention(model, sequence, plan.compute, backend or cluster.device.backend, documents),
        documents=documents,
    )


@dataclass(frozen=True)
class _Moment:
    phase: Phase
    kind: BlockKind
    activations: int
    logits: int
    working: int


@dataclass(frozen=True)
class _Run:
    kind: BlockKind
    block: BlockActivations
    activations: int  # with this block's, without logits
    logits: int


@lru_cache(maxsize=65536)
def _moments(
    work: Work, stage: Stage, recompute: tuple[str, ...], backend: Backend, in_flight: float, pipelined: bool
) -> tuple[_Moment, ...]:
    runs = _runs(work, stage, recompute, backend)
    others = in_flight - 1
    moments = []
    for run in runs:
        # In a pipeline the other micro-batches in flight have passed the whole stage; in a unit, the same block, and
        # the output or gradient of each waits to go on.
        block, beside = run.block, runs[-1] if pipelined else run
        activations = run.activations + math.ceil(others * beside.activations)
        logits = run.logits + math.ceil(others * beside.logits)
        waiting = 0 if pipelined else math.ceil(others * block.output_bytes)
        forward = max(0, block.forward_peak_bytes - block.kept_bytes) + waiting
        backward = max(0, block.backward_peak_bytes - block.kept_bytes) + waiting
        moments.append(_Moment("forward", run.kind, activations, logits, forward))
        moments.append(_Moment("backward", run.kind, activations, logits, backward))
    return tuple(moments)


def _runs(work: Work, stage: Stage, recompute: tuple[str, ...], backend: Backend) -> list[_Run]:
    # One run per kind of block rather than one per layer: all layers of a kind hold the same bytes.
    embedding, head, plain, again = _recomputed(recompute, stage.layers)

    def block_of(kind: BlockKind, whole: bool) -> BlockActivations:
        return block_activation_bytes(replace(work, recompute="full") if whole else work, _COMPUTES[kind], backend)

    runs, kept = [], 0
    if stage.embedding:
        block = block_of("embedding", embedding)
        kept = block.kept_bytes
        runs.append(_Run("embedding", block, kept, 0))
    # Kept bytes only grow, so the last layer of each kind is its worst.
    plain_layer, again_layer = block_of("layer", False), block_of("layer", True)
    before = kept
    # The kind whose last layer comes earlier is met first; its run counts the layers up to there.
    for whole, (num_plain, num_again) in sorted(((False, plain), (True, again)), key=lambda entry: sum(entry[1])):
        if num_plain + num_again:
            kept = before + num_plain * plain_layer.kept_bytes + num_again * again_layer.kept_bytes
            runs.append(_Run("layer", again_layer if whole else plain_layer, kept, 0))
    if stage.head:
        block = block_of("head", head)
        runs.append(_Run("head", block, kept + block.kept_bytes - block.logits_bytes, block.logits_bytes))
    return runs


@lru_cache(maxsize=4096)
def _recomputed(patterns: tuple[str, ...], layers: range) -> tuple[bool, bool, tuple[int, int], tuple[int, int]]:
    """Whether embedding and head are recomputed; then (plain layers, recomputed layers) up to the last plain layer and
    up to the last recomputed layer, (0, 0) without one.
    """

    def hit(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    counts, last = [0, 0], [(0, 0), (0, 0)]
    for index in layers:
        again = hit(f"layers.{index}")
        counts[again] += 1
        last[again] = (counts[0], counts[1])
    return hit("embedding"), hit("head"), last[0], last[1]
