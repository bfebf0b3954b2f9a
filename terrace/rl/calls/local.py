"""Roles in processes of this machine. Rows are in shared memory; calls and answers use a connection to each process."""

import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from terrace.base.errors import ConfigError, HangError
from terrace.launch.fork_server import start_fork_server
from terrace.launch.postmortem import Diagnosis
from terrace.launch.process_pool import LOST_PEER
from terrace.launch.rendezvous import host_store
from terrace.launch.silence import silent
from terrace.launch.workers import LOOPBACK
from terrace.rl.calls.host import Answer, Part, Task
from terrace.rl.calls.pending import Pending, Sent, checked, in_progress, overdue, seconds_left
from terrace.rl.calls.processes import GRACE_S, STACKS_S, Processes
from terrace.rl.calls.runtime import Handle, Pool, Runtime
from terrace.rl.calls.serve import PROTOCOL
from terrace.rl.values.memory import Segment, SharedMemory
from terrace.rl.values.rows import Rows

_CLOSE_S = 1.0  # for idle ranks to end
_VERDICT_OF_PEER_S = 3 * GRACE_S
_VERDICT_S = GRACE_S + 10.0  # for the pool to end its processes and report the cause


@dataclass(eq=False)
class _Rank(Pending):
    link: "Connection[Any, Any]"
    dropped: deque[Segment] = field(default_factory=deque)


class LocalRuntime(Runtime):
    """Pools of processes on this machine, which end with this process however it ends.

    With `backend` "gloo" they run on the CPU; with "nccl" each rank gets a GPU, in the order in which pools start.
    A call that takes longer than `timeout_s` raises `HangError`, which names the call and the late ranks. After any
    worker failure all pools are ended, and every later call raises the same error: the worker's `TerraceError` in one
    line, `RuntimeError` with the traceback of any other exception, or `HangError` with the signal that killed a
    process. Processes are started afresh, so a script needs `if __name__ == "__main__":`.
    """

    def __init__(self, *, timeout_s: float = 1800.0, backend: Literal["gloo", "nccl"] = "gloo") -> None:
        self._timeout_s, self._backend = checked(timeout_s), backend
        super().__init__(SharedMemory())
        start_fork_server()
        self._processes: list[Processes] = []
        self._ranks: dict[Any, _Rank] = {}  # by link
        self._of_pid: dict[int, _Rank] = {}
        self._first_failure, self._has_failed = threading.Lock(), threading.Event()
        self._failure: tuple[int, BaseException] | None = None  # pool, error
        self._error: Exception | None = None  # that every later call raises
        self._stores: list[TCPStore] = []

    def _open(self, pool: Pool) -> None:
        self._check()
        try:
            processes = Processes(
                pool.num_ranks,
                lambda error: self._on_failure(pool.index, error),
                backend=self._backend,
                first_device=sum(each.num_ranks for each in self.pools),
            )
        except BaseException as error:
            self._end()
            self._error = error if isinstance(error, Exception) else None
            raise
        self._processes.append(processes)
        for rank, link in enumerate(processes.links):
            self._ranks[link] = _Rank(pool=pool.index, rank=rank, link=link)

    def send(self, pool: Pool, tasks: Sequence[Task], handle: Handle, given: Sequence[Handle]) -> None:
        self.collect(0.0)
        sent = Sent(tasks[0].name, handle, given)
        for task, link in zip(tasks, self._processes[pool.index].links, strict=True):
            to = self._ranks[link]
            dropped = [to.dropped.popleft() for _ in range(len(to.dropped))]
            message = pickle.dumps((dropped, task), PROTOCOL)
            to.add(sent)
            try:
                link.send_bytes(message)
            except OSError:
                self._fail(pool.index)

    def collect(self, timeout_s: float | None) -> None:
        self._check()
        busy = [each for each in self._ranks.values() if each.calls]
        if not busy:
            return
        limit_s = seconds_left(busy, self._timeout_s)
        patience_s = max(0.0, limit_s if timeout_s is None else min(timeout_s, limit_s))
        ready = wait([each.link for each in busy], patience_s)
        for link in ready:
            if not self._receive(self._ranks[link]):
                self._fail(self._ranks[link].pool)
        if not ready and limit_s <= patience_s:
            self._fail_late()

    def _receive(self, rank: _Rank) -> bool:
        """Receive one answer from a process; False if the process has ended."""
        try:
            answer = pickle.loads(rank.link.recv_bytes())
        except (EOFError, OSError):
            return False
        assert isinstance(answer, Answer)
        if answer.part is not None:
            self._of_pid[answer.part.place.pid] = rank
        rank.take(answer)
        return True

    def read(self, parts: Sequence[Part]) -> Rows:
        """Read the rows of all parts; if a process that held some has ended, raises its pool's failure."""
        try:
            return super().read(parts)
        except HangError:
            self._check()
            dead = [rank for part in parts if (rank := self._of_pid.get(part.place.pid)) is not None]
            self._fail(dead[0].pool if dead else 0)
            raise

    def forget(self, part: Part) -> None:
        """Drop rows; a process that owns them is told with its next call."""
        if part.place.pid == os.getpid():
            self._store.drop(part.place)
        elif (owner := self._of_pid.get(part.place.pid)) is not None:
            # Dropping needs no Python objects of the rows, so they are not sent.
            owner.dropped.append(self._store.part(part.place, 0, 0))

    def meeting(self) -> tuple[str, int]:
        """A new store on this machine's loopback address."""
        store = host_store(LOOPBACK, 0, self._timeout_s)
        assert isinstance(store, TCPStore), "whose port is known"
        self._stores.append(store)
        return LOOPBACK, int(store.port)

    def close(self) -> None:
        """End all processes: idle ones end by themselves, others are killed."""
        idle = self._error is None and not any(rank.calls for rank in self._ranks.values())
        self._error = self._error or ConfigError("the runtime is closed: make another one")
        with self._first_failure:
            self._failure = self._failure or (-1, self._error)
        for processes in self._processes:
            processes.close(_CLOSE_S if idle else 0.0)
        self._processes.clear()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _on_failure(self, pool: int, error: BaseException) -> None:
        # Runs in a thread of the failed pool: the controller may not check for minutes, and other pools must stop now.
        if len(self._processes) > 1 and LOST_PEER in str(error):
            # The peer may be in another pool, which reports the cause a moment later.
            self._has_failed.wait(_VERDICT_OF_PEER_S)
        with self._first_failure:
            if self._failure is not None:
                return
            self._failure = pool, error
        for index, processes in enumerate(self._processes):
            if index != pool:
                processes.signal(list(range(len(processes.links))), signal.SIGKILL)
        self._has_failed.set()

    def _fail(self, pool: int) -> None:
        """Raise the first failure's error, after waiting for its pool to report it."""
        self._has_failed.wait(_VERDICT_S)
        error: BaseException = HangError("a process closed its link, and its pool does not say why")
        if self._failure is not None:
            pool, error = self._failure
        of_pool = [rank for rank in self._ranks.values() if rank.pool == pool]
        # Receive the answers that were sent before the failure, to know which call was running.
        for rank in of_pool:
            while rank.calls and rank.link.poll() and self._receive(rank):
                pass
        self._end()
        if not isinstance(error, Exception):
            raise error
        self._error = error
        if isinstance(error, HangError):  # other errors come from a call and have its name
            roles = self.pools[pool].roles if pool < len(self.pools) else ()
            self._error = HangError(f"{error}; {in_progress(roles, of_pool)}")
        raise self._error from (None if self._error is error else error)

    def _fail_late(self) -> None:
        late, words = overdue(self._ranks.values(), self._timeout_s)
        if not late:
            return
        # Ranks of any pool may be waiting for stopped ranks, so the error names only the stopped ones.
        stopped = silent([each.beats() for each in self._processes])
        if self._has_failed.is_set() or (not any(stopped) and self._has_answered(late)):
            return  # an answer or a failure has arrived meanwhile, which the caller handles next
        with self._first_failure:
            self._failure = self._failure or (late[0].pool, HangError())
        if any(stopped):
            words = "; ".join(self._stopped_words(pool, found) for pool, found in enumerate(stopped) if found)
        else:
            # Have the late ranks print their stacks.
            self._processes[late[0].pool].signal([each.rank for each in late], signal.SIGUSR1)
            time.sleep(STACKS_S)
            words += "; stacks are on stderr"
        self._end()
        self._error = HangError(words)
        raise self._error

    def _has_answered(self, late: Sequence[Pending]) -> bool:
        return any(each.link.poll() for each in self._ranks.values() if each in late)

    def _stopped_words(self, pool: int, found: Diagnosis) -> str:
        roles = self.pools[pool].roles if pool < len(self.pools) else ()
        return f"{found.message}; {in_progress(roles, [each for each in self._ranks.values() if each.pool == pool])}"

    def _end(self) -> None:
        for processes in self._processes:
            with suppress(OSError):
                processes.close(0.0)
        self._processes.clear()
        self._ranks.clear()
