"""Messages of a block's parameters and gradients, as the step runner issues and awaits them."""

from collections import deque

from torch import Tensor

from terrace.comm.lane import DONE
from terrace.plan.wire import MessageClass
from terrace.program.instruction import Instruction
from terrace.program.message import Transfer
from terrace.runtime.flat_param import FlatParam
from terrace.runtime.messages import Messages, Pending
from terrace.runtime.model_state import ModelState


class ParameterMessages:
    """GATHER, FREE and REFRESH of a rank's blocks."""

    def __init__(self, state: ModelState, messages: Messages) -> None:
        self._state, self._messages, self._collectives = state, messages, messages.comm.collectives
        # Found once: no look-ups in the middle of a step.
        self.needed_by = {block: (block, *state.program.blocks[block].tied_to) for block in state.modules}
        self.gathers: dict[int, Pending] = {}
        self.refreshes: dict[int, Pending] = {}

    def await_for(self, block: int) -> None:
        """Wait for the parameters that a block needs."""
        for needed in self.needed_by[block]:
            if needed in self.gathers:
                pending = self.gathers.pop(needed)
                self._messages.wait(pending, "wait gather_backward" if pending.instruction.backward else "wait gather")
            self.await_refresh(needed)  # of whole parameters the only message

    def await_refresh(self, block: int) -> None:
        """Wait for a block's new parameters, if they are on their way."""
        if block in self.refreshes:
            self._messages.wait(self.refreshes.pop(block), "wait refresh")

    def gather(self, now: Instruction) -> None:
        """GATHER."""
        # The gather reads the shard that the refresh writes, hence the order on the lane.
        after = self.refreshes.pop(now.block).ticket if now.block in self.refreshes else DONE
        gather = self._messages.of_block(lambda flat, transfer: flat.gather(self._collectives, transfer, now.secondary))
        self.gathers[now.block] = self._messages.submit(gather, after)

    def free(self, now: Instruction) -> None:
        """FREE."""
        self.await_for(now.block)  # the lane must not fill what is being freed
        for flat in self._state.flats[now.block]:
            flat.free()

    def refresh(self, now: Instruction) -> None:
        """REFRESH."""
        # The rank's own slice first; the gather then reads it.
        for flat in self._state.trainable(now.block):
            flat.publish()
        self._messages.clock.mark("update")
        refresh = self._messages.of_block(lambda flat, transfer: flat.refresh(self._collectives, transfer))
        if self._messages.program.message(now).sends:
            self.refreshes[now.block] = self._messages.submit(refresh)

    def drain(self) -> None:
        """Wait for all refreshes."""
        while self.refreshes:
            self._messages.wait(self.refreshes.popitem()[1], "wait refresh")


class GradientMessages:
    """REDUCE, SYNC and TIE of a rank's blocks, and the buffers in which their gradients travel."""

    def __init__(self, state: ModelState, messages: Messages, parameters: ParameterMessages) -> None:
        self._state, self._messages, self._collectives = state, messages, messages.comm.collectives
        self._buffered = {
            block: tuple(flat for needed in blocks for flat in state.flats[needed] if flat.has_buffer)
            for block, blocks in parameters.needed_by.items()
        }
        self._reductions: deque[tuple[Pending, list[tuple[FlatParam, Tensor]]]] = deque()
        self._newest: dict[int, Pending] = {}  # block -> its newest reduction
        self._syncs = list[Pending]()

    def open(self, block: int) -> None:
        """Allocate the buffers of a block whose backward begins."""
        for flat in self._buffered[block]:
            if not flat.is_open:
                # At most one gradient stays in flight while the next is made: the memory formula counts two.
                self._finish(1)
                flat.open_gradient()

    def reduce(self, now: Instruction) -> None:
        """REDUCE."""
        flats, transfers = self._state.flats[now.block], self._messages.program.message(now).transfers
        taken = ((each.flat, flats[each.flat].take_gradient()) for each in transfers)
        buffers = {flat: buffer for flat, buffer in taken if buffer is not None}

        def carry(flat: FlatParam, transfer: Transfer) -> None:
            if transfer.flat in buffers:
                flat.reduce(self._collectives, transfer, buffers[transfer.flat])

        if buffers:
            pending = self._newest[now.block] = self._messages.submit_gradients(carry)
            self._reductions.append((pending, [(flats[flat], buffer) for flat, buffer in buffers.items()]))

    def sync(self, now: Instruction) -> None:
        """SYNC."""
        if self._messages.program.message(now).sends:  # else nothing is left to do, and CLIP waits for the reduction
            after = self._newest[now.block].ticket if now.block in self._newest else DONE
            sync = self._messages.submit_gradients(lambda flat, transfer: flat.sync(self._collectives, transfer), after)
            self._syncs.append(sync)

    def tie(self, now: Instruction) -> None:
        """TIE."""
        self._finish()
        comm = self._messages.comm
        self._messages.waiting_on(comm.participants(now))
        for flat in self._state.trainable(now.block):
            flat.tie(comm.stages, now.peer)
        self._messages.clock.mark(f"wait {MessageClass.TIE.value}")

    def await_all(self) -> None:
        """Wait for all gradients of a step."""
        self._finish()
        for pending in self._syncs:
            self._messages.wait(pending, "wait sync")
        self._syncs.clear()
        self._newest.clear()

    def _finish(self, num_left: int = 0) -> None:
        while len(self._reductions) > num_left:
            # Released only now: on CUDA the allocator hands memory to the compute stream that a lane may still read.
            pending, gradients = self._reductions.popleft()
            self._messages.wait(pending, "wait reduce")
            for flat, buffer in gradients:
                flat.release(buffer)
