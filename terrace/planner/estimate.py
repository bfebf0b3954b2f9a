"""Seconds and bytes for the planner: the only module between it and the simulator's formulas.

Results are for one task and cached, since a search asks for the same block on the same ranks many times. Blocks are
identified by kind (terrace.plan.kinds). No formula is defined here; messages inside a block are in
terrace.planner.inner.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import NamedTuple

from terrace.base.errors import PlanError
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec, Computes
from terrace.plan.edges import edge_coding_bytes
from terrace.plan.hops import Hop
from terrace.plan.layout import Layout, state_layout
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.recompute import WHOLE, operations_in
from terrace.plan.state_bytes import accumulates_in_place, keeps_master
from terrace.plan.wire import BETWEEN_STAGES, FORMATS, MessageClass, parse_format
from terrace.planner.experts import Experts
from terrace.planner.inner import NOTHING, Inner, PassSeconds
from terrace.planner.numels import Numels, groups_of
from terrace.planner.parts import Needs, Part, Split, kinds_of
from terrace.planner.stage_specs import data_cluster, flat_blocks, joined_params
from terrace.planner.task import Candidate, Placement, Task, plan_of
from terrace.planner.updates import moment_bytes, rests_master, updated_s
from terrace.program.schedules.registry import takes_unit
from terrace.sequence.lengths import Ragged
from terrace.simulate.activations import activations_of
from terrace.simulate.chunks import Numbers
from terrace.simulate.footprint import (
    CPU_CONTEXT_BYTES,
    CUDA_ALLOCATOR_FACTOR,
    CUDA_CONTEXT_BYTES,
    LOAD_FACTOR,
    grads_share,
    stage_footprint,
)
from terrace.simulate.layers import BlockSeconds, at_once, seconds_of
from terrace.simulate.links import coding_s, send_s, tier_penalty, waits_for_sends
from terrace.simulate.masks import has_flash_attention, work_in
from terrace.simulate.trained import trained_part
from terrace.simulate.work import Work


class Seconds(NamedTuple):
    """Seconds of one block on one micro-batch, including messages of its tensor and context ranks.

    `weight_s` is the part of `backward_s` that can be delayed. Recomputing the whole block adds `recompute_s`.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    recompute_s: float


class Estimator:
    def __init__(self, task: Task) -> None:
        self.task, self.specs, self.split = task, task.kinds.specs, Split(task)
        self.item = FORMATS[task.compute].element_bytes
        self.inner, self.experts, self.numels = Inner(task), Experts(task), Numels(task.kinds, self.item)
        self._trained = [trained_part(spec, task.blocks) for spec in self.specs]
        self._flash = has_flash_attention(task.layer.core, task.sequence, task.compute, task.backend)
        self._flash &= task.cluster.device.software.kernels.flash
        # Whether a rank's compute depends only on its tokens, not on the context form: false for products that
        # materialise scores, whose tiles depend on their shapes, and for scans of linear layers, by runs.
        one = Work(layer=task.layer, sequence=task.sequence, flash=self._flash, compute=task.compute)
        self.computes_by_tokens = all(
            work_in(one, spec, task.backend).flash and not spec.operations.delta.heads
            for spec in self.specs
            if spec.attends
        )
        self._works: dict[tuple[object, ...], Work] = {}
        self._blocks: dict[tuple[object, ...], Seconds] = {}
        self._tensors: dict[tuple[object, ...], PassSeconds] = {}
        self._kernels: dict[tuple[int, ...], BlockSeconds] = {}
        self._kept: dict[tuple[object, ...], int] = {}
        self._edges: dict[tuple[object, ...], float] = {}
        self._plans: dict[Candidate, Plan] = {}
        self._groups: dict[tuple[object, ...], list[float]] = {}
        self._placed: dict[Placement, Plan] = {}
        self._layouts: dict[tuple[tuple[int, ...], Placement], tuple[Layout, Plan]] = {}

    def work(self, mesh: Mesh, micro_batch: int, recompute: int = 0) -> Work:
        key = (mesh.inside_degrees, mesh.stack_degrees, micro_batch, recompute)
        found = self._works.get(key)
        if found is None:
            tensor, columns, ulysses, ring = mesh.inside_degrees
            parts = self.task.recomputations.values[recompute].parts if recompute else ()
            found = self._works[key] = Work(
                layer=self.task.layer,
                sequence=self.task.sequence,
                micro_batch=micro_batch,
                tensor=tensor,
                columns=columns,
                ulysses=ulysses,
                ring=ring,
                recompute="full" if parts == WHOLE else "none",
                operations=operations_in(parts),
                flash=self._flash,
                compute=self.task.compute,
                products=self.task.products,
                expert=mesh.stack_degrees[0],
                expert_rows=mesh.stack_degrees[1],
                load=1.0 if not mesh.divides_stacks else LOAD_FACTOR,
                documents=bool(self.task.lengths),
                ragged=Ragged(self.task.lengths),  # of one data rank: the slowest of all is played
            )
        return found

    def block(
        self, kind: int, mesh: Mesh, micro_batch: int, *, context: bool = True, exact: bool = True, halves: bool = False
    ) -> Seconds:
        """Seconds of a block on one micro-batch.

        Without `context` it counts no messages of context ranks. If not `exact`, messages of experts hide behind all of
        their computing, whatever their chunks, which takes a fraction of the time. With `halves`, weight gradients are
        a separate pass and hide none of them.
        """
        accumulate = self.accumulates(mesh, micro_batch)
        if not self.specs[kind].attends:  # it sees tokens only, whatever the context ranks
            key: tuple[object, ...] = (kind, mesh.only("tensor"), self.work(mesh, micro_batch).tokens, accumulate)
        elif mesh.divides_stacks and self.specs[kind].has_stacks:
            key = (kind, mesh.inside, micro_batch, accumulate, context, exact, exact and halves)
        else:
            key = (kind, mesh.inside, micro_batch, accumulate, context)
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = self._summed(kind, mesh, micro_batch, accumulate, context, exact, halves)
        return found

    def accumulates(self, mesh: Mesh, micro_batch: int) -> bool:
        return mesh.total("data") * micro_batch < self.task.batch

    def _summed(
        self, kind: int, mesh: Mesh, micro_batch: int, accumulate: bool, context: bool, exact: bool, halves: bool
    ) -> Seconds:
        work, waits = self.work(mesh, micro_batch), NOTHING
        if mesh.divides_stacks and self.specs[kind].has_stacks and not exact:
            own = self.compute(kind, mesh, micro_batch, accumulate, pieces=1)
            waits = self.experts.least_waits(kind, mesh, work, accumulate)
            passes = self.inner.tensor(kind, mesh, work, own.longer(waits[0], waits[1], waits[1]))
        else:
            own = self.compute(kind, mesh, micro_batch, accumulate)
            passes = self.tensor_waits(kind, mesh, micro_batch, accumulate)
            if mesh.divides_stacks and self.specs[kind].has_stacks:
                waits = self.experts.waits(kind, mesh, work, accumulate, halves)
        in_context = self.inner.context(kind, mesh, work) if context else NOTHING
        forward_s, backward_s, recompute_s = map(sum, zip(passes, in_context, waits, strict=True))
        return Seconds(
            own.forward_s + forward_s,
            own.input_s + own.weight_s + backward_s,
            own.weight_s,
            own.forward_s - own.saved_s + recompute_s,
        )

    def context(self, kind: int, mesh: Mesh, micro_batch: int) -> PassSeconds:
        return self.inner.context(kind, mesh, self.work(mesh, micro_batch))

    def tensor_waits(self, kind: int, mesh: Mesh, micro_batch: int, accumulate: bool) -> PassSeconds:
        """Seconds that a block's passes wait for tensor ranks."""
        # Only the number of context ranks matters.
        key = (kind, mesh.only("tensor"), mesh.inside_degrees, micro_batch, accumulate)
        found = self._tensors.get(key)
        if found is None:
            own = self.compute(kind, mesh, micro_batch, accumulate)
            found = self._tensors[key] = self.inner.tensor(kind, mesh, self.work(mesh, micro_batch), own)
        return found

    def compute(
        self, kind: int, mesh: Mesh, micro_batch: int, accumulate: bool, pieces: int | None = None
    ) -> BlockSeconds:
        """Seconds of a block on one micro-batch without messages; tokens of experts go in `pieces`, or the best."""
        # The key has only what kernels depend on, so that many meshes share an entry: only attention depends on
        # sequences.
        tensor, columns, ulysses, ring = mesh.inside_degrees
        spec = self.specs[kind]
        key: tuple[int, ...] = (kind, tensor, columns, accumulate, ulysses, ring, micro_batch)
        if mesh.divides_stacks:
            pieces = pieces or self.experts.chunks(mesh, self.work(mesh, micro_batch), accumulate).pieces
            key = (*key, *mesh.stack_degrees, pieces)
        if not spec.attends:
            key = (kind, tensor, columns, accumulate, self.work(mesh, micro_batch).tokens)
        found = self._kernels.get(key)
        if found is None:
            device, work = self.task.cluster.device, self.work(mesh, micro_batch)
            divided = None
            if mesh.divides_stacks:
                divided = self.experts.divided(kind, mesh, work, accumulate, pieces or 1)
            found = seconds_of(device, work, spec, accumulate=accumulate, divided=divided)
            # Frozen matrices get no gradient, as in a program's costs.
            if self._trained[kind] != 1.0:
                found = replace(found, weight_s=found.weight_s * self._trained[kind])
            in_chunks = spec.computes is Computes.LOGITS and tensor == 1
            found = self._kernels[key] = at_once(found) if in_chunks else found
        return found

    def chunks(self, mesh: Mesh, micro_batch: int) -> Numbers:
        return self.experts.chunks(mesh, self.work(mesh, micro_batch), self.accumulates(mesh, micro_batch))

    def plan(self, candidate: Candidate) -> Plan:
        plan = plan_of(self.task, candidate)
        if not candidate.mesh.divides_stacks:
            return plan
        return replace(plan, expert_chunks=self.chunks(candidate.mesh, candidate.micro_batch).table)

    def boundary_s(self, mesh: Mesh, micro_batch: int) -> float:
        """Seconds to send an activation to the next stage, on the slowest tier that a stage boundary crosses.

        The mean over both directions, which may have different formats, including coding.
        """
        crossed = mesh.tiers("pipeline")
        key = (mesh.total("tensor"), mesh.total("ulysses"), mesh.total("context"), micro_batch, crossed)
        found = self._edges.get(key)
        if found is None:
            part = self._boundary_bytes(mesh, micro_batch)
            found = self._edges[key] = max((self._sent_s(tier, part) for tier in crossed), default=0.0)
        return found

    def _sent_s(self, tier: int, num_bytes: float) -> float:
        cluster, wire = self.task.cluster, self.task.wire
        if not any(message in wire for message in BETWEEN_STAGES):
            return send_s(cluster, tier, num_bytes)
        total_s = 0.0
        for message in BETWEEN_STAGES:
            format_ = parse_format(wire.get(message, {}).get(cluster.tiers[tier].name, self.task.compute))
            hop = Hop(tier, 2, format_, round(num_bytes / self.item))
            total_s += send_s(cluster, tier, hop.part_bytes)
            total_s += coding_s(cluster, edge_coding_bytes(self.task.compute, hop))
        return total_s / len(BETWEEN_STAGES)

    def sending_s(self, mesh: Mesh, micro_batch: int) -> float:
        """Slow-down of compute by a message to the next stage, in seconds, on the outermost tier crossed."""
        cluster, crossed = self.task.cluster, mesh.tiers("pipeline")
        if not crossed:
            return 0.0
        waits = waits_for_sends(cluster, MessageClass.PIPELINE, False)
        return self.boundary_s(mesh, micro_batch) * (1.0 if waits else tier_penalty(cluster, crossed[-1]))

    def tie_s(self, candidate: Candidate, owner: int) -> float:
        """Seconds in which two stages sum the gradient of a tied block (terrace.plan.edges)."""
        mesh, cluster = candidate.mesh, self.task.cluster
        numel = self.numels.trained(mesh)[self.task.kinds.order[owner]]
        # The gradient is already reduced, so each rank sends its own shard.
        held = numel / math.prod(mesh.state[: candidate.placement.grads + 1])
        return send_s(cluster, mesh.tiers("pipeline")[-1], held * FORMATS[self.task.sums].element_bytes)

    def _boundary_bytes(self, mesh: Mesh, micro_batch: int) -> float:
        work = self.work(mesh, micro_batch)
        # Each tensor rank sends only its shard; the receivers gather it.
        return work.tokens * self.task.layer.hidden.numel * self.item / work.tensor

    def update_s(self, mesh: Mesh, placement: Placement, numels: Sequence[float]) -> float:
        """Optimizer seconds of a rank's shards of `numels` trainable parameters, by group of `Elements`; 0 for none."""
        owned = 0.0
        for numel, degrees in zip(numels, groups_of(mesh), strict=True):
            owned += numel / math.prod(degrees[: placement.optimizer + 1])
        return updated_s(self.task, owned)

    def layout(self, degrees: tuple[int, ...], placement: Placement) -> tuple[Layout, Plan]:
        """State layout over `degrees` data ranks, and a plan with this placement."""
        key = (degrees, placement)
        found = self._layouts.get(key)
        if found is None:
            mesh = Mesh.build(len(degrees), data=degrees)
            # Plans are shared between degrees: a layout with a given mesh reads no mapping. Wire formats depend on it.
            plan = None if self.task.wire else self._placed.get(placement)
            if plan is None:
                plan = self._placed[placement] = plan_of(self.task, Candidate(0, 1, "", 1, 1, placement, mesh))
            found = self._layouts[key] = Layout.of(data_cluster(self.task.cluster, degrees), plan, mesh=mesh), plan
        return found

    def group_bytes(self, mesh: Mesh, placement: Placement) -> list[float]:
        """`state_bytes` of the groups of `Elements`: of three that train, and of three that do not."""
        key = (*groups_of(mesh), placement)
        found = self._groups.get(key)
        if found is None:
            both = [(degrees, trains) for trains in (True, False) for degrees in key[:3]]
            found = self._groups[key] = [self.state_bytes(each, placement, trains=trains) for each, trains in both]
        return found

    def state_bytes(self, degrees: tuple[int, ...], placement: Placement, *, trains: bool = True) -> float:
        """Bytes per parameter on a rank: bp / S_p + bg / S_g + bo / S_o, including a secondary copy.

        Only those of the copies, unless it `trains`.
        """
        layout, plan = self.layout(degrees, placement)
        summed = 0.0 if layout.grads_below else FORMATS[self.task.sums].element_bytes / layout.span(layout.grads)
        summed *= grads_share(self.task.cluster.device, self.task.sums)
        copies = 0.0 if layout.params_below else self.item / layout.span(layout.params)
        # The secondary copy is sharded over fewer ranks, so it takes more memory.
        copies += self.item / layout.span(layout.params_backward) if layout.has_secondary else 0.0
        if not trains:
            return copies
        # Two moments of AdamW, and master weights that are separate, unless they are kept below.
        owned = 0.0 if self.task.keep.optimizer_below else moment_bytes(self.task)
        if keeps_master(plan, layout) and not rests_master(self.task):
            owned += FORMATS[self.task.master].element_bytes
        return copies + summed + owned / layout.span(layout.optimizer)

    def whole_bytes(self, tensors_bytes: float) -> float:
        """Memory of a process with `tensors_bytes` of tensors, including allocator and context."""
        # The caching allocator's fragmentation and the CUDA context come on top of the tensors.
        if self.task.backend == "cuda":
            return CUDA_ALLOCATOR_FACTOR * tensors_bytes + CUDA_CONTEXT_BYTES
        return tensors_bytes + (CPU_CONTEXT_BYTES if self.task.backend == "cpu" else 0)

    def kept_bytes(self, kind: int, mesh: Mesh, micro_batch: int, recompute: int) -> int:
        """Bytes that a block keeps per micro-batch until its backward, without those that do not scale with
        sequences.
        """
        spec = self.specs[kind]
        # Activations depend on the number of ranks, not on their tiers.
        again = 0 if spec.at_an_end else recompute
        key = (kind, mesh.inside_degrees, mesh.stack_degrees, again)
        found = self._kept.get(key)
        if found is None:
            work = self.work(mesh, 1, again)
            held = activations_of(work, spec, self.task.backend)
            found = held.kept_bytes - held.fixed_bytes
            if mesh.divides_stacks or (mesh.total("tensor") > 1 and spec.has_stacks):
                # Expert rows of several sequences are rounded up together.
                found -= 2 * found // work.tokens
            self._kept[key] = found
        # Every other tensor that is kept has a row for each sequence.
        return micro_batch * found

    def _blocks_of(self, kinds: Sequence[int]) -> tuple[int, ...]:
        # The first block of a kind represents all.
        return tuple(self.task.kinds.first[kind] for kind in kinds)

    def stage_blocks(self, kinds: Sequence[int], mesh: Mesh) -> tuple[BlockSpec, ...]:
        """A tensor rank's slices of the blocks of a stage (`flat_blocks`)."""
        return flat_blocks(self.task, self.numels, mesh, self._blocks_of(kinds))

    def chunk_params(self, part: Part, mesh: Mesh) -> list[tuple[ParamSpec, ...]]:
        """A tensor rank's slices of the chunks of a stage, each one flat trainable and one flat frozen parameter."""
        if mesh.divides_stacks or (mesh.total("tensor") > 1 and any(spec.has_stacks for spec in self.specs)):
            raise PlanError("chunks that pass as a whole have experts on all ranks: choose another schedule")
        blocks = iter(self.stage_blocks(part.kinds, mesh))
        return [joined_params(list(islice(blocks, len(kinds_of(runs))))) for runs in part.chunks]

    def _whole_chunks(self, candidate: Candidate, part: Part) -> tuple[int, int] | None:
        # Only with units is more than one chunk whole at a time.
        if not takes_unit(candidate.schedule):
            return None
        mesh, plan = candidate.mesh, self._plan(candidate)
        chunks, layout = self.chunk_params(part, mesh), state_layout(self.task.cluster, plan)
        every, trained = (
            [sum(param.numel for param in chunk if param.trainable or not alone) for chunk in chunks]
            for alone in (False, True)
        )
        # Two neighbouring chunks are whole at once: one is computed while the next is gathered or the previous one
        # reduced.
        gathered, reduced = (self.item * max(map(sum, pairwise([*sizes, 0]))) for sizes in (every, trained))
        return gathered if layout.frees else 0, 0 if accumulates_in_place(layout) else reduced

    def memory_bytes(self, candidate: Candidate, needs: Needs, num_micros: int) -> dict[str, int]:
        task = self.task
        cluster, plan = task.whole(self._plan(candidate))
        chunks = [self._blocks_of(kinds_of(runs)) for runs in needs.part.chunks]
        if candidate.first:  # then blocks of a kind differ
            chunks = [tuple(range(len(task.blocks)))]
        rank = cluster, plan, task.kinds, task.sequence, num_micros, chunks, needs.waiting
        whole = self._whole_chunks(candidate, needs.part)
        found = stage_footprint(*rank, due=needs.due, layer=task.layer, whole=whole)
        return {name: size for name, size in found.items() if size}

    def _plan(self, candidate: Candidate) -> Plan:
        if candidate not in self._plans:  # without a schedule, whose effect on memory is in `waiting`
            self._plans[candidate] = replace(self.plan(candidate), schedule=None)
        return self._plans[candidate]
