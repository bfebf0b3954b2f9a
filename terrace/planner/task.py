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
from terrace.model.experts.config import ExpertsConfig
from terrace.model.facts import longest_row
from terrace.model.operations import Operations
from terrace.model.spec import BlockSpec
from terrace.plan.chunk_rules import why_not_fused
from terrace.plan.context import Heads, attention_heads
from terrace.plan.dims import declared_hidden_size
from terrace.plan.kinds import Kinds
from terrace.plan.mesh import Mesh
from terrace.plan.outer import Outer
from terrace.plan.plan import FUSED, Plan, precision_of, shares_scales, sums_of
from terrace.plan.recompute import WHOLE
from terrace.plan.residency import residual_patterns
from terrace.plan.wire import MessageClass
from terrace.plan.wire_rules import crossing
from terrace.planner.recomputation import Recomputations
from terrace.simulate.block_tape import Backend
from terrace.simulate.layers import rounding_bytes

_MOST = 10**9  # so that divisors are found at once
# The largest batches that language models were trained with are below (65,536: You et al. 1904.00962).
MOST_SEQUENCES = 100_000
Wire = Mapping[str, Mapping[str, str]]  # message class -> tier -> format, as in a plan


@dataclass(frozen=True, kw_only=True)
class Islands:
    """The islands of which a task's cluster is one: `cluster` is all of them, `outer` how they exchange.

    `formats` are the row of `outer` in the table of wire formats.
    """

    cluster: Cluster
    outer: Outer
    formats: Mapping[str, str] = field(default_factory=dict, hash=False)

    def joined(self, plan: Plan) -> Plan:
        """The plan of all islands, from the plan of one."""
        wire = {**plan.wire, MessageClass.OUTER.value: self.formats} if self.formats else plan.wire
        return replace(plan, outer=self.outer, wire=wire)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, a cluster, a global batch in sequences, a sequence length in tokens, and dtypes.

    The blocks are the ones of `model`'s configuration, or `declared`, which may differ in any way; `model` then has the
    sizes that they share. `wire` and `messages` hold the formats of every plan of the task, where it has such messages;
    the search never chooses to round one. With `islands`, the cluster is one of them, and `batch` is its part. Raises
    `ModelError` or `PlanError` for a task without any valid plan.
    """

    model: ModelConfig
    cluster: Cluster
    batch: int
    sequence: int
    compute: Literal["bf16", "fp16", "fp32", "fp64"] = "bf16"
    master: Literal["bf16", "fp32", "fp64"] = "fp32"
    optimizer_states: Literal["bf16", "int8"] | None = None
    messages: Literal["bf16", "fp32"] | None = None  # as in a plan
    products: str | None = None  # as in a plan
    tensor_chunks: int | Literal["fused"] = 1  # as in a plan, of those that can have it
    wire: Wire = field(default_factory=dict, hash=False)
    declared: tuple[BlockSpec, ...] = field(default=(), hash=False)
    islands: Islands | None = None
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
        """Kernel backend of the device; it decides which activations are kept."""
        return self.cluster.device.backend

    @cached_property
    def blocks(self) -> tuple[BlockSpec, ...]:
        return self.declared or block_specs(self.model)

    @cached_property
    def layer(self) -> Operations:
        """The operations of a layer, of which the model's layers differ in details."""
        return layer_operations(self.model)

    @cached_property
    def kinds(self) -> Kinds:
        """The blocks by kind; the planner names a kind by its number."""
        return Kinds.of(self.blocks)

    @cached_property
    def inner(self) -> range:
        """The blocks between look-ups and logits, which a pipeline shares among its stages."""
        kept = [index for index, block in enumerate(self.blocks) if not block.at_an_end]
        return range(kept[0], kept[-1] + 1) if kept else range(0)

    @cached_property
    def recomputations(self) -> Recomputations:
        """The choices of recomputation."""
        # Prices stand above tasks in the order of imports.
        from terrace.planner.operations import recomputations_of

        return recomputations_of(self)

    @cached_property
    def ends(self) -> int:
        """How many virtual stages, of both ends, may have no block between look-ups and logits.

        0 without logits: a stage with nothing but look-ups would be idle.
        """
        if self.inner.stop in (0, len(self.kinds.order)):
            return 0
        return 2 if self.inner.start else 1

    @cached_property
    def most_stages(self) -> int:
        """The most stages that a pipeline may have."""
        # Messages between stages go by the hidden size.
        return max(1, len(self.inner) + self.ends) if declared_hidden_size(self.kinds.specs) else 1

    def recomputed(self, value: int, first: int = 0, patterns: Iterable[str] | None = None) -> tuple[str, ...]:
        """Entries of a plan whose candidate has these `recompute` and `first`.

        `patterns` match its layers, all of the task by default.
        """
        again = self.recomputations.values[value]
        found = list[str]()
        for parts, which in ((again.parts, f" first {first}" if first else ""), (again.others if first else (), "")):
            operations = "" if parts == WHOLE else f": {', '.join(parts or ())}"
            named = residual_patterns(self.blocks) if patterns is None else patterns
            found += [f"{pattern}{which}{operations}" for pattern in named] if parts else []
        return tuple(found)

    def heads(self, num_rows: int) -> tuple[Heads, ...]:
        """Attention heads of each kind of block on each of `num_rows` tensor rows; none for kinds without any."""
        found = self._heads.get(num_rows)
        if found is None:
            each = (attention_heads(block, num_rows) for block in self.kinds.specs)
            found = self._heads[num_rows] = tuple(heads for heads in each if heads is not None)
        return found

    @cached_property
    def _heads(self) -> dict[int, tuple[Heads, ...]]:
        return {}

    @cached_property
    def experts(self) -> ExpertsConfig | None:
        """The experts of the model's mixtures; None for a model without, or with mixtures that differ."""
        known = {block.declared.mixture.experts for block in self.blocks if block.declared.mixture.each}
        return next(iter(known)) if len(known) == 1 else None

    @property
    def whole_batch(self) -> int:
        """Sequences of a step on all islands."""
        return self.batch * (self.islands.cluster.tiers[-1].size if self.islands is not None else 1)

    def whole(self, plan: Plan) -> tuple[Cluster, Plan]:
        """The cluster of all islands, and the plan of all for that of one; without islands, both as they are."""
        if self.islands is None:
            return self.cluster, plan
        return self.islands.cluster, self.islands.joined(plan)

    @property
    def peak_flops_per_s(self) -> float:
        """Peak of one device in the compute dtype."""
        return self.cluster.device.peak_flops_per_s[self.compute]


class Placement(NamedTuple):
    """Tier index of each state; -1 is `device`. `backward` is -1 without a secondary copy."""

    params: int
    grads: int
    optimizer: int
    backward: int = -1


class Candidate(NamedTuple):
    """One point of the search space. Equal costs are resolved by sort order."""

    recompute: int  # what blocks but look-ups and logits compute again (`Task.recomputations`); 0: nothing
    unit: int
    schedule: str
    chunks: int  # pipeline chunks per stage
    micro_batch: int
    placement: Placement
    mesh: Mesh
    first: int = 0  # layers that `recompute` names, if it treats the first apart


def check_searched(task: Task) -> None:
    """Raise `PlanError` for matrices that are held as codes, which bounds and orders of a search do not price."""
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
    """The candidate as a plan."""
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
        experts=candidate.mesh.expert_table(tiers),
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
    """A plan of a mesh with the task's parts of tensor messages, if it can have them."""
    value = task.tensor_chunks
    if value == 1 or not mesh.tiers("rows") or (value == FUSED and why_not_fused(task.cluster, mesh, plan)):
        return plan
    return replace(plan, tensor_chunks=value)


def with_dtypes(task: Task, plan: Plan) -> Plan:
    """A plan with the task's dtypes in place of its own."""
    return replace(
        plan,
        **precision_of(task),
    )


def schedule_text(schedule: str, chunks: int) -> str:
    """A schedule as named in a plan: with the chunks per stage if there are several."""
    return f"{schedule}:{chunks}" if chunks > 1 else schedule


def expert_words(table: Mapping[str, Mapping[str, int]]) -> str:
    """The table `experts` of a plan in a line."""
    tiers = (f"{tier} {' x '.join(f'{axis} {degree}' for axis, degree in row.items())}" for tier, row in table.items())
    return ", ".join(tiers) or "none"
