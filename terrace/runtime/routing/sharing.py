"""Router choices of sequences that ranks share: each rank counts its own tokens, and counts are summed over ranks."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from terrace.model.experts.gating import Gating
from terrace.model.experts.mixture import Router
from terrace.plan.hops import number_bytes
from terrace.plan.plan import Plan
from terrace.plan.tensor_traffic import choice_messages
from terrace.runtime.comm import Comm
from terrace.runtime.in_block import InBlockAxis, InBlockComm
from terrace.runtime.tensor.axis_comm import AxisComm


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
