"""The Plan: a small frozen value that says everything about how a step is spread over the cluster."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from terrace.plan.outer import ONE_ISLAND, Outer
from terrace.plan.update import Update
from terrace.plan.wire import CODES, OF_PARAMETERS, OF_STATES, MessageClass, WireFormat, parse_format

AXES = ("data", "tensor", "context", "pipeline")
EXPERT_CHUNKS = ("forward", "backward", "ahead")  # of `Plan.expert_chunks`
OF_STACKS = ("experts", "expert_gaps")  # keys on which buffers of stacks and parts of messages depend
OF_TRAINING = ("optimizer_states", "recompute", "expert_gaps")  # keys without effect on forwards alone
# Keys that a search chooses, but for the axes, and for numbers that every plan has.
SEARCHED = ("params", "grads", "optimizer", "params_backward", "experts", "recompute", "unit", "schedule")
FUSED: Literal["fused"] = "fused"  # of `Plan.tensor_chunks`
TENSOR_AXES = ("rows", "columns", "depth")  # how a tensor degree is factored; a number alone is its rows
CONTEXT_AXES = ("ulysses", "ring")  # how a context degree is factored; a number alone is its ring
FACTORS = {"tensor": TENSOR_AXES, "context": CONTEXT_AXES}  # of the axes that a mapping may factor


_PRECISION = ("compute", "messages", "products", "master", "optimizer_states")


def precision_of(plan: Any) -> dict[str, Any]:
    """The keys of a plan that say in which dtypes it computes, sends and stores; those of a planner's task, too."""
    return {name: getattr(plan, name) for name in _PRECISION}


def sums_of(master: Literal["bf16", "fp32", "fp64"]) -> Literal["fp32", "fp64"]:
    """Dtype of sums beside parameters in a dtype: in bf16 each addition would round."""
    return "fp32" if master == "bf16" else master


def scales_rows(products: str) -> bool:
    """Whether products in this format have a scale for each row of an operand, and not one for all."""
    return ":row" in products


def shares_scales(products: str | None, wire: Mapping[str, Mapping[str, str]]) -> bool:
    """`Plan.shares_scales` of a plan with these products and wire formats."""
    if products is None or scales_rows(products):
        return False
    # With parameters that stay on a rank over a step there are no gathers.
    named = (wire.get(message.value, {}).values() for message in (MessageClass.GATHER, MessageClass.REFRESH))
    return any(CODES.name in formats for formats in named)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Placements by tier name, the mapping table, wire formats, precision and schedule numbers.

    A state placed on a tier is sharded over all ranks of one group of that tier; `device` is the
    implicit innermost tier of size one, so a state placed there is replicated. A tier that is absent
    from `mapping` belongs wholly to the data axis. A message class and tier absent from `wire` travel
    in `messages` if they carry parameters or gradients, else in the compute dtype. `terrace.plan.validate` checks a
    plan against a cluster and a model.
    """

    name: str = "custom"  # shown on the screen
    params: str  # tier over which parameters are sharded
    grads: str  # tier over which gradients are sharded
    optimizer: str  # tier over which optimizer states are sharded
    params_backward: str | None = None  # where a secondary copy of the parameters serves later gathers
    mapping: Mapping[str, Mapping[str, int | Mapping[str, int]]] = field(default_factory=dict)  # tier -> axis -> degree
    # The same ranks once more, for experts: tier -> axis -> degree. Along rows every expert is cut, along expert ranks
    # hold different ones; the ranks left over hold the same. Empty: experts are as all other parameters.
    experts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    # Chunks in which tokens go to their experts, each while another is multiplied: forward, backward -> number; ahead:
    # how many are on inner tiers, or there, before the products of another. 1 where left out
    expert_chunks: Mapping[str, int] = field(default_factory=dict)
    # Shares of each gradient message in the gaps between the next layer's messages of experts (terrace.plan.gaps), the
    # first before them; "auto": found by playing the step. Empty: the whole message before them
    expert_gaps: Literal["auto"] | tuple[float, ...] = ()
    wire: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # message class -> tier -> format
    compute: Literal["bf16", "fp16", "fp32", "fp64"] = "fp32"  # dtype of the parameters that blocks run on
    messages: Literal["bf16", "fp32"] | None = None  # dtype of parameters and gradients on the way; None: compute
    products: str | None = None  # of layers in 8 bits: "fp8", "fp8:row" (terrace.plan.products); None: compute
    # Dtype of the parameters that the optimizer updates; bf16 is rounded stochastically (terrace.runtime.noise)
    master: Literal["bf16", "fp32", "fp64"] = "fp32"
    optimizer_states: Literal["bf16", "int8"] | None = None  # how moments are stored; None: as `sums`
    micro_batch: int = 1  # sequences per rank and micro-batch
    # Blocks, or operations of them, that a backward computes again: "layers.*", "layers.* every 2: attention"
    # (terrace.plan.recompute)
    recompute: tuple[str, ...] = ()
    unit: int = 1  # micro-batches that pass a block one after the other: one gather, one reduction
    prefetch: int = 1  # how many visits ahead a block is gathered
    balance: Literal["tokens", "cost"] = "tokens"  # what attention is shared by among ranks (terrace.plan.context)
    sequence_parallel: bool = True  # norms and residual stream split over tensor rows; no effect without them
    # Parts in which tensor messages travel, each while another part is multiplied; "fused": a product and its message
    # are one operation on memory that the ranks share (CUDA)
    tensor_chunks: int | Literal["fused"] = 1
    schedule: str | None = None  # of a pipeline: "1f1b", or "interleaved:3" for 3 chunks a stage
    update: Update = "adamw"  # as `optimizer.name`; of sgd with momentum "sgd+momentum"
    stages: tuple[int, ...] = ()  # blocks of every virtual stage, in model order; if empty, shared by modelled time
    # The tier that is not synchronised every step, and how its islands exchange; None: all are
    outer: Outer = field(default=ONE_ISLAND, metadata={"absent": ONE_ISLAND})

    def wire_format(self, message: MessageClass, tier: str, *, coded: bool = False) -> WireFormat:
        """Format in which `message` crosses `tier`; raises `PlanError` for an unknown format.

        `coded`: of matrices that are held as the codes of their products, if the plan has any.
        """
        default = self.messages if self.messages is not None and message in OF_STATES else self.compute
        name = self.wire.get(message.value, {}).get(tier, default)
        if message in OF_PARAMETERS and self.shares_scales:
            if coded:
                return CODES
            name = default if name == CODES.name else name
        return parse_format(name)

    @property
    def shares_scales(self) -> bool:
        """Whether matrices that are multiplied in 8 bits are held and gathered as the codes of their products."""
        return shares_scales(self.products, self.wire)

    @property
    def sums(self) -> Literal["fp32", "fp64"]:
        """Dtype of accumulated gradients and of sums over ranks."""
        return sums_of(self.master)

    @property
    def fuses_tensor(self) -> bool:
        """Whether products and their tensor messages are one operation."""
        return self.tensor_chunks == FUSED

    @property
    def num_tensor_parts(self) -> int:
        """Parts of tensor messages that are not fused; a fused one is whole to the program."""
        return 1 if isinstance(self.tensor_chunks, str) else self.tensor_chunks

    @property
    def num_chunks(self) -> tuple[int, int]:
        """Chunks in which tokens go to their experts, in a forward and in a backward."""
        return self.expert_chunks.get("forward", 1), self.expert_chunks.get("backward", 1)

    @property
    def leaves_out_chunks(self) -> bool:
        """Whether it spreads experts and leaves some numbers of chunks to be found."""
        return bool(self.experts) and any(name not in self.expert_chunks for name in EXPERT_CHUNKS)

    def with_routing_of(self, other: "Plan") -> "Plan":
        """The plan with the chunks of tokens and the shares of gradients of another."""
        return replace(self, expert_chunks=other.expert_chunks, expert_gaps=other.expert_gaps)

    def with_whole_stacks(self) -> "Plan":
        """The plan with all experts on every rank."""
        return replace(self, experts={}, expert_chunks={})

    @property
    def chosen(self) -> dict[str, Any]:
        """The keys that a step chooses where a plan leaves them out."""
        return {"stages": self.stages, "expert_chunks": self.expert_chunks}

    @property
    def expert_hops(self) -> int:
        """Messages of a chunk on its way to the experts: one for each tier and axis of the table."""
        return sum(degree > 1 for axes in self.experts.values() for degree in axes.values())

    @property
    def finds_gaps(self) -> bool:
        """Whether the shares of gradients in gaps are to be found by playing the step."""
        return self.expert_gaps == "auto"

    def with_gaps(self, shares: tuple[float, ...]) -> "Plan":
        """The plan with these shares of gradients in gaps."""
        return replace(self, expert_gaps=shares)

    @property
    def gap_shares(self) -> tuple[float, ...]:
        """`expert_gaps` in numbers, as programs have them."""
        assert not isinstance(self.expert_gaps, str), "shares are found before a program is built"
        return self.expert_gaps


def num_gaps(chunks: int) -> int:
    """Gaps of a backward of `chunks`, the place where the message is issued included."""
    return chunks + 2
