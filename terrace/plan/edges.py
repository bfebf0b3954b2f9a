"""Messages between the stages of a pipeline: the activation at an edge, its rounds, residuals and buffers.

At the edge between two chunks an activation goes onward and its gradient back, once a micro-batch each: T H elements, T
being the tokens of a micro-batch on a rank (terrace.plan.context), H the hidden size. Each travels in the format that
the outermost tier between the two stages has for its class, all elements of a rank in one message. With a tensor axis
of R rows x C columns, every rank sends to the same place in the other stage

    with sequence parallelism    its own part:  T'/R x H/C, T' being T padded for the rows to divide
    without                      1/R of the replicated activation, T H / C / R, which receivers gather over the rows
                                 (scatter/gather, Narayanan et al. 2104.04473, section 4.1)

A block that two stages hold, a tied embedding, has its accumulated gradient shards exchanged once a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrace.model.spec import BlockSpec
from terrace.plan.dims import hidden_size
from terrace.plan.hops import RESIDUAL_BYTES, RESIDUAL_COPIES, Hop, selection_bytes
from terrace.plan.in_block_messages import Leg, TensorMessage
from terrace.plan.mesh import no_sequence
from terrace.plan.plan import Plan
from terrace.plan.wire import BETWEEN_STAGES, FORMATS

if TYPE_CHECKING:
    from terrace.plan.tensor_traffic import TensorTraffic


@dataclass(frozen=True, kw_only=True)
class Edge:
    """An activation between two stages: its `shape` on a rank, and the elements that the rank sends of it.

    `gathers` is the message by which receivers complete it, None where they have all of it.
    """

    shape: tuple[int, ...]
    numel: int
    gathers: TensorMessage | None


def edge_of(tensor: "TensorTraffic", blocks: Sequence[BlockSpec]) -> Edge:
    """The activation at every edge of a pipeline; raises `PlanError` where its size is not known."""
    if tensor.tokens < 1:
        raise no_sequence("pipeline")
    rows, features = tensor.rows.degree, hidden_size(blocks) // tensor.columns.degree
    # Ranks hold distinct tokens already, so nothing is sent twice.
    if tensor.splits_tokens:
        shape: tuple[int, ...] = (tensor.padded_tokens // rows, features)
        return Edge(shape=shape, numel=shape[0] * shape[1], gathers=None)
    shape = (*tensor.shape, features)
    # All rows hold the same activation: each sends one part, and receivers gather.
    padded = tensor.rows.padded(tensor.tokens * features)
    gathers = TensorMessage(Leg.GATHER, tensor.rows.axes, padded) if rows > 1 else None
    return Edge(shape=shape, numel=padded // rows, gathers=gathers)


def rounds_of(pairs: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], ...]]:
    """The pairs of stages in rounds; no stage appears twice in a round."""
    rounds: list[list[tuple[int, int]]] = []
    # Greedy edge colouring: a pair joins the first round in which both stages are free.
    for pair in pairs:
        for group in rounds:
            if not any(stage in other for other in group for stage in pair):
                group.append(pair)
                break
        else:
            rounds.append([pair])
    return [tuple(group) for group in rounds]


def edge_coding_bytes(compute: str, hop: Hop) -> float:
    """Bytes of memory that the sender reads and writes to code a message between stages, and the receiver to decode it.

    0 for dtypes, which are cast on the fly.
    """
    if not hop.wire.block:
        return 0.0
    residual = RESIDUAL_BYTES if hop.wire.feedback else 0
    coded = 2.0 * (hop.numel * (FORMATS[compute].element_bytes + residual) + hop.part_bytes)
    return coded + hop.numel * selection_bytes(hop.wire)


def edge_feedback_bytes(numel: int) -> int:
    """Bytes of the residual of messages of `numel` elements that cross a boundary in one direction."""
    return numel * RESIDUAL_BYTES * RESIDUAL_COPIES


def edge_buffers(plan: Plan, tiers: Sequence[str], numel: int) -> int:
    """Bytes of the messages of `numel` elements that a rank has on their way: one out and one in, in each direction.

    Each in the widest of the formats that its class has on `tiers`, those between neighbouring stages.
    """
    each = [max(plan.wire_format(message, tier).message_bytes(numel) for tier in tiers) for message in BETWEEN_STAGES]
    return 2 * sum(each)
