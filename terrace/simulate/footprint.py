"""Memory of one rank by category, in each phase of a step.

A phase's figure is the memory at its worst moment, not the sum of all peaks:

- forward: a block runs forward while everything kept by earlier blocks and other micro-batches is alive;
- backward: a block runs backward (or is recomputed first), with gradients of activations and parameters;
- update: only model state, under Muon with the whole matrices of two layers.

The categories are those of model state (terrace.simulate.states) and

    activations   kept by forwards for backwards, over all micro-batches in flight, without the logits
    experts       rows of experts: kept for backwards, and in messages and products of the running block; rows of a
                  spread table in messages
    logits        kept by the head; scales with the vocabulary
    working       of the running block beyond its activations: outputs, gradients, temporary tensors
    batch         tokens and labels of the step's micro-batches, int64; positions and masks where rows hold documents
    context       of a process before any tensor: libraries, kernels, communicators
    allocator     reserved beyond tensors: a share of them, at least pages that are not full

Scratch memory of kernels and RoPE's tables are in no category.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster, Device
from terrace.model.attention_kernel import AttentionChoice
from terrace.model.blocks import operations_of
from terrace.model.operations import Operations
from terrace.model.part_kernel import Part
from terrace.model.spec import BlockSpec
from terrace.plan.boundaries import leaving, passing_bytes
from terrace.plan.edges import edge_buffers, edge_feedback_bytes
from terrace.plan.in_block_messages import TensorMessage
from terrace.plan.keep import Keep
from terrace.plan.kept_rows import passing_bytes as passing_rows
from terrace.plan.kinds import Kinds
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.recompute import recomputed_parts
from terrace.plan.slices import spread_tables
from terrace.plan.tables import TableTraffic
from terrace.plan.tensor_traffic import TensorTraffic, shared_bytes
from terrace.plan.update import parse_update
from terrace.plan.wire import FORMATS, MessageClass
from terrace.program.block_program.regions import tensor_steps
from terrace.program.block_program.steps import messages_of
from terrace.program.resolve import tensor_message
from terrace.simulate.activations import BlockActivations, activations_of, recomputing
from terrace.simulate.block_tape import Backend
from terrace.simulate.masks import has_flash_attention, mask_bytes, work_in
from terrace.simulate.moments import Moment, Phase, Run, moments
from terrace.simulate.states import StageBlocks, look_ups_of, model_states, stage_blocks
from terrace.simulate.work import Work

# A CUDA context with loaded kernels and the buffers of a few NCCL communicators: a guess from 1 to 2 GB.
CUDA_CONTEXT_BYTES = 1_500_000_000
# Resident memory of a process after importing torch 2.13 (CPU), with gloo groups and one small step: measured 324 MB.
CPU_CONTEXT_BYTES = 324_000_000
# Caching allocators round blocks up and split them; 1.03 to 1.08 has been seen. On a CPU nothing is cached.
CUDA_ALLOCATOR_FACTOR = 1.05
# At least the ends of expandable segments: pools of small and of large blocks, for the streams of computing and of
# messages, each grow by pages of 2 or 20 MiB, of which the last is not full.
CUDA_PAGES_BYTES = 2 * (2 + 20) << 20

# Rows of the busiest rank's experts over the mean: 2.6 to 5.1 in real routing (DeepSpeed#8213); training balances it.
LOAD_FACTOR = 2.6

_TOKEN_BYTES = 8


def footprint(
    cluster: Cluster,
    plan: Plan,
    kinds: Kinds,
    sequence: int,
    num_micros: int,
    *,
    layer: Operations | None = None,
    held: Sequence[int] | None = None,
    in_flight: float | None = None,
    due: float | None = None,
    whole: tuple[int, int] | None = None,
    backend: Backend | None = None,
    phase: Phase | None = None,
    documents: bool = False,
    load: float = LOAD_FACTOR,
) -> dict[str, int]:
    """Bytes of one rank by category at the worst moment of a step, or of its `phase`; their sum is the peak.

    - `layer`: the operations of a layer that all blocks share; by default as blocks declare.
    - `held`: indexes of the blocks that the rank holds; all by default.
    - `in_flight`: maximum number of micro-batches in flight on a pipeline stage (may be fractional when interleaved).
      Default: that of the first stage of 1F1B; without a pipeline, the micro-batches of a unit.
    - `due`: how many of them at most wait for the second half of their backward; None without split backwards.
    - `whole`: bytes of full parameters and full gradients alive at once, where blocks are not gathered one by one.
    - `load`: rows of a rank's experts over the mean, where experts are on several ranks; `math.inf` is the worst case.
    - `documents`: rows may hold several documents; their masks and copies are counted at their upper bound.
    - `backend`: the device's by default; decides what kernels keep, and what context and allocator take.

    Raises `PlanError` for an invalid backend or number in flight, and `ClusterError` for an unknown tier.
    """
    backend, layer = backend or cluster.device.type, layer or operations_of(kinds.specs)
    mesh = Mesh.of(cluster, plan)
    kinds = kinds if mesh.tables is None else Kinds(spread_tables(kinds.blocks), kinds.order)
    num_stages = mesh.total("pipeline")
    work = _loaded(work_of(cluster, plan, layer, sequence, backend, documents), plan, load)
    held = range(len(kinds.blocks)) if held is None else tuple(held)
    stage = stage_blocks(kinds, held)
    if in_flight is None:
        # The first stage of 1F1B runs num_stages forwards before its first backward.
        in_flight = min(num_micros, plan.unit if num_stages == 1 else num_stages)
    if not 1 <= in_flight <= num_micros:
        raise PlanError(
            f"in_flight = {in_flight} of {num_micros} micro-batches: a stage holds at least 1 and at most all"
        )
    states = model_states(cluster, plan, kinds, stage, num_micros)
    steady = states.steady | {"buffers": states.steady["buffers"] + _passing_bytes(work, plan, kinds, held, backend)}
    if work.tensor > 1:
        steady["buffers"] += _tensor_buffers(cluster, plan, kinds, stage, sequence)
    if num_stages > 1:
        _add_edges(steady, plan, [cluster.tiers[tier].name for tier in mesh.tiers("pipeline")], work, kinds, held)
    look_ups = look_ups_of(cluster, plan, [kinds.blocks[index] for index in held], sequence)
    steady["grads"] = round(steady["grads"] * grads_share(cluster.device, plan.sums))
    _add_rows(steady, plan, look_ups, num_micros, backend)
    steady["batch"] = num_micros * (3 if documents else 2) * work.tokens * _TOKEN_BYTES
    steady["batch"] += (num_micros if documents else 1) * _mask_bytes(work, kinds.specs, backend)
    # Gradients of the previous micro-batch's last two blocks may still be in reduction during the next forward.
    pending = states.gradients[stage.order[0]] if num_micros > plan.unit else 0
    updating = {name: steady[name] + size for name, size in states.updating.items()}
    candidates = [steady | updating] if phase in (None, "update") else []
    for moment in _moments(work, kinds, held, plan.recompute, plan.keep, backend, in_flight, due, num_stages > 1):
        if phase in (None, moment.phase):
            gradients = states.last_gradients if moment.is_last else states.gradients
            running = {
                "gathered": whole[0] if whole else states.gathered[moment.kind],
                "grads_full": gradients[moment.kind] if moment.phase == "backward" else pending,
                "grads": steady["grads"] + states.accumulated[moment.kind] * (moment.phase == "backward"),
                "activations": moment.activations,
                "experts": moment.experts + look_ups.moving_bytes,
                "logits": moment.logits,
                "working": moment.working,
            }
            if whole:
                running["grads_full"] = whole[1]
            candidates.append(steady | running)
    worst = max(candidates, key=lambda categories: sum(categories.values()))
    return worst | _beside_tensors(cluster.device, backend, sum(worst.values()), any(states.gathered))


def _beside_tensors(device: Device, backend: Backend, tensors_bytes: int, gathers: bool) -> dict[str, int]:
    """Bytes of the allocator and of the context, which is outside of it; `gathers`: parameters are gathered for use."""
    if backend == "cpu":
        return {"allocator": 0, "context": CPU_CONTEXT_BYTES}
    factor = (gathers and device.software.gathering_allocator) or CUDA_ALLOCATOR_FACTOR
    return {"allocator": max(CUDA_PAGES_BYTES, int((factor - 1) * tensors_bytes)), "context": CUDA_CONTEXT_BYTES}


def grads_share(device: Device, sums: str) -> float:
    """Bytes of the device's software for an accumulated gradient, over those of a sum in `sums`."""
    own = FORMATS[sums].element_bytes
    return (device.software.grad_bytes or own) / own


def _add_rows(steady: dict[str, int], plan: Plan, look_ups: TableTraffic, num_micros: int, backend: str) -> None:
    """Add the gradients of used rows, and rows that are kept below while they are on the device."""
    steady["grads"] += look_ups.gradient_bytes(num_micros, plan.sums)
    steady["buffers"] += passing_rows(plan, look_ups, num_micros, in_host=backend == "cpu")


def _passing_bytes(work: Work, plan: Plan, kinds: Kinds, held: Sequence[int], backend: Backend) -> int:
    """Bytes of the buffers through which inputs pass that are kept below the device."""
    gone = leaving(plan.keep, kinds.blocks) & {*held}
    sizes = {activations_of(work, kinds.blocks[block], backend).input_bytes for block in gone}
    return passing_bytes(plan, max(sizes) // FORMATS[plan.compute].element_bytes) if sizes else 0


def _loaded(work: Work, plan: Plan, load: float) -> Work:
    return replace(work, load=load) if plan.experts else work


def _add_edges(
    steady: dict[str, int], plan: Plan, tiers: Sequence[str], work: Work, kinds: Kinds, held: Sequence[int]
) -> None:
    # Tensor ranks each send their shard of an activation.
    numel, last = work.tokens * work.layer.hidden.numel // work.tensor, len(kinds.blocks) - 1
    # A chunk begins after a gap in the block indexes, and ends before one.
    begins = [kinds.blocks[block].operations.widths[0] for block in held if block > 0 and block - 1 not in held]
    ends = [kinds.blocks[block].operations.widths[1] for block in held if block < last and block + 1 not in held]
    steady["buffers"] += edge_buffers(plan, tiers, numel * max([*begins, *ends], default=1))
    if any(wire.feedback for tier in tiers for wire in plan.wire_formats(MessageClass.PIPELINE_BACKWARD, tier)):
        # Each chunk sends a gradient back; the largest feedback counts.
        steady["feedback"] += sum(begins) * edge_feedback_bytes(numel)


def stage_footprint(
    cluster: Cluster,
    plan: Plan,
    kinds: Kinds,
    sequence: int,
    num_micros: int,
    chunks: Sequence[Sequence[int]],
    waiting: Sequence[int],
    *,
    due: Sequence[int] = (),
    layer: Operations | None = None,
    whole: tuple[int, int] | None = None,
    backend: Backend | None = None,
    load: float = LOAD_FACTOR,
) -> dict[str, int]:
    """`footprint` of a pipeline stage that holds `chunks` of blocks, each with `waiting` micro-batches in flight.

    `due` are, per chunk, the micro-batches that wait for the second half of their backward; empty without split
    backwards.
    """
    layer, backend = layer or operations_of(kinds.specs), backend or cluster.device.type
    work = _loaded(work_of(cluster, plan, layer, sequence, backend), plan, load)
    held = [_kept_by_chunk(work, kinds, tuple(chunk), plan.recompute, plan.keep, backend) for chunk in chunks]
    # One number in flight per stage: the mean over its chunks, weighted by kept bytes.
    kept = sum(size * waits for size, waits in zip(held, waiting, strict=True))
    return footprint(
        cluster,
        plan,
        kinds,
        sequence,
        num_micros,
        layer=layer,
        held=tuple(chain(*chunks)),
        in_flight=max(1.0, kept / sum(held) if sum(held) else max(waiting)),
        due=sum(due) / len(chunks) if due else None,
        whole=whole,
        backend=backend,
        load=load,
    )


def _tensor_buffers(cluster: Cluster, plan: Plan, kinds: Kinds, stage: StageBlocks, sequence: int) -> int:
    """Bytes of the buffers of the largest message inside a block, plus memory that tensor ranks share.

    One buffer suffices, since these messages are sent one at a time, in the middle of compute.
    """
    tensor = TensorTraffic.of(Mesh.of(cluster, plan), [tier.name for tier in cluster.tiers], plan, sequence)
    specs, largest = kinds.sliced(tensor.degrees), 0
    for kind in set(stage.order):
        passes, shared = tensor_steps(tensor, specs, specs[kind], ((), ()), False)
        for message in {each for steps in (*passes, *shared) for each in messages_of(steps)}:
            assert isinstance(message, TensorMessage), "attention and experts were left out"
            largest = max(largest, *tensor_message(tensor, message).arenas.values())
    return largest + shared_bytes(tensor, specs)


def work_of(
    cluster: Cluster,
    plan: Plan,
    layer: Operations,
    sequence: int,
    backend: Backend | None = None,
    documents: bool = False,
    attention: AttentionChoice = "auto",
    served: Sequence[Part] = (),
) -> Work:
    """Work of one micro-batch on a rank in a layer, without recomputation, with the decoder's choice of attention
    kernel.

    `documents`: a row may hold several. `attention`: the kernel that the run requests. `served`: the parts for which
    liger-kernel has kernels.
    """
    mesh = Mesh.of(cluster, plan)
    expert, rows = mesh.stack_degrees
    # Nothing is recomputed here: the plan's patterns are applied per block.
    work = Work(
        layer=layer,
        sequence=sequence,
        micro_batch=plan.micro_batch,
        tensor=mesh.total("tensor"),
        columns=mesh.total("columns"),
        sequence_parallel=plan.sequence_parallel,
        ulysses=mesh.total("ulysses"),
        ring=mesh.total("ring"),
        balance=plan.balance,
        pooled=mesh.total("data"),
        compute=plan.compute,
        products=plan.products,
        codes_of_weights=plan.shares_scales,
        flash=cluster.device.software.kernels.flash
        and has_flash_attention(
            layer.core, sequence, plan.compute, backend or cluster.device.type, documents, attention
        ),
        measures_scores=parse_update(plan.update).clips_scores,
        documents=documents,
        attention=attention,
        served=tuple(served),
        expert=expert,
        expert_rows=rows,
        expert_chunks=plan.num_chunks,
    )
    return replace(work, codes=_codes(cluster, plan, mesh, work)) if work.ring > 1 else work


def _mask_bytes(work: Work, specs: Sequence[BlockSpec], backend: Backend) -> int:
    """Mask bytes of a micro-batch, with one set of masks per window size of the layers."""
    windows = {block.operations.core.window: block for block in specs if block.operations.core.heads}
    if not windows:
        return mask_bytes(work, backend)
    return sum(mask_bytes(work_in(work, block, backend), backend) for block in windows.values())


def _codes(cluster: Cluster, plan: Plan, mesh: Mesh, work: Work) -> float:
    """Largest ratio of coded to uncoded key bytes over the tiers of the ring; 0 without a coded tier."""
    own = FORMATS[plan.compute]
    tiers = (cluster.tiers[tier].name for tier in mesh.tiers("ring"))
    wires = [plan.wire_format(MessageClass.CONTEXT, tier) for tier in tiers]
    numel = work.attended_kv_heads * work.layer.core.head_dim
    if not numel:  # maps of linear layers travel uncoded
        return 0.0
    return max((wire.message_bytes(numel) / own.message_bytes(numel) for wire in wires if wire != own), default=0.0)


@lru_cache(maxsize=65536)
def _moments(
    work: Work,
    kinds: Kinds,
    held: Sequence[int],
    recompute: tuple[str, ...],
    keep: Keep,
    backend: Backend,
    in_flight: float,
    due: float | None,
    pipelined: bool,
) -> tuple[Moment, ...]:
    return moments(_runs(work, kinds, held, recompute, keep, backend), in_flight, due, pipelined=pipelined)


@lru_cache(maxsize=4096)
def _runs(
    work: Work, kinds: Kinds, held: Sequence[int], recompute: tuple[str, ...], keep: Keep, backend: Backend
) -> tuple[Run, ...]:
    """The blocks `held` as runs of one kind and recomputation, in the order of their last blocks."""
    again = recomputed_parts(recompute, kinds.blocks)
    gone = leaving(keep, kinds.blocks)
    keys = [(kinds.order[index], again[index], index in gone) for index in held]

    def activations(kind: int, parts: tuple[str, ...]) -> tuple[BlockActivations, BlockActivations]:
        spec, of_block = kinds.specs[kind], recomputing(work, parts)
        found = activations_of(of_block, spec, backend)
        has_rows = spec.has_stacks
        return found, activations_of(replace(of_block, load=0.0), spec, backend) if has_rows else found

    known = {key: activations(*key) for key in {key[:2] for key in keys}}
    # Kept bytes only grow, so the last block of each (kind, recomputed parts) is the worst one.
    last: dict[tuple[int, tuple[str, ...], bool], Run] = {}
    kept = experts = logits = 0
    for key in keys:
        block, bare = known[key[:2]]
        left = block.input_bytes if key[2] else 0
        kept += bare.kept_bytes - block.logits_bytes - left
        experts += block.kept_bytes - bare.kept_bytes
        logits += block.logits_bytes
        before = last.pop(key, None)  # so that the runs are in the order of their last blocks
        before = replace(before, before=None) if before else None
        last[key] = Run(key[0], block, bare, before.count + 1 if before else 1, kept, experts, logits, before, left)
    return tuple(last.values())


@lru_cache(maxsize=4096)
def _kept_by_chunk(
    work: Work, kinds: Kinds, chunk: Sequence[int], recompute: tuple[str, ...], keep: Keep, backend: Backend
) -> int:
    """Bytes that a chunk of layers keeps of a micro-batch."""
    runs = _runs(work, kinds, chunk, recompute, keep, backend)
    # Logits and their input exist only while they are computed.
    return sum((run.block.kept_bytes - run.left) * run.count for run in runs if not kinds.specs[run.kind].at_an_end)
