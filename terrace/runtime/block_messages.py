"""Messages of a block's parameters and gradients, as the step runner issues and awaits them."""

from collections import deque
from collections.abc import Callable

from torch import Tensor

from terrace.accelerator import has_streams
from terrace.comm.lane import DONE, Ticket
from terrace.plan.keep import MOST_UPDATED, MOST_WRITTEN
from terrace.plan.kept import is_final_at_once
from terrace.plan.wire import MessageClass
from terrace.program.instruction import Instruction, Op
from terrace.program.message import Transfer
from terrace.runtime.flat_gradient import FlatGradient
from terrace.runtime.flat_param import FlatParam
from terrace.runtime.kept.host_update import Scale
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
        # Blocks whose working copies are kept below the device: their flat parameters that are updated.
        self._resting = {
            block: [flat for flat in state.flats[block] if flat.spec.trainable and flat.layout.params_below]
            for block in (state.modules if state.program.plan.keep.params_below else ())
        }
        self._fetched: dict[int, Pending] = {}  # on a device: reads whose gathers begin when they are over
        self._on_host: dict[int, Ticket] = {}  # block -> its update on the host's cores, until its REFRESH
        # Refreshes that wait for an update on the host's cores: block -> position, instruction, update.
        self._late: dict[int, tuple[int, Instruction, Ticket]] = {}
        self._updated: list[int] = []  # blocks whose working copies are on the device, the oldest first

    def await_for(self, block: int) -> None:
        for needed in self.needed_by[block]:
            if needed in self._fetched:
                self._gather_fetched(needed)
            if needed in self.gathers:
                pending = self.gathers.pop(needed)
                self._messages.wait(pending, "wait gather_backward" if pending.instruction.backward else "wait gather")
            self.await_refresh(needed)  # of whole parameters the only message

    def await_refresh(self, block: int) -> None:
        if block in self._late:
            self._start_late(block)
        if block in self.refreshes:
            self._messages.wait(self.refreshes.pop(block), "wait refresh")

    def gather(self, now: Instruction) -> None:
        if now.block in self._resting:
            self._fetch(now)
            return
        if now.block in self._late:
            self._start_late(now.block)
        # The gather reads the shard that the refresh writes, hence the order on the lane.
        after = self.refreshes.pop(now.block).ticket if now.block in self.refreshes else DONE
        gather = self._messages.of_block(lambda flat, transfer: flat.gather(self._collectives, transfer, now.secondary))
        self.gathers[now.block] = self._messages.submit(gather, after)

    def _fetch(self, now: Instruction) -> None:
        # A read waits for the last write of the same flat parameter (`Whole.read`), which follows its refresh.
        if now.block in self._late:
            self._start_late(now.block)
        if self._resting[now.block]:
            self.refreshes.pop(now.block, None)
        self._count_freed(now.block)
        # Reads end in the order in which they begin, so the last stands for all.
        *_, read = [ticket for flat in self._state.flats[now.block] if (ticket := flat.fetch()) is not DONE]
        pending = Pending(read, self._messages.counter, now)
        if not self._messages.program.message(now).sends:
            self.gathers[now.block] = pending
        elif has_streams(self._messages.comm.device):
            self._fetched[now.block] = pending
        else:
            gather = self._messages.of_block(lambda flat, transfer: flat.gather(self._collectives, transfer, False))
            self.gathers[now.block] = self._messages.submit(gather, read)

    def _gather_fetched(self, block: int) -> None:
        # A stream cannot wait for the thread that reads, and a host that waits here would issue no work meanwhile. So
        # the gather begins where a block waits for its parameters.
        pending = self._fetched.pop(block)
        self._messages.wait(pending, "wait gather")
        now, messages = pending.instruction, self._messages
        flats, transfers = self._state.flats[block], messages.program.message(now).transfers

        def gather() -> None:
            for transfer in transfers:
                flats[transfer.flat].gather(self._collectives, transfer, False)

        lane = messages.comm.lanes[messages.program.message(now).lane]
        self.gathers[block] = Pending(lane.submit(gather), pending.counter, now)

    def free(self, now: Instruction) -> None:
        self.await_for(now.block)  # the lane must not fill what is being freed
        for flat in self._state.flats[now.block]:
            flat.free()

    def refresh(self, now: Instruction) -> None:
        if self._resting.get(now.block) and now.block not in self._updated:
            self.open(now.block, reads=True)
        # The rank's own slice first; the gather then reads it.
        for flat in self._state.trainable(now.block):
            flat.publish()
        self._messages.clock.mark("update")
        updated = self._on_host.pop(now.block, DONE)
        if updated is not DONE and (self._messages.program.message(now).sends or self._resting.get(now.block)):
            # On a lane it would hold up what is behind it until the update is over, which may even wait for that. So it
            # starts when its block is needed, at the same place in the program of every rank.
            self._late[now.block] = self._messages.counter, now, updated
        else:
            self._send_refresh(now, updated)

    def _send_refresh(self, now: Instruction, ticket: Ticket) -> None:
        """Send new parameters once `ticket` is done, then write those that are kept below the device."""
        messages, flats = self._messages, self._state.trainable(now.block)
        gather = messages.of_block(lambda flat, transfer: flat.refresh(self._collectives, transfer))

        def refresh() -> None:
            gather()
            for flat in flats:
                flat.refreshed()

        if messages.program.message(now).sends:
            self.refreshes[now.block] = messages.submit(refresh)
            ticket = self.refreshes[now.block].ticket
        elif ticket is not DONE:  # an update on the host's cores, beside which no blocks are zero
            self.refreshes[now.block] = Pending(ticket, messages.counter, now)
        else:
            for flat in flats:
                flat.refreshed()
        for flat in self._resting.get(now.block, ()):
            self.refreshes[now.block] = Pending(flat.resting[0].evict(ticket), messages.counter, now)

    def _start_late(self, block: int) -> None:
        position, now, updated = self._late.pop(block)
        self._messages.wait_below(updated, "wait update")
        with self._messages.at(position, now):
            self._send_refresh(now, updated)

    def update_on_host(self, now: Instruction, scale: Scale, lr: float) -> None:
        """UPDATE on the host's cores, which goes on behind the instructions that follow."""
        self.open(now.block)
        tickets = [flat.update_on_host(scale, lr) for flat in self._state.trainable(now.block)]
        # Rows of a table are updated at once.
        self._on_host[now.block] = next((each for each in reversed(tickets) if each is not DONE), DONE)
        self._messages.clock.mark("update")

    def open(self, block: int, *, reads: bool = False) -> None:
        """Give memory on the device to the working copies of a block that are kept below, until they are written.

        With `reads` they are read first. At most `MOST_UPDATED` blocks have such memory: waits for the oldest one.
        """
        if not self._resting.get(block):
            return
        while len(self._updated) >= MOST_UPDATED:
            oldest = self._updated[0]
            if oldest in self._late:
                self._start_late(oldest)
            self._messages.wait(self.refreshes.pop(oldest), f"wait {MessageClass.KEEP_WRITE.value}")
            self._count_freed(oldest)
        self._updated.append(block)
        for flat in self._resting[block]:
            flat.resting[0].open(reads=reads).wait()

    def _count_freed(self, block: int) -> None:
        if block in self._updated:
            self._updated.remove(block)
            for flat in self._resting[block]:
                flat.resting[0].count_freed()

    def drain(self) -> None:
        for block in [*self._late]:
            self._start_late(block)
        while self.refreshes:
            self._messages.wait(self.refreshes.popitem()[1], "wait refresh")
        while self._updated:
            self._count_freed(self._updated[0])


class GradientMessages:
    """REDUCE, SYNC and TIE of a rank's blocks, and the buffers in which their gradients travel."""

    def __init__(self, state: ModelState, messages: Messages, parameters: ParameterMessages) -> None:
        self._state, self._messages, self._collectives = state, messages, messages.comm.collectives
        self._needed_by = parameters.needed_by
        self._buffered = {
            block: tuple(flat.gradient for needed in blocks for flat in state.flats[needed] if flat.gradient.has_buffer)
            for block, blocks in parameters.needed_by.items()
        }
        self._reductions: deque[tuple[Pending, list[tuple[FlatGradient, Tensor]]]] = deque()
        self._newest: dict[int, Pending] = {}  # block -> its newest reduction
        self._syncs = list[Pending]()
        self.resting = RestingGradients(state, messages)

    def open(self, block: int) -> None:
        """Allocate the buffers of a block whose backward begins."""
        for needed in self._needed_by[block]:
            self.resting.open(needed, self._complete)
        for gradient in self._buffered[block]:
            if not gradient.is_open:
                # At most one gradient stays in flight while the next is made: the memory formula counts two.
                self._finish(1)
                gradient.open()

    def reduce(self, now: Instruction) -> None:
        flats, transfers = self._state.flats[now.block], self._messages.program.message(now).transfers
        buffers = {each.flat: buffer for each in transfers for buffer in flats[each.flat].gradient.take()}

        def carry(flat: FlatParam, transfer: Transfer) -> None:
            if transfer.flat in buffers:
                flat.gradient.reduce(self._collectives, transfer, buffers[transfer.flat])

        if buffers:
            pending = self._newest[now.block] = self._messages.submit_gradients(carry)
            self._reductions.append((pending, [(flats[flat].gradient, buffer) for flat, buffer in buffers.items()]))

    def sync(self, now: Instruction) -> None:
        def carry(flat: FlatParam, transfer: Transfer) -> None:
            flat.gradient.sync(self._collectives, transfer)

        if self._messages.program.message(now).sends:  # else nothing is left to do, and CLIP waits for the reduction
            after = self._newest[now.block].ticket if now.block in self._newest else DONE
            self._syncs.append(self._messages.submit_gradients(carry, after))
        self.resting.issued(now.block, self._complete)

    def complete(self, block: int) -> None:
        """Wait for a block's complete gradient, note its norm, and begin to write it below the device if it is kept."""
        self._complete(block)
        self.resting.settle(0, len(self.resting.written) + 1, self._complete)
        for flat in self._state.trainable(block):
            if not flat.gradient.resting:
                flat.gradient.note_norm()

    def tie(self, now: Instruction) -> None:
        self._finish()
        comm = self._messages.comm
        self._messages.waiting_on(comm.participants(now))
        for flat in self._state.trainable(now.block):
            flat.gradient.tie(comm.stages, now.peer)
        self._messages.clock.mark(f"wait {MessageClass.TIE.value}")

    def await_all(self) -> None:
        """Wait for all gradients of a step."""
        self._finish()
        self._await_syncs()
        self._newest.clear()
        self.resting.settle(0, 0, self._complete)

    def _await_syncs(self) -> None:
        for pending in self._syncs:
            self._messages.wait(pending, "wait sync")
        self._syncs.clear()

    def _complete(self, block: int) -> None:
        """Wait for the gradient of a block whose SYNC was issued."""
        own = [flat.gradient for flat in self._state.flats[block]]
        while any(each in own for _, taken in self._reductions for each, _ in taken):
            self._finish(len(self._reductions) - 1)
        while self._syncs and any(each.instruction.block == block for each in self._syncs):
            self._messages.wait(self._syncs.pop(0), "wait sync")

    def _finish(self, num_left: int = 0) -> None:
        while len(self._reductions) > num_left:
            # Released only now: on CUDA the allocator hands memory to the compute stream that a lane may still read.
            pending, gradients = self._reductions.popleft()
            self._messages.wait(pending, "wait reduce")
            for gradient, buffer in gradients:
                gradient.release(buffer)


Complete = Callable[[int], None]  # waits for the gradient of a block


class RestingGradients:
    """Accumulated gradients that are kept below the device, from their reduction to their update.

    While the gradient of a block is made, that of one block is written. While one is used, the next is read.
    """

    def __init__(self, state: ModelState, messages: Messages) -> None:
        self._messages = messages
        keep = state.program.plan.keep
        blocks = state.modules if keep.grads_below else ()
        self._reads = not keep.updates_on_host  # else the host's cores read them where they are
        found = {block: [flat for flat in state.trainable(block) if flat.layout.grads_below] for block in blocks}
        self._flats = {block: flats for block, flats in found.items() if flats}
        self._at_once = {block: is_final_at_once([flat.spec for flat in flats]) for block, flats in self._flats.items()}
        self._opened = set[int]()
        self._under_way = deque[int]()  # complete but for messages under way
        self.written = deque[tuple[int, Ticket]]()
        self._ahead = deque[int]()  # blocks still to be read, in the order of their updates
        self._read: dict[int, Ticket] = {}
        self._taken = set[int]()

    def open(self, block: int, complete: Complete) -> None:
        """Give the gradient of a block memory, as its backward begins."""
        if block in self._flats and block not in self._opened:
            self.settle(MOST_WRITTEN, MOST_WRITTEN, complete)
            self._opened.add(block)
            for flat in self._flats[block]:
                flat.gradient.open_resting()

    def issued(self, block: int, complete: Complete) -> None:
        if block in self._flats:
            self._under_way.append(block)
            if self._at_once[block]:
                self.settle(0, len(self.written) + 1, complete)

    def settle(self, num_under_way: int, num_written: int, complete: Complete) -> None:
        """Write complete gradients below the device.

        Returns when at most `num_under_way` wait for their messages and at most `num_written` are being written.
        """
        while len(self._under_way) > num_under_way:
            block = self._under_way.popleft()
            complete(block)
            tickets = [flat.gradient.evict() for flat in self._flats[block]]
            self.written.append((block, tickets[-1]))
        while len(self.written) > num_written:
            block, written = self.written.popleft()
            self._messages.wait_below(written, f"wait {MessageClass.KEEP_WRITE.value}")
            self._opened.remove(block)
            for flat in self._flats[block]:
                flat.gradient.resting[0].count_freed()

    def begin_updates(self) -> None:
        """Begin to read the gradients of the first update."""
        if self._flats and self._reads:
            used = (each.block for each in self._messages.program.instructions if each.op in _USES)
            self._ahead.extend(block for block in dict.fromkeys(used) if block in self._flats)
            self._taken.clear()
            self._read_next()

    def take(self, block: int) -> None:
        """Wait for the gradient of a block, and begin to read the next one."""
        if block in self._flats and block not in self._taken:
            self._taken.add(block)
            self._read_next()
            self._messages.wait_below(self._read.pop(block), f"wait {MessageClass.KEEP_READ.value}")

    def free(self, block: int) -> None:
        for flat in self._flats.get(block, ()):
            flat.gradient.resting[0].free()

    def _read_next(self) -> None:
        if self._ahead:
            block = self._ahead.popleft()
            tickets = [flat.gradient.resting[0].open(reads=True) for flat in self._flats[block]]
            self._read[block] = tickets[-1]


_USES = (Op.ORTHOGONALISE, Op.UPDATE)
