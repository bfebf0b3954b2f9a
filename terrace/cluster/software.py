"""Software: what the program that runs a plan does in another way than this runtime, as a value of stated costs.

A `Software` is part of a device (`Device.software`), beside the shares of its peaks that kernels reach, so whatever
prices a step, counts its memory or gives its band reads the same value. `OWN` is this runtime and adds nothing; others
are in terrace.cluster.named_software. A cost is paid where the plan has what causes it: copies around a gather by plans
that gather, kernels of attention by layers that attend.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class KernelForms:
    """Kernels that differ from this runtime's; bytes are those read and written."""

    attention: Literal["", "flash2", "triton", "cudnn of 2024"] = ""  # "": the device's fastest, as here
    flash: bool = True  # False: attention writes its scores
    dropout: bool = False  # of the scores and of both residual sums, a byte of mask an element
    bias_apart: bool = False  # a bias of queries, keys and values is a kernel of its own
    transposes: bool = False  # a micro-batch of several rows is laid out anew for attention, and its output
    joins: bool = False  # gradients of queries, keys and values are joined for one product
    loss: tuple[tuple[float, int], ...] = ()  # (bytes of a logit in bf16, kernels) forward and backward; empty: as here
    stops_early: bool = False  # recomputing a layer ends before its last product, whose result no backward needs
    optimizer_bytes: float = 0.0  # of a parameter in an update; 0: as here
    scales: Literal["", "delayed", "current"] = ""  # how products in 8 bits are scaled; "": as here


@dataclass(frozen=True, kw_only=True)
class MessageForms:
    """Messages that differ from this runtime's. Classes are names of `MessageClass`."""

    rings: bool = False  # one ring over all ranks of a group instead of a message tier after tier
    bucket: tuple[float, float] = (0.0, 0.0)  # elements that travel together: at least, and for each rank of the ring
    exposed: frozenset[str] = frozenset()  # classes that no computing hides
    exposed_unsharded: frozenset[str] = frozenset()  # the same where no parameters are sharded
    exposed_ends: bool = False  # the first block's gathers and reductions have no computing beside them
    waits_for_sends: bool = False  # a stage without chunks computes nothing while it sends to another
    reduced: Literal["", "fp32"] = ""  # dtype in which gradients travel; "": the plan's
    # Bytes that copies around a message read and write: of an element of the whole, and of one of a rank's shard.
    gather_copies: tuple[float, float] = (0.0, 0.0)
    reduce_copies: tuple[float, float] = (0.0, 0.0)
    fuses: bool = False  # tensor messages are fused with their products, in 8 bits too


@dataclass(frozen=True, kw_only=True)
class PlanForms:
    """Plans that the software is described for, without `states` all plans; others are refused for it."""

    # Beside data: "tensor", "ulysses" and "ring", which are forms of context, "pipeline", "experts".
    axes: frozenset[str] = frozenset()
    # What ranks that hold the same slice share: "ddp" nothing, "zero1" optimizer states, "zero2" gradients, too,
    # "zero3" all states over the same ranks; "copies": later gathers are of a second copy on a tier further in.
    states: frozenset[str] = frozenset()
    schedules: frozenset[str] = frozenset()  # of a pipeline, without their chunks
    parts: frozenset[str] = frozenset()  # operations that are recomputed by themselves, beside whole layers
    products: frozenset[str] = frozenset()  # formats of products in 8 bits


@dataclass(frozen=True, kw_only=True)
class Software:
    """The costs of a software beyond those of this runtime. `source` says where each is from."""

    name: str
    plans: PlanForms = PlanForms()
    kernels: KernelForms = KernelForms()
    messages: MessageForms = MessageForms()
    grad_bytes: int = 0  # of an accumulated gradient; 0: as the plan sums them
    gathering_allocator: float = 0.0  # reserved over allocated memory where parameters are gathered; 0: as here
    source: str = ""

    @property
    def runs_all(self) -> bool:
        """Whether every plan of this runtime may be priced under it."""
        return not self.plans.states

    @property
    def family(self) -> str:
        """The name without a version."""
        return self.name.partition("-")[0]


OWN = Software(name="own")
