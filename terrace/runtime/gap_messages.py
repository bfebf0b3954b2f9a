"""Gradient messages on the lanes of a rank, sent whole or, in gaps, part by part in the order of program.gap_queue."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from terrace.comm.lane import Lane, Ticket
from terrace.program.gap_queue import Held
from terrace.program.message import Transfer
from terrace.runtime.flat_param import FlatParam

Work = Callable[[], None]
Carry = Callable[[FlatParam, Transfer], None]


class PartsTicket(Ticket):
    """Ticket of a message that is sent in parts."""

    def __init__(self, num_parts: int) -> None:
        self.left = num_parts  # parts that have not left
        self._tickets: list[Ticket] = []

    def add(self, ticket: Ticket | None) -> None:
        """Record that a part was submitted; its ticket is None if it has no elements."""
        self.left -= 1
        if ticket is not None:
            self._tickets.append(ticket)

    @property
    def newest(self) -> Ticket | None:
        """Ticket of the last part submitted. Parts complete in order."""
        return self._tickets[-1] if self._tickets else None

    def wait(self) -> None:
        """Block until later work may read the result. Raises an error of the work."""
        assert not self.left, f"{self.left} parts of a message are waited for that have not left"
        for ticket in self._tickets:
            ticket.wait()

    @property
    def is_done(self) -> bool:
        """Whether all parts have completed."""
        return not self.left and all(ticket.is_done for ticket in self._tickets)


@dataclass
class _Message:
    ticket: PartsTicket
    lane: Lane
    works: Sequence[Work | None]  # by part; None: no elements
    after: Ticket | None


class GapMessages:
    """Messages with parts not yet submitted."""

    def __init__(self) -> None:
        self._held = Held[_Message]()

    def hold(self, lane: Lane, works: Sequence[Work | None], after: Ticket | None) -> PartsTicket:
        """Submit part 0 and hold the others. Each part starts after the newest part of `after` at its submission."""
        message = _Message(PartsTicket(len(works)), lane, works, after)
        self._held.hold(message, len(works))
        self.leave(0)
        return message.ticket

    def leave(self, gap: int) -> None:
        """Submit the parts due at a gap."""
        self._leave(self._held.due(gap))

    def rest(self) -> None:
        """Submit all remaining parts, at the end of the pass."""
        self._leave(self._held.rest())

    def _leave(self, parts: Sequence[tuple[_Message, int]]) -> None:
        for message, part in parts:
            work = message.works[part]
            message.ticket.add(None if work is None else message.lane.submit(behind(newest_of(message.after), work)))


def carried(flats: Sequence[FlatParam], transfers: Sequence[Transfer], carry: Carry) -> Work:
    """Work that carries a block's message: the transfers of its flat parameters, in order."""

    def work() -> None:
        for transfer in transfers:
            carry(flats[transfer.flat], transfer)

    return work


def newest_of(ticket: Ticket | None) -> Ticket | None:
    """`ticket` itself, or the newest part's if the message is sent in parts."""
    return ticket.newest if isinstance(ticket, PartsTicket) else ticket


def behind(ticket: Ticket | None, work: Work) -> Work:
    """`work` that first waits for a message on another lane."""
    if ticket is None:
        return work

    def when_ready() -> None:
        ticket.wait()
        work()

    return when_ready
