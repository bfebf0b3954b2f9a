"""Messages between pipeline stages: the activation at an edge, exchange rounds, residuals and buffers.

For each micro-batch, an activation crosses the edge between two chunks forward and its gradient backward: T H elements
each, with T tokens of a micro-batch on a rank (terrace.plan.context) and hidden size H. A rank sends its elements in
one message, in the format that the outermost tier between the two stages has for the message class. With a tensor axis
of R rows x C columns, a rank sends to its counterpart in the other stage

    with sequence parallelism    its own part:  T'/R x H/C, where T' is T padded to a multiple of R
    without                      1/R of the replicated activation, T H / C / R, which receivers gather over the rows
                                 (scatter/gather, Narayanan et al. 2104.04473, section 4.1)

If two stages hold one block (a tied embedding), they exchange its accumulated gradient shards once a step.
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
    """An activation between two stages: its `shape` on a rank, and the number of elements that a rank sends.

    `gathers` is the message with which receivers complete it, None if they receive all of it.
    """

    shape: tuple[int, ...]
    numel: int
    gathers: TensorMessage | None


def edge_of(tensor: "TensorTraffic", blocks: Sequence[BlockSpec], width: int = 1) -> Edge:
    """The activation at an edge of a pipeline, with `width` representations of a token (`Operations.widths`).

    Raises `PlanError` if its size is not known.
    """
    if tensor.tokens < 1:
        raise no_sequence("pipeline")
    rows, features = tensor.rows.degree, width * hidden_size(blocks) // tensor.columns.degree
    # Ranks hold distinct tokens, so nothing is sent twice.
    if tensor.splits_tokens:
        shape: tuple[int, ...] = (tensor.padded_tokens // rows, features)
        return Edge(shape=shape, numel=shape[0] * shape[1], gathers=None)
    shape = (*tensor.shape, features)
    # All rows hold the same activation: each sends one part, and receivers gather.
    padded = tensor.rows.padded(tensor.tokens * features)
    gathers = TensorMessage(Leg.GATHER, tensor.rows.axes, padded) if rows > 1 else None
    return Edge(shape=shape, numel=padded // rows, gathers=gathers)


def rounds_of(pairs: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], ...]]:
    """Split pairs of stages into rounds in which no stage appears twice."""
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
    """Memory traffic in bytes of encoding a message between stages, and likewise of decoding it.

    0 for dtypes, which are cast on the fly.
    """
    if not hop.wire.block:
        return 0.0
    residual = RESIDUAL_BYTES if hop.wire.feedback else 0
    coded = 2.0 * (hop.numel * (FORMATS[compute].element_bytes + residual) + hop.part_bytes)
    return coded + hop.numel * selection_bytes(hop.wire)


def edge_feedback_bytes(numel: int) -> int:
    """Bytes of the error-feedback residual for messages of `numel` elements in one direction."""
    return numel * RESIDUAL_BYTES * RESIDUAL_COPIES


def edge_buffers(plan: Plan, tiers: Sequence[str], numel: int) -> int:
    """Bytes of a rank's message buffers for edges: one outgoing and one incoming message per direction.

    Messages have `numel` elements, in the widest format of their class on `tiers`, those between neighbouring stages.
    """
    each = [
        max(wire.message_bytes(numel) for tier in tiers for wire in plan.wire_formats(message, tier))
        for message in BETWEEN_STAGES
    ]
    return 2 * sum(each)
