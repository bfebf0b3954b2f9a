"""One process per rank, each in its namespace, supervised to the end.

This module reads the environment: children inherit it, with a launcher's variables set as by torchrun. Rank 0 writes
to our own stdout and stderr; lines of other ranks go to stderr as `[rank 5] ...`. Each rank leads its own session, so
that its descendants end with it.
"""

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, NoReturn

from terrace.lab.rehearse import guard
from terrace.lab.rehearse.network import Network, undisturbed
from terrace.lab.rehearse.script import HOME
from terrace.lab.rehearse.wiring import Wiring
from terrace.launch.signals import signal_name

_PORT = "29500"  # torchrun's; certainly free, since the namespace is ours
_GRACE_S = 5.0  # for other ranks to exit by themselves after one failed: they may print more about the reason
_END_S = 3.0  # between SIGTERM and SIGKILL
_LONGEST_LINE_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Outcome of all ranks; `rank` is the first that failed, None when all succeeded."""

    rank: int | None
    code: int  # as in shells: 0, an exit code, or 128 + the number of a signal
    words: str


def rank_environment(wiring: Wiring, rank: int, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables of a rank: `given` (default: ours), plus its rank and the rendezvous."""
    # All ranks share a file system, so they are local ranks of one machine: per-machine work runs only once.
    # Devices are hidden unless the user names some: nccl would bypass the emulated network.
    base = dict(os.environ if given is None else given)
    kept = {name: value for name, value in base.items() if not name.startswith("TORCHELASTIC_")}
    num_ranks, num_cores = wiring.cluster.world_size, os.cpu_count() or 1
    return {
        "OMP_NUM_THREADS": str(max(1, num_cores // num_ranks)),
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # or every rank warns that its peers' addresses have no names
        **kept,
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": wiring.address(0),
        "MASTER_PORT": _PORT,
        "GLOO_SOCKET_IFNAME": HOME,
    }


def start_whole(command: Sequence[str], output: Path, orders: str) -> subprocess.Popen[bytes]:
    """Start `command`, which leads a session of its own, with `TERRACE_FAULTS` and its output in a file."""
    with output.open("ab") as file, undisturbed():
        return subprocess.Popen(
            list(command),
            env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, "TERRACE_FAULTS": orders},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=DieWith(os.getpid()),
        )


def run_paced(command: Sequence[str], scale: float) -> NoReturn:
    """Replace this process by `command`, with its communication paced to `scale` times its cluster's rates.

    Signals and exit code are then those of the command. It gets no CUDA device: only messages of CPU ranks can be
    paced.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(command[0], list(command), {**os.environ, "TERRACE_PACE": repr(scale), "CUDA_VISIBLE_DEVICES": ""})


def run_ranks(network: Network, command: Sequence[str]) -> Ended:
    """Run `command` as every rank. No rank is left running on return or on an exception."""
    with guarded() as told, _Ranks(told) as ranks:
        for rank in network.wiring.ranks:
            with undisturbed():  # no signal between the start of a process and its registration
                ranks.start(rank, network.inside(rank, command), rank_environment(network.wiring, rank))
        return ranks.wait()


class _Ranks:
    # The main thread watches all processes: for their end, and for their output.
    def __init__(self, told: IO[str]) -> None:
        self._told = told
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._written: dict[int, bytearray] = {}
        self._selector = selectors.DefaultSelector()
        self._failed: tuple[int, int] | None = None  # rank, return code

    def __enter__(self) -> "_Ranks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with undisturbed():
            self._end()
        self._selector.close()

    def start(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        pipe = None if rank == 0 else subprocess.PIPE
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=None if rank == 0 else subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=DieWith(os.getpid()),
        )
        self._running[rank] = process
        self._tell(process.pid)
        self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, (rank, None))
        if process.stdout is not None:
            os.set_blocking(process.stdout.fileno(), False)
            self._written[rank] = bytearray()
            self._selector.register(process.stdout, selectors.EVENT_READ, (rank, process.stdout))

    def wait(self) -> Ended:
        # Until all have ended, or for a while after the first failure.
        deadline_s = float("inf")
        while self._running and time.monotonic() < deadline_s:
            self._step(None if self._failed is None else max(deadline_s - time.monotonic(), 0))
            if self._failed is not None and deadline_s == float("inf"):
                deadline_s = time.monotonic() + _GRACE_S
        if self._failed is None:
            return Ended(rank=None, code=0, words="")
        num_ended = len(self._running)
        self._end()
        rank, code = self._failed
        how = f"ended with exit code {code}" if code > 0 else f"was killed by {signal_name(-code)}"
        words = f"rank {rank} {how}" + (f"; {num_ended} others were ended" if num_ended else "")
        return Ended(rank=rank, code=code if code > 0 else 128 - code, words=words)

    def _step(self, timeout_s: float | None) -> None:
        events = [key for key, _ in self._selector.select(timeout_s)]
        for key in sorted(events, key=lambda key: key.data[1] is None):  # output before exits: keeps last words
            rank, pipe = key.data
            if pipe is not None:
                self._pass_on(rank, pipe)
            else:
                self._reap(rank, key.fd)

    def _reap(self, rank: int, pidfd: int) -> None:
        process = self._running.pop(rank)
        with suppress(ProcessLookupError):  # its descendants, before wait() frees the process id
            os.killpg(process.pid, signal.SIGKILL)
        self._tell(-process.pid)
        code = process.wait()
        if code and (self._failed is None):
            self._failed = (rank, code)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        if process.stdout is not None:
            self._pass_on(rank, process.stdout, last=True)

    def _pass_on(self, rank: int, pipe: IO[bytes], *, last: bool = False) -> None:
        # Print the whole lines that a rank has written; with `last`, or at the end of its pipe, the rest too.
        lines = self._written[rank]
        read: bytes | None = pipe.read()
        while read:
            lines += read
            read = pipe.read()
        last = last or read is not None  # b"" is the end of the pipe; None means more may come
        if last:
            with suppress(KeyError):
                self._selector.unregister(pipe)
        whole, newline, rest = bytes(lines).rpartition(b"\n")
        if last or len(rest) > _LONGEST_LINE_BYTES:
            whole, newline, rest = bytes(lines).removesuffix(b"\n"), bytes(lines[:1]), b""
        self._written[rank] = bytearray(rest)
        if newline:
            text = b"".join(b"[rank %d] %s\n" % (rank, line) for line in whole.split(b"\n"))
            with suppress(OSError):  # our stderr is closed: no reason to end the ranks
                sys.stderr.flush()
                os.write(2, text)

    def _end(self) -> None:
        # Terminate gracefully first.
        for number, patience_s in ((signal.SIGTERM, _END_S), (signal.SIGKILL, 60.0)):
            for process in self._running.values():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            deadline_s = time.monotonic() + patience_s
            while self._running and time.monotonic() < deadline_s:
                self._step(max(deadline_s - time.monotonic(), 0))

    def _tell(self, group: int) -> None:
        with suppress(OSError):  # the guard died: no reason to end the ranks
            self._told.write(f"{group}\n")
            self._told.flush()


class DieWith:
    """Runs in a child before its program: the kernel kills it when the rehearsal dies, and it gets its signals back."""

    def __init__(self, parent: int) -> None:
        self._parent, self._libc = parent, ctypes.CDLL(None)  # loaded here: a forked child should not

    def __call__(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._parent:  # the parent died before prctl took effect
            os._exit(1)


@contextmanager
def guarded() -> Iterator[IO[str]]:
    """Kills the process groups named to it if this process dies within the block (terrace.lab.rehearse.guard)."""
    # Yields the guard's pipe; closing it after "done" lets the guard exit without killing.
    program = [sys.executable, "-E", "-S", str(Path(guard.__file__))]
    process = subprocess.Popen(program, stdin=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdin is not None
    try:
        yield process.stdin
    finally:
        with suppress(OSError):
            process.stdin.write("done\n")
            process.stdin.close()
        process.wait()
