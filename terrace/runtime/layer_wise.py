"""Updates on the host's cores in the backward (`keep.order = "backward"`), each behind the SYNC of its block.

Without clipping an update needs the tokens of the step and whether the block's gradient is finite on all ranks that
share it. Every rank knows its tokens from its batch, so one small message has both (AGREE): tokens, and the squared
norm of the block's gradient, which is finite only if the gradient is.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from terrace.accelerator import has_streams
from terrace.comm.lane import Ticket
from terrace.program.instruction import Instruction
from terrace.runtime.kept.host_update import Scale
from terrace.runtime.kept.whole import computed
from terrace.runtime.objective import ignored_label, num_counted
from terrace.runtime.step_sums import agreed_scale

if TYPE_CHECKING:
    from terrace.runtime.block_messages import GradientMessages
    from terrace.runtime.messages import Messages
    from terrace.runtime.model_state import ModelState
    from terrace.runtime.passes import Passes


class Agreements:
    """AGREE on one rank, and the scales that follow from it."""

    def __init__(
        self, state: "ModelState", messages: "Messages", passes: "Passes", gradients: "GradientMessages"
    ) -> None:
        self._state, self._messages, self._passes, self._gradients = state, messages, passes, gradients
        self._agreed: dict[int, tuple[list[Tensor], Ticket, Ticket]] = {}
        device = messages.comm.device
        self._streams = [torch.Stream(device)] if has_streams(device) else []  # on which the host reads numbers

    def agree(self, now: Instruction, *, counts_tokens: bool) -> None:
        """Run AGREE. Of the ranks that share a batch, only the one with `counts_tokens` counts its tokens."""
        self._gradients.complete(now.block)
        values = torch.stack([self._squares(now.block), self._tokens(counts_tokens)])
        messages, total = self._messages, list[Tensor]()
        (transfer,) = messages.program.message(now).transfers
        collectives = messages.comm.collectives
        pending = messages.submit(lambda: total.append(collectives.sum_control(transfer, values, alone=True)))
        self._agreed[now.block] = total, pending.ticket, computed(messages.comm.device)

    def scale(self, block: int) -> Scale:
        """The scale of a block's update, which waits for its AGREE."""
        total, ticket, issued = self._agreed.pop(block)

        def wait() -> Sequence[Tensor]:
            ticket.wait_on_host()
            issued.wait_on_host()
            for stream in self._streams:
                with stream:
                    return agreed_scale(*total[0].tolist())
            return agreed_scale(*total[0].tolist())

        return wait

    def _squares(self, block: int) -> Tensor:
        # Each element counts once, as for CLIP.
        flats = (flat for flat in self._state.trainable(block) if flat.is_first(flat.layout.optimizer))
        counted = [flat.gradient.squared_norm for flat in flats if flat.gradient.has_elements]
        return torch.stack(counted).sum() if counted else self._zero

    def _tokens(self, counts: bool) -> Tensor:
        calls = self._passes.calls
        ignored = ignored_label(calls.objective)
        found = torch.stack([num_counted(batch, ignored) for batch in calls.batches]).sum()
        return found.double() if counts else torch.zeros_like(found, dtype=torch.float64)

    @property
    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._messages.comm.device)
