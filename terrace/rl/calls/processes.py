"""The processes of a local pool and the connections to them: a `ProcessPool` with one job, which serves calls.

The `ProcessPool` starts, joins, watches and ends the ranks as it does for `terrace train`: it reports the first failure
and ends the other ranks. A thread waits for the job to end.
"""

import os
import queue
import secrets
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from typing import Any, NoReturn

from terrace.base.errors import HangError
from terrace.launch.heartbeats import HeartbeatStore
from terrace.launch.postmortem import in_words
from terrace.launch.process_pool import ProcessPool
from terrace.rl.calls.serve import serve

GRACE_S = 0.3  # for the other ranks of a failed call to report, to tell the first failure from its consequences
STACKS_S = 0.3  # for a process to write its stacks
_START_S = 120.0  # for ranks to join their world; importing torch takes 5 s on two busy cores
_END_S = 10.0  # for processes that were killed to be gone
_SECRET_BYTES = 32

_Link = tuple[int, "Connection[Any, Any]"]


class Processes:
    """`num_ranks` processes that serve calls until their connections close; `links` are in rank order.

    After a failure, when all processes have ended, `failed` is called in another thread with the first error. The
    constructor raises the error of a failed start, and `HangError` if ranks do not connect within `start_s`.
    """

    def __init__(
        self,
        num_ranks: int,
        failed: Callable[[BaseException], None],
        *,
        backend: str = "gloo",
        first_device: int = 0,
        start_s: float = _START_S,
    ) -> None:
        self._pool, self._failed = ProcessPool(num_ranks, grace_s=GRACE_S), failed
        self._job = threading.Thread()
        secret = secrets.token_bytes(_SECRET_BYTES)
        events: queue.SimpleQueue[_Link | BaseException] = queue.SimpleQueue()
        try:
            self.links = self._linked(num_ranks, secret, events, (backend, first_device), start_s)
        except BaseException:  # also a signal's
            self._abandon(num_ranks)
            raise

    def _linked(
        self,
        num_ranks: int,
        secret: bytes,
        events: "queue.SimpleQueue[_Link | BaseException]",
        devices: tuple[str, int],
        start_s: float,
    ) -> "list[Connection[Any, Any]]":
        with Listener(family="AF_UNIX", backlog=num_ranks, authkey=secret) as listener:
            job = (num_ranks, serve, (listener.address, secret), None, *devices)
            self._job = threading.Thread(target=self._run, args=(job, events), name="pool of roles", daemon=True)
            self._job.start()
            threading.Thread(target=_accept, args=(listener, num_ranks, events), name="links", daemon=True).start()
            found, deadline_s = dict[int, "Connection[Any, Any]"](), time.monotonic() + start_s
            while len(found) < num_ranks:
                try:
                    event = events.get(timeout=max(0.0, deadline_s - time.monotonic()))
                except queue.Empty:
                    self._give_up([rank for rank in range(num_ranks) if rank not in found], num_ranks, start_s)
                if isinstance(event, BaseException):
                    raise event
                found[event[0]] = event[1]
        return [found[rank] for rank in range(num_ranks)]

    def _abandon(self, num_ranks: int) -> None:
        # Some processes may still be starting: the pool ends them once it sees that one is gone. If none has started,
        # the fork server is still importing, and there is nothing to end.
        deadline_s = time.monotonic() + _END_S
        while self._pool.pids and self._job.is_alive() and time.monotonic() < deadline_s:
            self.signal(list(range(num_ranks)), signal.SIGKILL)
            self._job.join(0.05)

    def _run(self, job: tuple[Any, ...], events: "queue.SimpleQueue[_Link | BaseException]") -> None:
        try:
            self._pool.call(*job)
        except BaseException as error:  # raised again in the controller's thread
            events.put(error)
            self._failed(error)

    def _give_up(self, missing: list[int], num_ranks: int, start_s: float) -> NoReturn:
        self.signal(missing, signal.SIGUSR1)
        time.sleep(STACKS_S)
        self.signal(list(range(num_ranks)), signal.SIGKILL)
        self._job.join(_END_S)
        raise HangError(f"{in_words(missing)} of a new pool did not start within {start_s:g} s; stacks are on stderr")

    def signal(self, ranks: list[int], number: int) -> None:
        pids = self._pool.pids
        for rank in ranks:
            with suppress(ProcessLookupError, IndexError):
                os.kill(pids[rank], number)

    def beats(self) -> HeartbeatStore:
        return self._pool.beats(len(self.links))

    def close(self, patience_s: float) -> None:
        """Close the connections and wait up to `patience_s` for the processes to end; then kill them."""
        for link in self.links:
            link.close()
        self._job.join(patience_s)
        if self._job.is_alive():
            self.signal(list(range(len(self.links))), signal.SIGKILL)
            self._job.join()
        self._pool.close()


def _accept(listener: Listener, num_ranks: int, events: "queue.SimpleQueue[_Link | BaseException]") -> None:
    left = num_ranks
    while left:
        try:
            link = listener.accept()
            events.put((int(link.recv_bytes()), link))
            left -= 1
        except (AuthenticationError, EOFError):  # a process without the secret
            continue
        except OSError:  # the listener was closed after a failure
            return
