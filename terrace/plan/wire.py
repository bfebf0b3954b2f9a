"""Message classes and wire formats.

A message class is the purpose of a message; a wire format defines how its elements are encoded and how many bytes they
take. A plan's table `wire.<class>.<tier> = "<format>"` combines them. A format is written

    fp64 | fp32 | bf16                       a dtype: every element as it is, or rounded
    fp8 | int8 | int4 [:BLOCK] [+feedback]   codes of 8, 8 or 4 bits; BLOCK elements share one scale; plain fp8 can
                                             also mean the codes of 8-bit matmuls (terrace.plan.products)
    topk [:N] [+feedback]                    the largest 1/N of the elements of every block of 4096, in 4 bits
    packed [:BLOCK]                          bf16 in 12.25 bits, without loss

Messages between stages may have a format for each boundary between two members of the outermost tier, in the order of
the stages: "bf16, int4, bf16" for four members in a pipeline.

A message of a block format holds, for n elements in blocks of B, a bf16 scale per block, then the codes of all
elements, then zeros up to a multiple of 16 bytes:

    bytes(n) = round16( 2 ceil(n / B) + ceil(n bits / 8) )

A sparse message holds, for n elements of which k are kept, a bf16 scale per block, a byte per section of 256 elements
(its number of kept elements), a byte per kept element (its index in the section), the codes, and zeros:

    bytes(n) = round16( 2 ceil(n / 4096) + ceil(n / 256) + k + ceil(k / 2) ) ,  k = 4096 / N of each block,
                                                                               ceil(m / N) of a last one of m elements

So a kept element costs 8 bits for its index plus its share of the counts; at N = 32 an element costs 0.41 bits overall.

A packed message of n elements in blocks of B (128) has a byte of exponent and a byte of count per block; 4 bits of
exponent, 7 of mantissa and a sign per element; and room for the exponents of one element in 64, which are far below the
largest of their block (terrace.comm.codecs.packed):

    bytes(n) = round16( 2 ceil(n / B) + ceil(12 n / 8) + ceil(n / 64) )

The last block may be short, so any n works, including 0, 1 and primes. `+feedback` keeps the rounding error of a
gradient and adds it to the next one of the same message (error feedback, arXiv 1901.09847).
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Literal

from terrace.base.errors import PlanError, did_you_mean


class MessageClass(StrEnum):
    GATHER = "gather"  # parameters, for a forward
    GATHER_BACKWARD = "gather_backward"  # parameters, for a backward
    REDUCE = "reduce"  # gradients of a unit of micro-batches, up to the grads tier
    SYNC = "sync"  # accumulated gradients, once a step, over tiers outside the grads tier
    REFRESH = "refresh"  # new parameters, from the optimizer tier back to the params tier
    ORTHOGONALISE = (
        "orthogonalise"  # momenta or gradients of whole matrices, from the optimizer tier inward, once a step
    )
    TENSOR = "tensor"  # activations and their gradients, inside a block, between ranks of the tensor axis
    CONTEXT = "context"  # queries, keys, values and their gradients, inside a block, between ranks of the context axis
    DISPATCH = "dispatch"  # tokens to experts and ids to rows of tables; gradients of what comes back
    COMBINE = "combine"  # experts' results and rows back to the tokens' ranks; gradients of tokens
    ROUTE = "route"  # counts of tokens or ids per destination rank, before each dispatch
    CHOICES = "choices"  # router choices by sequence, inside a block, between ranks that share sequences
    COUNTS = "counts"  # router choices by layer, and rows sent, received and multiplied, once a step
    PIPELINE = "pipeline"  # activations to the next stage
    PIPELINE_BACKWARD = "pipeline_backward"  # gradients of activations to the previous stage
    TIE = "tie"  # accumulated gradients of a block that two stages hold, once a step
    OUTER = "outer"  # parameter changes since the last exchange between islands, and statistics of them
    PEER_COPY = "peer_copy"  # a rank's checkpoint shard, to the memory of another machine, between steps
    HIDDEN = "hidden"  # last hidden states of another model's forward, to the ranks whose loss reads them
    RESHARD = "reshard"  # parameters from training ranks to generation ranks, between steps
    KEEP_READ = "keep_read"  # states that are kept below the device, from their medium
    KEEP_WRITE = "keep_write"  # the same states back to their medium
    ROW_READ = "row_read"  # rows of a table that is kept below the device, with their states, from their medium
    ROW_WRITE = "row_write"  # the rows that an update has changed, back to their medium
    CONTROL = "control"  # squared norm, loss, token count and rounding errors: a few fp64 numbers a step


ROUTED_ROWS = (MessageClass.DISPATCH, MessageClass.COMBINE)  # rows of tokens or tables, each encoded separately
ROUTED = (*ROUTED_ROWS, MessageClass.ROUTE)
BY_BATCH = (*ROUTED, MessageClass.ROW_READ, MessageClass.ROW_WRITE)  # declared batch by batch
# Classes that are sent in the dtype in which they are stored.
_AS_THEY_ARE = (
    *("route", "choices", "counts", "tie", "peer_copy", "hidden", "reshard", "keep_read", "keep_write", "row_read"),
    *("row_write", "control"),
)
PLACEABLE = tuple(message for message in MessageClass if message not in _AS_THEY_ARE)
GRADIENTS = (MessageClass.REDUCE, MessageClass.SYNC)
BETWEEN_STAGES = (MessageClass.PIPELINE, MessageClass.PIPELINE_BACKWARD)
FED_BACK = (*GRADIENTS, MessageClass.OUTER, MessageClass.PIPELINE_BACKWARD)  # classes that support error feedback
CHANGES = (*GRADIENTS, MessageClass.OUTER)  # of parameters
# Classes of parameters and activations with one message to each peer, which may be marked to say that plain values
# follow it.
PACKABLE = (
    *(MessageClass.GATHER, MessageClass.GATHER_BACKWARD, MessageClass.REFRESH),
    *(MessageClass.TENSOR, MessageClass.CONTEXT, *BETWEEN_STAGES),
)
# Classes of parameters and gradients, which are sent in `plan.messages` if that is set.
OF_PARAMETERS = (MessageClass.GATHER, MessageClass.GATHER_BACKWARD, MessageClass.REFRESH)
# Those that a micro-batch has: between the first gather and the last reduction lies all of its computing.
OF_PASSES = (MessageClass.GATHER, MessageClass.GATHER_BACKWARD, MessageClass.REDUCE)
OF_STATES = (*OF_PARAMETERS, *CHANGES)


@dataclass(frozen=True)
class Route:
    """The tiers over which a block's messages of one class are reduced, then gathered; ends are tiers of states.

    First the reduction, (inner, outer), from the innermost tier outward; then the gather, (outer, inner), inward.
    `device` is inside all tiers, `outermost` the last tier, `island` the last one synchronised every step. `carries`
    says which flat buffers are sent: `all` except those that are whole on every rank; `change`: trainable ones, if
    there are several islands.
    """

    reduction: tuple[str, str] | None = None
    gathering: tuple[str, str] | None = None
    carries: Literal["all", "trainable", "orthogonal", "change"] = "trainable"


# If a plan keeps a secondary copy for backwards, GATHER_BACKWARD begins on its tier.
ROUTES = {
    MessageClass.GATHER: Route(gathering=("params", "device"), carries="all"),
    MessageClass.GATHER_BACKWARD: Route(gathering=("params_backward", "device"), carries="all"),
    MessageClass.REDUCE: Route(reduction=("device", "grads")),
    # Over the tiers outside the optimizer's, replicas all-reduce.
    MessageClass.SYNC: Route(reduction=("grads", "island"), gathering=("island", "optimizer")),
    MessageClass.REFRESH: Route(gathering=("optimizer", "params")),
    MessageClass.ORTHOGONALISE: Route(gathering=("optimizer", "device"), carries="orthogonal"),
    # Replicas inside an island each exchange a shard, which the inner tiers then gather.
    MessageClass.OUTER: Route(
        reduction=("island", "outermost"), gathering=("outermost", "optimizer"), carries="change"
    ),
}

COUNT_BYTES = 8  # counts are int64
SCALE_BYTES = 2  # bf16 has the range of fp32; rounding up enlarges a quantisation step by at most 1/128
SPARSE_BLOCK = 4096  # block of elements from which the largest are selected, as in SparseLoCo, arXiv 2508.15706
SECTION = 256  # elements: an index into a section and its number of kept elements each fit a byte
# Below 32, more than 255 elements of a section could be kept, and int4 is hardly larger; above 1024, 8 blocks are not a
# multiple of 16 bytes (terrace.plan.gaps).
_KEPT_OF = tuple(1 << power for power in range(5, 11))
BETWEEN = ","  # formats of two boundaries
MESSAGE_ALIGNMENT = 16  # bytes: rows of messages stay aligned for vector loads
_BLOCKS = range(16, 4096 + 1)
_PACKED_BLOCKS = tuple(1 << power for power in range(4, 8))  # a block's number of listed exponents fits a byte
LISTED_OF = 64  # elements of a packed message with room for one exponent outside the window of its block: 0.125 bits


@dataclass(frozen=True)
class WireFormat:
    """How elements are encoded in a message.

    `codec` is a dtype or a block codec, `bits` the size of an element without its scale, `block` the number of elements
    that share a scale (0 for a dtype). `mantissa_bits` orders formats by precision. A sparse format keeps one of
    `kept_of` elements (0: all). A `packed` format returns every bit of its elements.
    """

    name: str  # as the plan writes it
    codec: str
    bits: int
    mantissa_bits: int
    block: int = 0
    feedback: bool = False
    kept_of: int = 0
    packed: bool = False

    @property
    def element_bytes(self) -> int:
        assert not self.block, f"{self.name} has no whole bytes an element"
        return self.bits // 8

    def message_bytes(self, numel: int) -> int:
        """Bytes of one message of `numel` elements, scales and padding included."""
        if not self.block:
            return self.bits // 8 * numel
        used = SCALE_BYTES * -(-numel // self.block)
        if self.kept_of:
            kept = self.num_kept(numel)
            used += -(-numel // SECTION) + kept + -(-kept * self.bits // 8)
        else:
            used += -(-numel * self.bits // 8) + (-(-numel // LISTED_OF) if self.packed else 0)
        return -(-used // MESSAGE_ALIGNMENT) * MESSAGE_ALIGNMENT

    def num_kept(self, numel: int) -> int:
        """Number of elements kept in a sparse message of `numel` elements."""
        blocks, rest = divmod(numel, self.block)
        return blocks * (self.block // self.kept_of) + -(-rest // self.kept_of)


FORMATS = {
    wire.name: wire
    for wire in (
        WireFormat("fp64", "fp64", 64, 52),
        WireFormat("fp32", "fp32", 32, 23),
        WireFormat("bf16", "bf16", 16, 7),
        WireFormat("fp16", "fp16", 16, 10),  # the default under compute = "fp16", and refused elsewhere
        WireFormat("fp8", "fp8", 8, 3, block=128),  # e4m3: 4 bits of exponent, 3 of mantissa
        WireFormat("int8", "int8", 8, 6, block=128),
        WireFormat("int4", "int4", 4, 2, block=128),
        WireFormat("topk", "topk", 4, 2, block=SPARSE_BLOCK, kept_of=32),
        WireFormat("packed", "packed", 12, 7, block=128, packed=True),
    )
}
# For matrices held as 8-bit codes (terrace.plan.products), which are sent unchanged.
CODES = WireFormat("fp8", "e4m3", 8, 3)
BYTES = "bytes"  # the codec of frozen matrices held in codes (terrace.model.base_formats), which are sent unchanged
COUNT_FORMAT = WireFormat("int64", "int64", 64, 63)  # for exact counts; plans cannot name it


def by_boundary(text: str) -> tuple[str, ...]:
    """The format of each boundary between members, as written; a single one that applies to all boundaries is alone."""
    return tuple(part.strip() for part in text.split(BETWEEN)) if BETWEEN in text else (text,)


@lru_cache(maxsize=256)
def parse_format(text: str) -> WireFormat:
    """The format named `text`. Raises `PlanError` for an unknown one."""
    head, plus, end = text.partition("+")
    codec, colon, block = head.partition(":")
    suffix = plus + end
    if codec not in FORMATS:
        raise PlanError(f"{text!r} is not a wire format{did_you_mean(codec, FORMATS)}")
    if suffix not in ("", "+feedback"):
        raise PlanError(f"wire format {text!r} ends in {suffix!r}: what a format can end in is '+feedback'")
    wire = replace(FORMATS[codec], name=text, feedback=bool(suffix))
    # Dtypes have neither blocks nor feedback.
    if not wire.block and (colon or wire.feedback):
        raise PlanError(f"wire format {text!r}: a dtype has neither blocks nor feedback; write {codec!r}")
    if wire.packed and (wire.feedback or (colon and block not in map(str, _PACKED_BLOCKS))):
        raise PlanError(
            f"wire format {text!r}: packed is lossless, so it has no feedback, and its blocks are a power of two from "
            f"{_PACKED_BLOCKS[0]} to {_PACKED_BLOCKS[-1]}; write 'packed', or 'packed:32' for heads of 32 elements"
        )
    if not colon:
        return wire
    if wire.kept_of:
        if block not in map(str, _KEPT_OF):
            raise PlanError(
                f"wire format {text!r}: one of N elements is kept, N a power of two from {_KEPT_OF[0]} to "
                f"{_KEPT_OF[-1]}; write {codec}:{FORMATS[codec].kept_of}, or int4 for more of them"
            )
        return replace(wire, kept_of=int(block))
    if not (block in map(str, _BLOCKS) and int(block).bit_count() == 1):
        raise PlanError(
            f"wire format {text!r}: a block is a power of two from {_BLOCKS[0]} to {_BLOCKS[-1]}; "
            f"write {codec}:{FORMATS[codec].block}, or leave it out for that"
        )
    return replace(wire, block=int(block))
