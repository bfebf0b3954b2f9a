"""Lanes: communication that overlaps with computation, in program order.

A rank has one lane for each tier that is outermost for some message, and none if it has no peers. Messages run in the
order in which the program issued them, so all members of a group run the same order. On a CPU a lane is a thread that
calls blocking collectives; with a GPU it is a stream. A `Ticket` stands for submitted work; waiting for it
blocks the calling thread, or makes the current stream wait, until the work is done.

Memory that submitted work refers to is kept alive until the work has read it, whatever the caller drops: a thread
drops its work after running it, and a stream's ticket when the submitting stream has waited for it. A tensor that
work replaces in an object must be kept alive by that object.
"""

import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import torch

from terrace.accelerator import has_streams


class Ticket(ABC):
    @abstractmethod
    def wait(self) -> None:
        """Block until later work may read the result. Raises an error of the work."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether the work has completed. Does not wait."""

    def wait_on_host(self) -> None:
        """Block the calling thread until the work has completed."""
        self.wait()

    @property
    def newest(self) -> "Ticket":
        """Ticket of the part of the work that was submitted last; parts complete in order."""
        return self


class Lane(ABC):
    @abstractmethod
    def submit(self, work: Callable[[], None]) -> Ticket:
        """Run `work` after all work submitted before it and after the computation issued so far."""

    @property
    def failed(self) -> bool:
        return False

    @abstractmethod
    def close(self, wait: bool = True) -> None:
        """Stop the lane and drop work not yet started. With `wait`, wait for running work."""


class _ThreadTicket(Ticket):
    def __init__(self, work: Callable[[], None]) -> None:
        self.work = [work]  # until it begins
        self.finished = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        self.finished.wait()
        if self.error is not None:
            raise self.error

    @property
    def is_done(self) -> bool:
        return self.finished.is_set()


class _Queue:
    def __init__(self) -> None:
        self.tickets: queue.SimpleQueue[_ThreadTicket | None] = queue.SimpleQueue()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run the tickets' work in order, until a None."""
        while (ticket := self.tickets.get()) is not None:
            # Taken, so that its tensors are free once it has run.
            work = ticket.work.pop()
            try:
                # Members of a group stay in step: after an error, no later collective may run.
                if self.error is not None:
                    raise self.error
                with torch.no_grad():
                    work()
            except BaseException as error:
                self.error = ticket.error = error
            del work
            ticket.finished.set()


class ThreadLane(Lane):
    """A thread that calls blocking collectives. After an error, all later work fails with that error.

    The thread ends when the lane is closed or freed.
    """

    def __init__(self) -> None:
        # The thread must not refer to the lane: it would keep an unclosed lane alive and, through an error's traceback,
        # all groups of its engine.
        self._queue = _Queue()
        self._thread = threading.Thread(target=self._queue.run, name="terrace-lane", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._queue.tickets.put, None).atexit = False

    def submit(self, work: Callable[[], None]) -> Ticket:
        ticket = _ThreadTicket(work)
        self._queue.tickets.put(ticket)
        return ticket

    @property
    def failed(self) -> bool:
        return self._queue.error is not None

    def close(self, wait: bool = True) -> None:
        self._queue.tickets.put(None)
        if wait:
            self._thread.join()


class _StreamTicket(Ticket):
    def __init__(self, work: Callable[[], None], event: torch.Event, computing: torch.Stream) -> None:
        self.work: Callable[[], None] | None = work
        self.event = event
        self.computing = computing  # the stream that submitted the work, whose memory it reads

    def wait(self) -> None:
        # Only the stream waits, not the host.
        stream = torch.accelerator.current_stream(self.computing.device)
        stream.wait_event(self.event)
        # Another lane's wait does not make computing wait, which would fill the memory again.
        if stream == self.computing:
            self.work = None

    def wait_on_host(self) -> None:
        self.event.synchronize()
        self.work = None

    @property
    def is_done(self) -> bool:
        return self.event.query()


class StreamLane(Lane):
    """A stream other than the current one. The host never blocks.

    Work waits for the computation issued before it, so it may overwrite buffers that the computation released in
    program order, and memory allocated by work may be freed without a wait. The reverse does not hold: the allocator
    reuses memory freed on the compute stream at once. Therefore a ticket keeps what its work refers to until the
    submitting stream has waited for it, and the lane keeps tickets without a wait until their work is done. The
    device need not be the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # High priority: otherwise a large product's thread blocks would be scheduled first, and the message start late.
        self._stream = torch.Stream(device, priority=-1)
        self._under_way = deque[_StreamTicket]()

    def submit(self, work: Callable[[], None]) -> Ticket:
        computing = torch.accelerator.current_stream(self._device)
        # The work reads results of the computation issued so far.
        self._stream.wait_stream(computing)
        with self._stream, torch.no_grad():
            work()
            event = torch.Event(self._device)
            event.record(self._stream)
        while self._under_way and (self._under_way[0].work is None or self._under_way[0].is_done):
            self._under_way.popleft()
        self._under_way.append(ticket := _StreamTicket(work, event, computing))
        return ticket

    def close(self, wait: bool = True) -> None:
        if wait:
            self._stream.synchronize()
            self._under_way.clear()


class _Over(Ticket):
    def wait(self) -> None:
        pass

    @property
    def is_done(self) -> bool:
        return True


class _Here(Lane):
    def submit(self, work: Callable[[], None]) -> Ticket:
        with torch.no_grad():
            work()
        return DONE

    def close(self, wait: bool = True) -> None:
        pass


DONE: Ticket = _Over()  # of work that nothing waits for
HERE: Lane = _Here()  # of messages without peers: the calling thread and its stream do what there is to do


def behind(ticket: Ticket, work: Callable[[], None]) -> Callable[[], None]:
    if ticket is DONE:
        return work

    def when_ready() -> None:
        ticket.wait()
        work()

    return when_ready


def make_lane(device: torch.device, *, by_host: bool = False) -> Lane:
    """A lane for messages of tensors on `device`. `by_host` messages get a thread on any device."""
    return StreamLane(device) if has_streams(device) and not by_host else ThreadLane()
