"""The waits of a rank for states that are kept below its device (terrace.simulate.rank)."""

from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING

from terrace.plan.keep import MOST_UPDATED
from terrace.simulate.below import GRADS, PARAMS, WAIT, WAIT_WRITE, Moment, Slots
from terrace.simulate.priced_instruction import Event

if TYPE_CHECKING:
    from terrace.program.program import Program


class BelowClocks:
    """The clocks of a rank that depend on media below its device."""

    __slots__ = ("grads_written", "now_s", "params_written", "slots")

    def __init__(self, program: "Program") -> None:
        self.now_s, self.slots = 0.0, Slots(program)
        self.grads_written: deque[Moment] = deque()  # when each block's gradients are written
        self.params_written: deque[Moment] = deque()  # when each block's updated parameters are

    @abstractmethod
    def wait(self, moment: Moment, category: str) -> None:
        """Make the compute stream wait."""

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
            self.grads_written.append(self.write_below(GRADS, event.stream.write_s, self.now(ready)))
        return ready

    def wait_grads_written(self, most: int) -> None:
        """Wait until gradients of fewer than `most` blocks are being written; 0: do not wait."""
        while most and len(self.grads_written) >= most:
            self.wait(self.grads_written.popleft(), WAIT_WRITE)

    def wait_updated(self) -> None:
        """Wait until another block may be updated."""
        while len(self.params_written) >= MOST_UPDATED:
            self.wait(self.params_written.popleft(), WAIT_WRITE)

    def read_below(self, state: str, seconds: float, ready: Moment) -> Moment:
        """Read a whole state from below the device, from `ready` on, which may be past. Returns when that ends."""
        return self.slots.wholes[state].read(seconds, ready[0]), -1

    def write_below(self, state: str, seconds: float, ready: Moment) -> Moment:
        """Write a whole state there, from `ready` on. Returns when that ends."""
        return self.slots.wholes[state].write(seconds, ready[0]), -1

    def now(self, ready: Moment) -> Moment:
        """The later of a moment and now."""
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

    def pass_pieces(self, event: Event) -> None:
        """Wait for the pieces of an event's states that are kept below the device; the caller computes."""
        self.wait((self.slots.passed_s(event.stream, self.now_s), -1), WAIT)
