"""Applies the in-block axes of a plan to the blocks of a rank, in their documented order."""

import socket
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from terrace.comm import symmetric
from terrace.model.experts.gating import Gating
from terrace.model.experts.mixture import Router
from terrace.plan.hops import number_bytes
from terrace.plan.layout import INSIDE
from terrace.plan.plan import Plan
from terrace.plan.tensor_traffic import choice_messages, shared_bytes
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
from terrace.runtime.tensor.apply import make_axis, parallelise
from terrace.runtime.tensor.axis_comm import AxisComm

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


def fused_operators(comm: Comm) -> symmetric.Operators | None:
    """The fused operators, with newly shared memory; None if the plan does not fuse tensor messages.

    Every rank calls this. Raises `PlanError` if the ranks of a line are on several hosts.
    """
    program = comm.program
    if not program.plan.fuses_tensor:
        return None
    found = symmetric.operators(comm.device)
    (tier,) = program.mesh.tiers("rows")
    rows = comm.groups.of(INSIDE, program.model.tensor.rows, tier)
    hosts = comm.exchange(socket.gethostname())
    symmetric.check_one_host([hosts[rank] for rank in rows.ranks])
    num_bytes = shared_bytes(program.model.tensor, program.blocks)
    found.share(rows.handle.group_name, num_bytes)
    comm.meter.add("buffers", num_bytes)
    return found


def choices_axes(blocks: Sequence[nn.Module], comm: Comm, in_block: InBlockComm) -> list[InBlockAxis]:
    """The axis that sums router choices of sequences over ranks, or nothing if it is not needed."""
    program = comm.program
    held = program.stage.held
    if not any(choice_messages(program.model.tensor, program.blocks[index]) for index in held):
        return []
    ranks = AxisComm(program.model.tensor.sharing, comm.rank, comm.collectives, in_block, comm.device, comm.meter)
    return [SharedChoices(ranks, program.plan, [blocks[index] for index in held])]


class SharedChoices(InBlockAxis):
    """Installs itself in the gating of the routers of `blocks`, for ranks that share sequences."""

    def __init__(self, comm: AxisComm, plan: Plan, blocks: Iterable[nn.Module]) -> None:
        self.in_block, self._comm = comm.in_block, comm
        # Gathered like statistics of norms, with the element size that the plan declares, but as integers.
        self._dtype = torch.int32 if number_bytes(plan) == torch.int32.itemsize else torch.int64
        routers = (module for block in blocks for module in block.modules() if isinstance(module, Router))
        self._gatings: set[Gating] = {router.gating for router in routers if router.gating is not None}
        for gating in self._gatings:
            gating.add_up = self._add_up

    def remove(self) -> None:
        """Let each rank count only its own tokens again."""
        for gating in self._gatings:
            gating.add_up = None

    def _add_up(self, choices: Tensor) -> Tensor:
        """Sum `choices` (B, E) over all ranks."""
        gathered = self._comm.every(choices.to(self._dtype).flatten())
        return gathered.sum(0, dtype=choices.dtype).view(choices.shape)
