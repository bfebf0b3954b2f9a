"""Applies the in-block axes of a plan to the blocks of a rank, in their documented order."""

from collections.abc import Callable, Sequence

from torch import nn

from terrace.plan.layout import INSIDE
from terrace.runtime.clock import Clock
from terrace.runtime.comm import Comm
from terrace.runtime.context.axis import ContextAxis
from terrace.runtime.context.peer_exchange import PeerComm
from terrace.runtime.context.row_coder import RowCoder
from terrace.runtime.in_block import InBlockAxis, InBlockComm
from terrace.runtime.linear import WeightGradients
from terrace.runtime.objective import Objective
from terrace.runtime.replay import install
from terrace.runtime.routing.axis import routed_axes
from terrace.runtime.routing.sharing import choices_axes
from terrace.runtime.tensor.apply import make_axis, parallelise
from terrace.runtime.tensor.sharing import fused_operators

Blocks = Sequence[nn.Module]
Applied = tuple[InBlockAxis | None, Blocks, Objective]


def apply_axes(
    blocks: Blocks, objective: Objective, comm: Comm, clock: Clock, weights: WeightGradients
) -> tuple[list[InBlockAxis], Blocks, Objective]:
    """Apply the in-block axes. Returns the axes, and the blocks and the objective that replace the given ones.

    Raises `ModelError` for blocks that an axis cannot be applied to.
    """
    axes: list[InBlockAxis] = []
    # Modules that an axis puts inside a layer leave the places of operations as they are.
    install({index: blocks[index] for index in comm.program.stage.held}, comm.program)
    # No axis has more than one rank.
    if INSIDE not in comm.lanes and not comm.program.model.routed.transfers:
        return axes, blocks, objective
    in_block = InBlockComm(comm.lanes, clock, weights)
    for apply in _AXES:
        axis, blocks, objective = apply(blocks, objective, comm, in_block)
        axes += [] if axis is None else [axis]
    axes += [*routed_axes(blocks, comm, in_block), *choices_axes(blocks, comm, in_block)]
    return axes, blocks, objective


def _tensor(blocks: Blocks, objective: Objective, comm: Comm, in_block: InBlockComm) -> Applied:
    program = comm.program
    if program.model.tensor.degree == 1:
        return None, blocks, objective
    fused = fused_operators(comm)
    axis = make_axis(program, comm.collectives, comm.rank, in_block, comm.device, comm.meter, fused)
    return axis, *parallelise(blocks, program, comm.rank, axis, objective)


def _context(blocks: Blocks, objective: Objective, comm: Comm, in_block: InBlockComm) -> Applied:
    if comm.context_group is None or comm.members is None:
        return None, blocks, objective
    coder = RowCoder(comm.collectives, comm.program.plan, comm.program.layout.tiers, comm.meter)
    peers = PeerComm(comm.context_group, comm.context_group.members.index(comm.rank), comm.members, in_block, coder)
    held = [blocks[index] for index in comm.program.stage.held]
    return ContextAxis(peers, comm.program, held, comm.device), blocks, objective


# The tensor axis replaces modules, the context axis then replaces the attention of what runs.
_AXES: tuple[Callable[[Blocks, Objective, Comm, InBlockComm], Applied], ...] = (_tensor, _context)
