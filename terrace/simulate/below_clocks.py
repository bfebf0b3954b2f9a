"""The waits of a rank for states that are kept below its device, and for the host's cores (terrace.simulate.rank)."""

from abc import abstractmethod
from collections import defaultdict, deque
from typing import TYPE_CHECKING

from terrace.plan.keep import MOST_UPDATED
from terrace.program.instruction import HALVES
from terrace.simulate.below import (
    ACTIVATIONS,
    GRADS,
    PARAMS,
    START,
    TABLE,
    WAIT,
    WAIT_ROWS,
    WAIT_ROWS_WRITTEN,
    WAIT_WRITE,
    Moment,
    Slots,
)
from terrace.simulate.priced_instruction import Event

if TYPE_CHECKING:
    from terrace.program.program import Program


class BelowClocks:
    __slots__ = (
        *("evicted", "fetched", "grads_there", "grads_written", "late", "leaving", "now_s", "params_written", "slots"),
        *("agreed", "refreshes", "rows_written", "updates"),
    )

    def __init__(self, program: "Program") -> None:
        self.now_s, self.slots = 0.0, Slots(program)
        self.grads_written: deque[Moment] = deque()  # when each block's gradients are written
        self.agreed = dict[int, Moment]()  # block -> when the sums of its AGREE are there
        self.grads_there = dict[int, Moment]()  # block -> when its gradient is where the host's cores read it
        self.refreshes = dict[int, Moment]()  # block -> when its new parameters are there
        self.updates = dict[int, Moment]()  # block -> when its update on the host's cores is over
        self.late = dict[int, tuple[Event, Moment]]()  # block -> its REFRESH, and the update that this waits for
        self.params_written: deque[Moment] = deque()  # when each block's updated parameters are
        self.leaving: Moment = (0.0, -1)  # when the newest input is written
        self.rows_written: Moment = START  # when rows of the newest update are
        # When the inputs of each block are written, and when those on their way back are there, in order.
        self.evicted = defaultdict[int, deque[Moment]](deque)
        self.fetched = defaultdict[int, deque[Moment]](deque)

    @abstractmethod
    def wait(self, moment: Moment, category: str) -> None:
        """Make the compute stream wait."""

    @abstractmethod
    def settle_gradients(self) -> None:
        """Wait for the messages of all gradients so far."""

    @abstractmethod
    def issue(self, event: Event, ready: Moment) -> Moment:
        """Put a message that may start at `ready` on its lane; returns its arrival."""

    @abstractmethod
    def run_steps(self, event: Event) -> None:
        """Play a pass."""

    @abstractmethod
    def update(self, event: Event) -> None:
        """Play an update on the device."""

    def read_first(self, event: Event, ready: Moment) -> Moment:
        """When a message may start that reads parameters from below the device first."""
        seconds = event.stream.read_s
        return self.read_below(PARAMS, seconds, self.now(ready)) if seconds else ready

    def write_params(self, event: Event, ready: Moment) -> Moment:
        """Write parameters that are complete at `ready`, if they are kept below the device. Returns when that ends."""
        if event.stream.write_s:
            ready = self.write_below(PARAMS, event.stream.write_s, self.now(ready))
            self.params_written.append(ready)
        return ready

    def write_grads(self, event: Event, ready: Moment) -> Moment:
        """Write gradients that are complete at `ready`, if they are kept below the device. Returns `ready`."""
        if event.stream.write_s:
            written = self.write_below(GRADS, event.stream.write_s, self.now(ready))
            self.grads_written.append(written)
            self.grads_there[event.block] = written
        return ready

    def wait_grads_written(self, most: int) -> None:
        """Wait until gradients of fewer than `most` blocks are being written; 0: do not wait."""
        while most and len(self.grads_written) >= most:
            self.wait(self.grads_written.popleft(), WAIT_WRITE)

    def wait_updated(self) -> None:
        """Wait until another block may be updated."""
        for block in [each for each, (event, _) in self.late.items() if event.stream.write_s]:
            if len(self.params_written) + len(self.late) >= MOST_UPDATED:
                self.start_late(block)
        while len(self.params_written) >= MOST_UPDATED:
            self.wait(self.params_written.popleft(), WAIT_WRITE)

    def evict(self, event: Event) -> None:
        """EVICT waits for the write of the one before, then writes the input of its block."""
        self.wait(self.leaving, WAIT_WRITE)
        self.leaving = self.write_below(ACTIVATIONS, event.stream.write_s, (self.now_s, -1))
        self.evicted[event.block].append(self.leaving)

    def fetch(self, event: Event) -> None:
        """FETCH waits for the write of its input, then reads it."""
        self.wait(self.evicted[event.block].popleft(), WAIT_WRITE)
        self.fetched[event.block].append(self.read_below(ACTIVATIONS, event.stream.read_s, (self.now_s, -1)))

    def wait_kept(self, event: Event) -> None:
        """Make a pass wait for its input, and for gradients whose memory it needs."""
        self.wait_grads_written(event.most_writing)
        if self.fetched and event.op in HALVES and event.block in self.fetched:
            there = self.fetched[event.block]
            self.wait(there.popleft(), WAIT)
            if not there:
                del self.fetched[event.block]

    def look_up(self, event: Event) -> None:
        """A forward waits for rows that are kept below the device, which are read once those of an update are there."""
        self.wait(self.rows_written, WAIT_ROWS_WRITTEN)
        self.wait(self.read_below(TABLE, event.rows.read_s, (self.now_s, -1)), WAIT_ROWS)
        self.run_steps(event)

    def update_rows(self, event: Event) -> None:
        """An update waits for records in the host's memory; rows that it has changed are then written."""
        if event.rows.update_s:
            self.wait(self.read_below(TABLE, event.rows.update_s, (self.now_s, -1)), WAIT_ROWS)
        self.update(event)
        self.rows_written = self.write_below(TABLE, event.rows.write_s, (self.now_s, -1))

    def read_below(self, state: str, seconds: float, ready: Moment) -> Moment:
        """Read a whole state from below the device, from `ready` on, which may be past. Returns when that ends."""
        return self.slots.wholes[state].read(seconds, ready[0]), -1

    def write_below(self, state: str, seconds: float, ready: Moment) -> Moment:
        """Write a whole state there, from `ready` on. Returns when that ends."""
        return self.slots.wholes[state].write(seconds, ready[0]), -1

    def now(self, ready: Moment) -> Moment:
        return ready if ready[0] > self.now_s else (self.now_s, -1)

    def take(self, event: Event) -> None:
        """Issue the read of the next update's gradients, then wait for those of this one.

        So they are read before pieces of the ring whose slots this update frees.
        """
        if event.grads_s:
            ahead = self.slots.grads_ahead
            for seconds in (event.next_grads_s,) if ahead else (event.grads_s, event.next_grads_s):
                if seconds:
                    ahead.append(self.read_below(GRADS, seconds, (self.now_s, -1)))
            self.wait(ahead.popleft(), WAIT)

    def agree(self, event: Event) -> None:
        """AGREE waits for its block's gradient; the block's update on the host's cores waits for the sums of AGREE."""
        self.settle_gradients()
        self.agreed[event.block] = self.issue(event, START)

    def update_on_host(self, event: Event) -> None:
        """Start UPDATE on the host's cores; the device computes on."""
        self.wait_updated()
        self.updates[event.block] = self.run_on_cores(event)

    def refresh(self, event: Event) -> None:
        """REFRESH follows its UPDATE; parameters that are kept below the device are then written.

        Behind an update on the host's cores it takes a lane when its block is needed.
        """
        updated = self.updates.pop(event.block, START)
        if updated is not START and (event.seconds or event.stream.write_s):
            self.late[event.block] = event, updated
        else:
            self.refreshes[event.block] = self.write_params(event, self.issue(event, updated))

    def start_late(self, block: int) -> None:
        if block in self.late:
            event, updated = self.late.pop(block)
            self.wait(updated, "wait update")
            self.refreshes[block] = self.write_params(event, self.issue(event, START))

    def run_on_cores(self, event: Event) -> Moment:
        """Update a block on the host's cores once its gradient is there. Returns when the device has the result."""
        slots, there = self.slots, max(self.grads_there.pop(event.block, START), self.agreed.pop(event.block, START))
        begin_s = max(self.now_s, slots.cores_s, there[0])
        slots.cores_s = slots.passed_s(event.stream, begin_s) + event.seconds
        updated = self.updated_on_cores(event, begin_s, there)
        return self.read_below(GRADS, event.grads_s, updated) if event.grads_s else updated

    def updated_on_cores(self, event: Event, begin_s: float, there: Moment) -> Moment:
        """Hook for recordings: the cores are busy from `begin_s` on."""
        return self.slots.cores_s, -1

    def pass_pieces(self, event: Event) -> None:
        """Wait for the pieces of an event's states that are kept below the device; the caller computes."""
        self.wait((self.slots.passed_s(event.stream, self.now_s), -1), WAIT)
