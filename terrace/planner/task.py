"""The planner's input, and its candidates: plans as integers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from terrace.base.errors import ModelError, PlanError
from terrace.base.words import counted
from terrace.cluster.cluster import Cluster
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.model.facts import longest_row
from terrace.model.operations import Operations
from terrace.model.spec import BlockSpec
from terrace.plan.chunk_rules import why_not_fused
from terrace.plan.context import Heads, attention_heads
from terrace.plan.dims import declared_hidden_size, stack_sizes
from terrace.plan.keep import ALL_ON_DEVICE, Keep
from terrace.plan.kinds import Kinds
from terrace.plan.mesh import Mesh
from terrace.plan.outer import ONE_ISLAND, Outer
from terrace.plan.plan import FUSED, Plan, precision_of, shares_scales, sums_of
from terrace.plan.recompute import WHOLE
from terrace.plan.residency import residual_patterns
from terrace.plan.wire import MessageClass
from terrace.plan.wire_rules import crossing
from terrace.planner.recomputation import Recomputations
from terrace.sequence.lengths import NO_LENGTHS, Lengths
from terrace.simulate.block_tape import Backend
from terrace.simulate.layers import rounding_bytes

_MOST = 10**9  # so that divisors are found at once
# The largest batches that language models were trained with are below (65,536: You et al. 1904.00962).
MOST_SEQUENCES = 100_000
Wire = Mapping[str, Mapping[str, str]]  # message class -> tier -> format, as in a plan


@dataclass(frozen=True, kw_only=True)
class Islands:
    """The number of islands, one of which is the task's cluster, and their exchange; the number may be 1.

    `formats` are the row of `outer` in the table of wire formats.
    """

    num: int = 1
    outer: Outer = ONE_ISLAND
    formats: Mapping[str, str] = field(default_factory=dict, hash=False)

    def joined(self, plan: Plan) -> Plan:
        if self.num == 1:
            return plan
        wire = {**plan.wire, MessageClass.OUTER.value: self.formats} if self.formats else plan.wire
        return replace(plan, outer=self.outer, wire=wire)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, a cluster, a global batch in sequences, a sequence length in tokens, and dtypes.

    The blocks are those of `model`'s configuration, or `declared`, which may differ in any way; `model` then has the
    sizes that they share. `wire` and `messages` hold the formats of every plan of the task that has such messages;
    the search never chooses to round one. With `islands`, the cluster is one island, and `batch` is its share. Raises
    `ModelError` or `PlanError` for a task without any valid plan.
    """

    model: ModelConfig
    cluster: Cluster
    batch: int
    sequence: int
    compute: Literal["bf16", "fp16", "fp32", "fp64"] = "bf16"
    master: Literal["bf16", "fp32", "fp64"] = "fp32"
    optimizer_states: Literal["bf16", "int8"] | None = None
    keep: Keep = ALL_ON_DEVICE  # as in a plan
    messages: Literal["bf16", "fp32"] | None = None  # as in a plan
    products: str | None = None  # as in a plan
    tensor_chunks: int | Literal["fused"] = 1  # as in a plan, of those that can have it
    wire: Wire = field(default_factory=dict, hash=False)
    declared: tuple[BlockSpec, ...] = field(default=(), hash=False)
    islands: Islands = Islands()
    lengths: Lengths = NO_LENGTHS  # of the documents that rows hold
    # Operations of layers that plans recompute (terrace.plan.recompute); none: whole layers; None: searched.
    operations: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise PlanError(f"batch = {self.batch}: a step has at least one sequence")
        if self.sequence < 1:
            raise PlanError(f"sequence = {self.sequence}: a sequence has at least one token")
        if self.sequence > _MOST:
            raise PlanError(f"sequence = {self.sequence}: plans are searched up to {_MOST:,}; give a smaller one")
        if self.batch > MOST_SEQUENCES:
            meant = f", for {self.batch:,} tokens a step {self.batch // self.sequence:,}"
            raise PlanError(
                f"batch = {self.batch} counts sequences, so a step would have {self.batch * self.sequence:,} tokens: "
                f"plans are searched up to {MOST_SEQUENCES:,} sequences; give fewer"
                f"{meant if 1 <= self.batch // self.sequence <= MOST_SEQUENCES else ''}"
            )
        if self.cluster.world_size > _MOST:
            raise PlanError(
                f"cluster {self.cluster.name!r} has {counted(self.cluster.world_size, 'rank')}: plans are searched up "
                f"to {_MOST:,}; make its tiers smaller"
            )
        peaks = self.cluster.device.peak_flops_per_s
        # Checked here, since a missing peak would surface only deep in a search.
        if self.compute not in peaks:
            raise PlanError(
                f"compute = {self.compute!r}: the device of cluster {self.cluster.name!r} has no peak for it; "
                f"use one of {', '.join(sorted(peaks))}, or give device.peak_flops_per_s.{self.compute}"
            )
        if 0 < (most := longest_row(self.model)) < self.sequence:
            raise ModelError(
                f"sequence = {self.sequence} is longer than the {most} positions the model has: use at most {most}"
            )

    @property
    def sums(self) -> str:
        """As `Plan.sums`."""
        return sums_of(self.master)

    @cached_property
    def rounding_bytes(self) -> float:
        """Bytes that rounding of states adds to an update (terrace.simulate.layers)."""
        return rounding_bytes(self.cluster.device, self.master, self.optimizer_states)

    @property
    def backend(self) -> Backend:
        """Type of the device; it decides which activations are kept."""
        return self.cluster.device.type

    @cached_property
    def runs_all(self) -> bool:
        """Whether no plan is left out because the cluster's software does not run it."""
        return self.cluster.device.software.runs_all

    @cached_property
    def blocks(self) -> tuple[BlockSpec, ...]:
        return self.declared or block_specs(self.model)

    @cached_property
    def layer(self) -> Operations:
        """The operations of a layer; the model's layers differ from it only in details."""
        return layer_operations(self.model)

    @cached_property
    def kinds(self) -> Kinds:
        """The blocks by kind; the planner identifies a kind by its index."""
        return Kinds.of(self.blocks)

    @cached_property
    def inner(self) -> range:
        """Indexes of the blocks between look-ups and logits, which a pipeline shares among its stages."""
        kept = [index for index, block in enumerate(self.blocks) if not block.at_an_end]
        return range(kept[0], kept[-1] + 1) if kept else range(0)

    @cached_property
    def recomputations(self) -> Recomputations:
        # Imported here: only a search prices operations.
        from terrace.planner.operations import recomputations_of
        from terrace.simulate.masks import has_flash_attention
        from terrace.simulate.work import Work

        flash = has_flash_attention(self.layer.core, self.sequence, self.compute, self.backend)
        flash &= self.cluster.device.software.kernels.flash
        return recomputations_of(
            self.cluster.device,
            Work(layer=self.layer, sequence=self.sequence, flash=flash, compute=self.compute, products=self.products),
            [self.kinds.specs[self.kinds.order[index]] for index in self.inner],
            # Another software recomputes whole layers by default.
            operations=() if self.operations is None and not self.runs_all else self.operations,
            cuts=self.tensor_chunks != 1,
            # The first of individually named blocks cannot be given as a number.
            partly=len(self._layer_patterns) == 1,
        )

    @cached_property
    def _layer_patterns(self) -> tuple[str, ...]:
        return residual_patterns(self.blocks)

    @cached_property
    def ends(self) -> int:
        """How many of the first and last virtual stages may have no block between look-ups and logits.

        0 without logits: a stage with nothing but look-ups would be idle.
        """
        if self.inner.stop in (0, len(self.kinds.order)):
            return 0
        return 2 if self.inner.start else 1

    @cached_property
    def most_stages(self) -> int:
        # Messages between stages are sized by the hidden size.
        return max(1, len(self.inner) + self.ends) if declared_hidden_size(self.kinds.specs) else 1

    def recomputed(self, value: int, first: int = 0, patterns: Iterable[str] | None = None) -> tuple[str, ...]:
        """The `recompute` entries of a plan for these values of `recompute` and `first`.

        `patterns` match its layers; by default all of the task.
        """
        again = self.recomputations.values[value]
        found = list[str]()
        for parts, which in ((again.parts, f" first {first}" if first else ""), (again.others if first else (), "")):
            operations = "" if parts == WHOLE else f": {', '.join(parts or ())}"
            named = self._layer_patterns if patterns is None else patterns
            found += [f"{pattern}{which}{operations}" for pattern in named] if parts else []
        return tuple(found)

    def heads(self, num_rows: int) -> tuple[Heads, ...]:
        """Attention heads per tensor row of each kind of block that has heads, for `num_rows` rows."""
        found = self._heads.get(num_rows)
        if found is None:
            each = (attention_heads(block, num_rows) for block in self.kinds.specs)
            found = self._heads[num_rows] = tuple(heads for heads in each if heads is not None)
        return found

    @cached_property
    def _heads(self) -> dict[int, tuple[Heads, ...]]:
        return {}

    @cached_property
    def stack_sizes(self) -> tuple[int, int]:
        """Number of experts and inner size of an expert, which ranks may divide; (1, 1) without experts or if they
        differ.
        """
        return stack_sizes(self.kinds.specs)

    @property
    def divides_stacks(self) -> bool:
        return self.stack_sizes != (1, 1)

    @property
    def whole_batch(self) -> int:
        """Sequences per step over all islands."""
        return self.batch * self.islands.num

    @cached_property
    def whole_cluster(self) -> Cluster:
        num = self.islands.num
        return self.cluster if num == 1 else replace(self.cluster.resized(num), around=0)

    def whole(self, plan: Plan) -> tuple[Cluster, Plan]:
        """The cluster and the plan of all islands, from the plan of one."""
        return self.whole_cluster, self.islands.joined(plan)

    @property
    def peak_flops_per_s(self) -> float:
        return self.cluster.device.peak_flops_per_s[self.compute]


class Placement(NamedTuple):
    """Tier index of each state; -1 is `device`. `backward` is -1 without a secondary copy."""

    params: int
    grads: int
    optimizer: int
    backward: int = -1


class Candidate(NamedTuple):
    """One point of the search space. Sort order breaks ties of cost."""

    recompute: int  # what blocks but look-ups and logits compute again (`Task.recomputations`); 0: nothing
    unit: int
    schedule: str
    chunks: int  # pipeline chunks per stage
    micro_batch: int
    placement: Placement
    mesh: Mesh
    first: int = 0  # layers that `recompute` names, if it treats the first apart


def check_searched(task: Task) -> None:
    """Raise `PlanError` for matrices held as codes, which the search's bounds and orders do not price."""
    if shares_scales(task.products, task.wire):
        raise PlanError(
            f"products = {task.products!r} with wire.gather or wire.refresh in 'fp8': plans that hold matrices as the "
            "codes of their products are not searched; leave the format out, or write 'fp8:128', and compare the plan "
            "found by terrace simulate"
        )


def num_micros(task: Task, candidate: Candidate) -> int:
    """Micro-batches per step and data rank."""
    return task.batch // (candidate.mesh.total("data") * candidate.micro_batch)


def plan_of(task: Task, candidate: Candidate, name: str = "planned") -> Plan:
    tiers = [tier.name for tier in task.cluster.tiers]
    params, grads, optimizer, backward = ("device" if place < 0 else tiers[place] for place in candidate.placement)
    # A tier with nothing but data ranks needs no row.
    mapping = {tier: row for tier, row in candidate.mesh.mapping(tiers).items() if row.keys() - {"data"}}
    found = Plan(
        name=name,
        params=params,
        grads=grads,
        optimizer=optimizer,
        params_backward=None if candidate.placement.backward < 0 else backward,
        mapping=mapping,
        **candidate.mesh.stack_keys(tiers),
        wire=task.wire,
        **precision_of(task),
        micro_batch=candidate.micro_batch,
        recompute=task.recomputed(candidate.recompute, candidate.first),
        unit=candidate.unit,
        schedule=schedule_text(candidate.schedule, candidate.chunks) if candidate.mesh.total("pipeline") > 1 else None,
    )
    found = crossing(task.cluster, found) if task.wire else found
    return with_tensor_chunks(task, candidate.mesh, found)


def with_tensor_chunks(task: Task, mesh: Mesh, plan: Plan) -> Plan:
    """A plan of a mesh with the task's parts of tensor messages, where possible."""
    value = task.tensor_chunks
    if value == 1 or not mesh.tiers("rows") or (value == FUSED and why_not_fused(task.cluster, mesh, plan)):
        return plan
    return replace(plan, tensor_chunks=value)


def with_dtypes(task: Task, plan: Plan) -> Plan:
    return replace(plan, **precision_of(task))


def schedule_text(schedule: str, chunks: int) -> str:
    """A schedule as named in a plan, including the chunks per stage if there are several."""
    return f"{schedule}:{chunks}" if chunks > 1 else schedule
