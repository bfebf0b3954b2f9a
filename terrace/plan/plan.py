"""The Plan: a small frozen value that defines how a step is distributed over the cluster."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from terrace.plan.keep import ALL_ON_DEVICE, Keep
from terrace.plan.outer import ONE_ISLAND, Outer
from terrace.plan.update import Update
from terrace.plan.wire import (
    BETWEEN,
    CODES,
    OF_PARAMETERS,
    OF_STATES,
    MessageClass,
    WireFormat,
    by_boundary,
    parse_format,
)

AXES = ("data", "tensor", "context", "pipeline")
EXPERT_CHUNKS = ("forward", "backward", "ahead")  # of `Plan.expert_chunks`
OF_STACKS = ("experts", "expert_gaps")  # keys that determine buffers of stacks and parts of messages
OF_TRAINING = ("optimizer_states", "recompute", "expert_gaps")  # keys that only affect training
# Keys that a search chooses, besides the axes and the numbers that every plan has.
SEARCHED = ("params", "grads", "optimizer", "params_backward", "experts", "recompute", "unit", "schedule")
FUSED: Literal["fused"] = "fused"  # of `Plan.tensor_chunks`
TENSOR_AXES = ("rows", "columns", "depth")  # factors of a tensor degree; a plain number means rows
CONTEXT_AXES = ("ulysses", "ring")  # factors of a context degree; a plain number means ring
FACTORS = {"tensor": TENSOR_AXES, "context": CONTEXT_AXES}  # axes that a mapping may factor


_PRECISION = ("compute", "messages", "products", "master", "optimizer_states", "keep")


def precision_of(plan: Any) -> dict[str, Any]:
    """The keys of a plan, or of a planner's task, that say in which dtypes and where values are stored and sent."""
    return {name: getattr(plan, name) for name in _PRECISION}


def sums_of(master: Literal["bf16", "fp32", "fp64"]) -> Literal["fp32", "fp64"]:
    """Dtype of sums for a master dtype: fp32 for bf16, which would round each addition."""
    return "fp32" if master == "bf16" else master


def scales_rows(products: str) -> bool:
    """Whether 8-bit matmuls in this format scale each row of an operand, not the whole operand."""
    return ":row" in products


def shares_scales(products: str | None, wire: Mapping[str, Mapping[str, str]]) -> bool:
    """`Plan.shares_scales` for these `products` and `wire` keys."""
    if products is None or scales_rows(products):
        return False
    # REFRESH too: parameters that stay on a rank over a step are never gathered.
    named = (wire.get(message.value, {}).values() for message in (MessageClass.GATHER, MessageClass.REFRESH))
    return any(CODES.name in formats for formats in named)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Placements by tier name, the mapping table, wire formats, precision and schedule numbers.

    A state placed on a tier is sharded over all ranks of one group of that tier; `device` is the implicit innermost
    tier of size one, so a state placed there is replicated. A tier missing from `mapping` belongs to the data axis. A
    message class and tier missing from `wire` uses `messages` if it carries parameters or gradients, else `compute`.
    `terrace.plan.validate` checks a plan against a cluster and a model.
    """

    name: str = "custom"  # for display
    params: str  # tier over which parameters are sharded
    grads: str  # tier over which gradients are sharded
    optimizer: str  # tier over which optimizer states are sharded
    params_backward: str | None = None  # tier of a secondary copy of the parameters, which serves later gathers
    mapping: Mapping[str, Mapping[str, int | Mapping[str, int]]] = field(default_factory=dict)  # tier -> axis -> degree
    # Second factoring of the ranks, for experts: tier -> axis -> degree. "rows" cut every expert, "expert" ranks hold
    # different ones, the remaining ranks replicate them. Empty: experts are sharded like other parameters.
    experts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    # Number of ranks of a tier over which the rows of a look-up table are spread: tier -> degree (terrace.plan.tables).
    # Empty: the table is sharded like other parameters
    vocabulary: Mapping[str, int] = field(default_factory=dict)
    # Number of chunks in which tokens travel to their experts, overlapped with matmuls of other chunks: forward,
    # backward -> number; ahead: how many chunks are dispatched ahead of the matmuls. Each defaults to 1
    expert_chunks: Mapping[str, int] = field(default_factory=dict)
    # Shares of each gradient message that are sent in the gaps between the next layer's expert messages, the first
    # share before them (terrace.plan.gaps). "auto": found by simulating the step. Empty: all before them
    expert_gaps: Literal["auto"] | tuple[float, ...] = ()
    wire: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # message class -> tier -> format
    compute: Literal["bf16", "fp16", "fp32", "fp64"] = "fp32"  # dtype of the parameters that blocks run on
    messages: Literal["bf16", "fp32"] | None = None  # dtype of parameter and gradient messages; None: compute
    products: str | None = None  # 8-bit matmuls of layers: "fp8", "fp8:row" (terrace.plan.products); None: compute
    # Dtype of the parameters that the optimizer updates; bf16 uses stochastic rounding (terrace.runtime.noise)
    master: Literal["bf16", "fp32", "fp64"] = "fp32"
    # Whether masters have memory of their own even where blocks run on their dtype and need no gather
    master_apart: bool = field(default=False, metadata={"absent": False})
    optimizer_states: Literal["bf16", "int8"] | None = None  # format of stored moments; None: `sums`
    micro_batch: int = 1  # sequences per rank and micro-batch
    # Blocks, or operations in them, that the backward recomputes: "layers.*", "layers.* every 2: attention"
    # (terrace.plan.recompute)
    recompute: tuple[str, ...] = ()
    unit: int = 1  # micro-batches that pass a block in a row, with one gather and one reduction
    prefetch: int = 1  # number of visits ahead of use that a block is gathered
    balance: Literal["tokens", "cost"] = "tokens"  # how attention is divided among ranks (terrace.plan.context)
    sequence_parallel: bool = True  # split norms and residual stream over tensor rows; no effect without rows
    # Number of parts of tensor messages, each overlapped with the matmul of another part; "fused": matmul and message
    # are one operation on symmetric memory (CUDA)
    tensor_chunks: int | Literal["fused"] = 1
    # Pipeline schedule: "1f1b", "interleaved:3" for 3 chunks per stage, or "order.csv" (terrace.plan.order_file)
    schedule: str | None = None
    update: Update = "adamw"  # `optimizer.name` with the numbers that sizes depend on (terrace.plan.update)
    stages: tuple[int, ...] = ()  # blocks per virtual stage, in model order; empty: balanced by predicted time
    # Micro-batches of a step on each rank of each member of the outermost tier (terrace.plan.members); empty: equal
    shares: tuple[int, ...] = field(default=(), metadata={"absent": ()})
    # Member of the outermost tier that has the first, second, ... stages of a pipeline across it; empty: in their order
    order: tuple[int, ...] = field(default=(), metadata={"absent": ()})
    # The tier that is not synchronised every step, and how its islands exchange; None: all tiers are synchronised
    outer: Outer = field(default=ONE_ISLAND, metadata={"absent": ONE_ISLAND})
    # The states that are kept below the device between their uses
    keep: Keep = field(default=ALL_ON_DEVICE, metadata={"absent": ALL_ON_DEVICE})

    def wire_format(
        self, message: MessageClass, tier: str, *, coded: bool = False, boundary: int | None = None
    ) -> WireFormat:
        """Format in which `message` crosses `tier`. Raises `PlanError` for an unknown format.

        `coded`: the message carries matrices held as 8-bit codes, if the plan has any. `boundary` is that between two
        members that a message between stages crosses; without it the widest format of all boundaries is returned.
        """
        default = self.messages if self.messages is not None and message in OF_STATES else self.compute
        name = self.wire.get(message.value, {}).get(tier, default)
        if BETWEEN in name:
            if boundary is None:
                return max(self.wire_formats(message, tier), key=lambda each: each.message_bytes(1 << 20))
            name = by_boundary(name)[boundary]
        if message in OF_PARAMETERS and self.shares_scales:
            if coded:
                return CODES
            name = default if name == CODES.name else name
        return parse_format(name)

    def wire_formats(self, message: MessageClass, tier: str) -> tuple[WireFormat, ...]:
        """The formats in which `message` crosses `tier`: one, or that of each boundary."""
        name = self.wire.get(message.value, {}).get(tier, "")
        return tuple(map(parse_format, by_boundary(name))) if BETWEEN in name else (self.wire_format(message, tier),)

    @property
    def shares_scales(self) -> bool:
        """Whether matrices of 8-bit matmuls are held and gathered as 8-bit codes."""
        return shares_scales(self.products, self.wire)

    @property
    def sums(self) -> Literal["fp32", "fp64"]:
        """Dtype of accumulated gradients and of sums over ranks."""
        return sums_of(self.master)

    @property
    def fuses_tensor(self) -> bool:
        return self.tensor_chunks == FUSED

    @property
    def num_tensor_parts(self) -> int:
        """Number of parts of a tensor message; 1 if messages are fused."""
        return 1 if isinstance(self.tensor_chunks, str) else self.tensor_chunks

    @property
    def num_chunks(self) -> tuple[int, int]:
        """Number of token chunks sent to experts in a (forward, backward)."""
        return self.expert_chunks.get("forward", 1), self.expert_chunks.get("backward", 1)

    @property
    def leaves_out_chunks(self) -> bool:
        """Whether experts are distributed and some chunk numbers are left to be chosen."""
        return bool(self.experts) and any(name not in self.expert_chunks for name in EXPERT_CHUNKS)

    def with_routing_of(self, other: "Plan") -> "Plan":
        return replace(self, expert_chunks=other.expert_chunks, expert_gaps=other.expert_gaps)

    @property
    def chosen(self) -> dict[str, Any]:
        """The keys whose missing values are chosen when a step is built."""
        return {"stages": self.stages, "expert_chunks": self.expert_chunks}

    @property
    def expert_hops(self) -> int:
        """Number of messages that take a chunk to the experts: one per tier and axis of the table."""
        return sum(degree > 1 for axes in self.experts.values() for degree in axes.values())

    @property
    def finds_gaps(self) -> bool:
        """Whether `expert_gaps` is to be found by simulating the step."""
        return self.expert_gaps == "auto"

    def with_gaps(self, shares: tuple[float, ...]) -> "Plan":
        return replace(self, expert_gaps=shares)

    @property
    def gap_shares(self) -> tuple[float, ...]:
        """`expert_gaps` as numbers, for building programs."""
        assert not isinstance(self.expert_gaps, str), "shares are found before a program is built"
        return self.expert_gaps


def num_gaps(chunks: int) -> int:
    """Number of gaps in a backward of `chunks` chunks, including the point before its messages."""
    return chunks + 2
