"""Messages of a rank's instructions: submitted to lanes, and waited for while a watchdog looks on.

A gradient's message is sent whole or, in gaps, part by part in the order of program.gap_queue.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from terrace.comm.lane import DONE, HERE, Lane, Ticket, behind
from terrace.program.gaps import Held
from terrace.program.instruction import Instruction, Op
from terrace.program.message import Transfer
from terrace.program.program import Program
from terrace.runtime.clock import Clock
from terrace.runtime.flat_param import FlatParam

if TYPE_CHECKING:
    from terrace.runtime.comm import Comm

Work = Callable[[], None]
Carry = Callable[[FlatParam, Transfer], None]


class Progress(Protocol):
    """Called with a rank's current instruction; `waiting_on` are the ranks of the message it waits for."""

    def __call__(self, counter: int, instruction: object, waiting_on: tuple[int, ...]) -> None: ...


def no_progress(counter: int, instruction: object, waiting_on: tuple[int, ...]) -> None:
    """No-op progress callback."""


@dataclass
class Pending:
    """Communication in flight, and the instruction that issued it."""

    ticket: Ticket
    counter: int  # its position in the program
    instruction: Instruction

    @property
    def doing(self) -> object:
        """What a watchdog reports for a rank that waits for it."""
        return self.instruction


class PartsTicket(Ticket):
    """Ticket of a message that is sent in parts."""

    def __init__(self, num_parts: int) -> None:
        self.left = num_parts  # parts that have not left
        self._tickets: list[Ticket] = []

    def add(self, ticket: Ticket) -> None:
        self.left -= 1
        self._tickets.append(ticket)

    def leave_out(self) -> None:
        """Record that a part has no elements."""
        self.left -= 1

    @property
    def newest(self) -> Ticket:
        return self._tickets[-1] if self._tickets else DONE

    def wait(self) -> None:
        assert not self.left, f"{self.left} parts of a message are waited for that have not left"
        for ticket in self._tickets:
            ticket.wait()

    @property
    def is_done(self) -> bool:
        return not self.left and all(ticket.is_done for ticket in self._tickets)


@dataclass
class _InParts:
    ticket: PartsTicket
    lane: Lane
    works: Sequence[Work | None]  # by part; None: no elements
    after: Ticket


class GapMessages:
    def __init__(self) -> None:
        self._held = Held[_InParts]()

    def hold(self, lane: Lane, works: Sequence[Work | None], after: Ticket = DONE) -> PartsTicket:
        """Submit part 0 and hold the others. Each part starts after the newest part of `after` at its submission.

        The work of a part without elements is None.
        """
        message = _InParts(PartsTicket(len(works)), lane, works, after)
        self._held.hold(message, len(works))
        self.leave(0)
        return message.ticket

    def leave(self, gap: int) -> None:
        self._leave(self._held.due(gap))

    def flush(self) -> None:
        """Submit all parts still held, at the end of the pass."""
        self._leave(self._held.rest())

    def _leave(self, parts: Sequence[tuple[_InParts, int]]) -> None:
        for message, part in parts:
            work = message.works[part]
            if work is None:
                message.ticket.leave_out()
            else:
                message.ticket.add(message.lane.submit(behind(message.after.newest, work)))


class Messages:
    """The messages of one rank's instructions: each on the lane of the outermost tier that it crosses.

    `counter` and `now` are the instruction that runs, of which `progress` is told; `clock` counts waits. `gaps` holds
    the parts of gradients that are sent later.
    """

    def __init__(
        self, comm: "Comm", flats: Mapping[int, Sequence[FlatParam]], clock: Clock, progress: Progress
    ) -> None:
        self.comm, self.clock, self.program = comm, clock, comm.program
        self.counter, self.now = 0, comm.program.instructions[0]
        self.gaps = GapMessages()
        self.progress = progress
        self._told: tuple[int, object, tuple[int, ...]] = (self.counter, self.now, ())
        self._flats = flats

    def run(self, program: Program, handlers: Mapping[Op, Callable[[Instruction], None]]) -> None:
        """Run the instructions of a program, each by the handler of its op."""
        self.program = program
        for self.counter, self.now in enumerate(program.instructions):
            # Reported before it runs: a rank that hangs names the instruction it hangs in.
            # Without a function of its own, as this is done for each instruction.
            self._told = self.counter, self.now, ()
            self.progress(*self._told)
            handlers[self.now.op](self.now)

    @contextmanager
    def at(self, counter: int, now: Instruction) -> Iterator[None]:
        """Context in which an earlier instruction of a training step is the one that runs."""
        before = self.program, self.counter, self.now
        self.program, self.counter, self.now = self.comm.program, counter, now
        yield
        self.program, self.counter, self.now = before

    def wait(self, pending: Pending, category: str) -> None:
        """Wait for a message. The clock counts the time as `category`."""
        self._tell(pending.counter, pending.doing, self.comm.participants(pending.instruction))
        pending.ticket.wait()
        self.clock.mark(category)
        self._tell(self.counter, self.now, ())

    def wait_below(self, ticket: Ticket, category: str) -> None:
        """Wait for a read or write below the device, for which no other rank is needed."""
        self.moved()
        ticket.wait()
        self.clock.mark(category)

    def waiting_on(self, ranks: tuple[int, ...]) -> None:
        """Report that the instruction that runs waits for `ranks`, or no longer does."""
        self._tell(self.counter, self.now, ranks)

    def moved(self) -> None:
        """Report again what was reported last: a piece of states was updated, here or on the host's cores."""
        self.progress(*self._told)

    def _tell(self, counter: int, doing: object, ranks: tuple[int, ...]) -> None:
        self._told = counter, doing, ranks
        self.progress(counter, doing, ranks)

    def submit(self, work: Work, after: Ticket = DONE) -> Pending:
        """Submit the work of the instruction that runs, to start when `after` is done."""
        message = self.program.message(self.now)
        lane = self.comm.lanes[message.lane] if message.sends else HERE  # without peers there is no lane
        return Pending(lane.submit(behind(after, work)), self.counter, self.now)

    def submit_gradients(self, carry: Carry, after: Ticket = DONE) -> Pending:
        """Submit a block's REDUCE or SYNC, whole or in the gaps of the backward that follows."""
        if not self.now.in_gaps:
            return self.submit(self.of_block(carry), after)
        message = self.program.message(self.now)
        works = [self.part(self._carried(each.transfers, carry)) if each.transfers else None for each in message.parts]
        return Pending(self.gaps.hold(self.comm.lanes[message.lane], works, after), self.counter, self.now)

    def part(self, work: Work) -> Work:
        """The work of one part of a message; a recording of the step times it."""
        return work

    def of_block(self, carry: Carry) -> Work:
        """Work that carries the message of the block: the transfers of its flat parameters, in order."""
        return self._carried(self.program.message(self.now).transfers, carry)

    def _carried(self, transfers: Sequence[Transfer], carry: Carry) -> Work:
        flats = self._flats[self.now.block]

        def work() -> None:
            for transfer in transfers:
                carry(flats[transfer.flat], transfer)

        return work
