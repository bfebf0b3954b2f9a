"""Pool of processes on this machine that run functions as worlds: the parent's side.

The parent hosts the store, which therefore survives the death of any rank. A failed call ends the processes that took
part in it, and the next call starts fresh ones.
"""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.spawn
import os
import pickle
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from torch.distributed.distributed_c10d import PrefixStore

from terrace.base.errors import HangError
from terrace.launch.fork_server import start_fork_server
from terrace.launch.heartbeats import HeartbeatStore
from terrace.launch.machines import num_cores
from terrace.launch.postmortem import in_words
from terrace.launch.rendezvous import host_store
from terrace.launch.seal import Seal
from terrace.launch.signals import ended_words
from terrace.launch.silence import beats_of
from terrace.launch.stop import ask
from terrace.launch.workers import LOOPBACK, PoolJob, Report, serve

LOST_PEER = "lost the connection to the others"  # of ranks whose peer failed, in the error of a pool
_STOP_S = 1.0  # between SIGTERM and SIGKILL; a rank has had its grace by then
_STORE_TIMEOUT_S = 60.0
_TORCH_LIMIT_S = 7 * 24 * 3600.0
_STACKS_S = 0.3  # for a process to write its stacks
_LOST_CODE = "exited with code 255"  # of multiprocessing, for a child whose fork server did not report its end


@dataclass(frozen=True)
class _Member:
    process: Any
    link: "Connection[Any, Any]"

    @property
    def sources(self) -> list[Any]:
        return [self.link, self.process.sentinel]

    def report(self) -> Report | None:
        try:
            if self.link.poll():
                report = self.link.recv()
                assert isinstance(report, Report)
                return report
        except (EOFError, OSError):
            pass
        self.process.join(_STOP_S)
        return None


class ProcessPool:
    """Pool of `num_processes` waiting processes. Use as a context manager.

    After the first failure in a call, the other ranks have `grace_s` to leave on their own.
    """

    def __init__(self, num_processes: int, *, grace_s: float) -> None:
        self._grace_s, self._num_jobs = grace_s, 0
        self._seal = Seal.fresh()
        self._context = multiprocessing.get_context("forkserver")
        self._store: Any = host_store(LOOPBACK, 0, _STORE_TIMEOUT_S)
        self._members: list[_Member | None] = [None] * num_processes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [int(member.process.pid) for member in self._members if member is not None]

    def ask_to_stop(self, name: str) -> None:
        """Asks the ranks of the current or next call to stop in order; `name` is the signal that caused it."""
        ask(*self._world(), name)

    def beats(self, world_size: int) -> HeartbeatStore:
        return beats_of(*self._world(), world_size)

    def _world(self) -> tuple[Any, Seal]:
        call = f"job/{max(1, self._num_jobs)}"
        return PrefixStore(f"{call}/world", self._store), self._seal.within(call)

    def close(self) -> None:
        """Ends every process. May be called twice."""
        for member in filter(None, self._members):
            with suppress(OSError):
                member.link.send("quit")
        # They end on their own after "quit"; signals are for those that do not.
        self._stop(range(len(self._members)), self._grace_s)

    def call(
        self,
        world_size: int,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        timeout_s: float | None,
        backend: str = "gloo",
        first_device: int = 0,
    ) -> list[Any]:
        """Runs `function(world, *arguments)` on `world_size` ranks. Returns their results in rank order.

        With backend nccl each rank uses a CUDA device, in order from `first_device` on. Raises one error for all ranks;
        no process of a failed call survives.
        """
        if not 1 <= world_size <= len(self._members):
            raise ValueError(f"a world of {world_size} needs 1 to {len(self._members)} processes")
        # Before anything is sent, so that an argument that cannot be pickled leaves the pool intact.
        payload = pickle.dumps((function, arguments))
        try:
            return self._call(world_size, payload, timeout_s, backend, first_device)
        except BaseException:
            self._stop(range(world_size), 0.0)
            raise

    def _call(
        self, world_size: int, payload: bytes, timeout_s: float | None, backend: str, first_device: int
    ) -> list[Any]:
        self._num_jobs += 1
        members = [self._member(rank) for rank in range(world_size)]
        num_threads = max(1, num_cores() // world_size)
        # A call without a limit relies on its watchdogs; torch needs a number in any case.
        limit_s = timeout_s or _TORCH_LIMIT_S
        deaths: list[str] = []
        seal = self._seal.within(f"job/{self._num_jobs}")
        for rank, member in enumerate(members):
            job = PoolJob(self._num_jobs, rank, world_size, num_threads, limit_s, backend, seal, payload, first_device)
            # A process that died while idle is reported below.
            with suppress(OSError):
                member.link.send(job)
        reports, late = self._collect(members, time.monotonic() + timeout_s if timeout_s else None, deaths)
        done = {report.rank: report for report in reports if report.kind == "done"}
        if len(done) == world_size:
            for member in members:
                # A rank may be killed after it has reported; its result has arrived.
                with suppress(OSError):
                    member.link.send("end")
            return [pickle.loads(done[rank].payload) for rank in range(world_size)]
        # No rank failed and time is up: only stacks can tell where they wait.
        if late:
            for rank in late:
                # The stacks of the late ranks are the only trace of a stall without a watchdog.
                os.kill(members[rank].process.pid, signal.SIGUSR1)
            time.sleep(_STACKS_S)
            raise HangError(f"{in_words(late)} did not finish within {limit_s:g} s; stacks are on stderr")
        self._stop(range(world_size), 0.0)
        # The ranks end with the server, and their own exit codes are lost with it: these come a moment before its end.
        lost = any(_LOST_CODE in death for death in deaths)
        end = _end_of_server(_STOP_S if lost else 0.0)
        raise one_error(reports, deaths) if end is None else _without_server(end)

    def _collect(
        self, members: list[_Member], deadline_s: float | None, deaths: list[str]
    ) -> tuple[list[Report], list[int]]:
        reports: list[Report] = []
        pending = dict(enumerate(members))
        failed = False
        while pending:
            # The sentinel as well: a rank's own children may hold its end of the link past its death.
            sources = [source for member in pending.values() for source in member.sources]
            ready = wait(sources, None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
            if not ready:
                return reports, [] if failed else sorted(pending)
            for rank, member in list(pending.items()):
                if not any(source in ready for source in member.sources):
                    continue
                del pending[rank]
                report = member.report()
                if report is None:
                    deaths.append(_death(rank, member.process.exitcode))
                else:
                    reports.append(report)
                # The grace runs from the first failure: later ones are mostly its consequences.
                bad = report is None or report.kind != "done"
                if bad and not failed:
                    failed, grace_end_s = True, time.monotonic() + self._grace_s
                    deadline_s = grace_end_s if deadline_s is None else min(deadline_s, grace_end_s)
        return reports, []

    def _member(self, rank: int) -> _Member:
        member = self._members[rank]
        if member is not None and member.process.is_alive():
            return member
        # Clears up after a process that died while idle.
        self._stop([rank], 0.0)
        here, there = self._context.Pipe()
        process = self._context.Process(target=serve, args=(there, self._store.port), name=f"rank {rank}")
        try:
            start_fork_server()  # one that has died is started anew as the first was
            process.start()
        except (EOFError, ConnectionError) as error:
            raise _without_server(_end_of_server(_STOP_S)) from error
        # Only the child keeps its end, so that its death is an end of file here.
        there.close()
        member = self._members[rank] = _Member(process, here)
        return member

    def _stop(self, ranks: Any, timeout_s: float) -> None:
        # SIGKILL comes last, since it also ends processes that are stopped and would ignore SIGTERM.
        members = [member for rank in ranks if (member := self._members[rank]) is not None]
        _join(members, timeout_s)
        for member in members:
            if member.process.is_alive():
                member.process.terminate()
        _join(members, _STOP_S)
        for member in members:
            if member.process.is_alive():
                member.process.kill()
            member.process.join()
            member.link.close()
        for rank in ranks:
            self._members[rank] = None


def one_error(reports: list[Report], deaths: list[str]) -> Exception:
    """The single error raised for a failed call.

    In order of preference: a rank's own error, since others follow from it; a watchdog's verdict; a process that died
    without a report; an unexplained lost connection. All are one line, except for an unexpected error, a bug of ours,
    which keeps its traceback.
    """
    kinds: dict[str, list[Report]] = {}
    for report in reports:
        kinds.setdefault(report.kind, []).append(report)
    first = next((report for report in reports if report.kind in ("terrace", "other")), None)
    if first is not None and first.kind == "terrace":
        error = pickle.loads(first.payload)(f"{first.message} (reported by rank {first.rank})")
        assert isinstance(error, Exception)
        return error
    if first is not None:
        return RuntimeError(f"rank {first.rank} failed: {first.message}\n{first.trace}")
    if "hang" in kinds:
        messages = list(dict.fromkeys(report.message for report in kinds["hang"]))
        who = in_words(report.rank for report in kinds["hang"])
        return HangError(f"{'; '.join(messages)} (reported by {who})")
    lost = kinds.get("communication", [])
    if deaths:
        ranks = f"; {in_words(report.rank for report in lost)} lost the connection" if lost else ""
        return HangError("; ".join(deaths) + ranks)
    # Their peers had ended, or stopped, before any watchdog was watching.
    message = lost[0].message.split("\n")[0]
    return HangError(f"{in_words(report.rank for report in lost)} {LOST_PEER}: {message}")


def _death(rank: int, code: int | None) -> str:
    if code is None:
        return f"rank {rank} ended before it reported"
    return f"rank {rank} {ended_words(code)}" + (" before it reported" if code >= 0 else "")


def _without_server(end: str | None) -> HangError:
    how, program = end or "does not answer", multiprocessing.spawn.get_executable()
    # A process ended by a signal was alive; one that exited by itself has reported why, or could not even begin.
    fix = "start the run again" if "killed" in how else f"its own lines say why; it runs {os.fsdecode(program or b'')}"
    return HangError(f"the fork server of the ranks {how}, and all ranks with it: {fix}")


def _end_of_server(timeout_s: float = 0.0) -> str | None:
    """How the fork server ended, in words; None if it is still running after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while (end := _end_of_server_now()) is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return end


def _end_of_server_now() -> str | None:
    pid = getattr(getattr(multiprocessing.forkserver, "_forkserver", None), "_forkserver_pid", None)
    if pid is None:
        return None
    try:
        # multiprocessing waits for it, and then starts another.
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return "ended"
    if end is None:
        return None
    return ended_words(end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)


def _join(members: list[_Member], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    for member in members:
        member.process.join(max(0.0, deadline_s - time.monotonic()))
