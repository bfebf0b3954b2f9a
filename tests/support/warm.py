"""`terrace`, or a script, in a process of its own whose interpreter is warm: forked from one that has imported torch.

Such a process differs from one that a shell starts in nothing but its first seconds: it has its own directory,
environment, output, signals and exit code, and the ranks that it starts are children of its own fork server, which is
forked, too. Starting cold is left to the tests that start `python -m terrace`, the script `terrace` or torchrun.
"""

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from terrace.cli.main import HELP, main
from terrace.launch import process_pool, start
from terrace.launch.fork_server import start_fork_server
from terrace.launch.signals import SIGNALS
from terrace.train import calibrate, sample
from tests.support import one_loop

# What a command would import when it runs, ranks with the test modules whose functions they are called for, and torch's
# profiler and compiler in each rank.
_OTHERS = ("hypothesis", "numpy.ma", "pytest", "torch._inductor", "torch.profiler")
for _name in (*(f"terrace.cli.{each}" for each in (*HELP, "worker")), *_OTHERS):
    import_module(_name)

one_loop.share()

# A world of one rank would have all cores, and on tensors this small their threads wait for one another.
vars(process_pool)["num_cores"] = lambda: 1

# What a forked process measures at the start of a run takes a moment only: what a full measurement says has its own
# tests.
_MOMENT_S, _FEW = 0.03, 4
# And a command generates more than a window of the tiny runs, but no page of text.
_TOKENS = 40


class Command:
    """A process that runs, on `host` as far as it knows, with the part of `subprocess.Popen` that the tests use.

    It prints to a pipe, or to the file or device `screen`. With `leads` it leads a session of its own.
    """

    def __init__(
        self,
        words: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str],
        umask: int | None = None,
        host: str | None = None,
        screen: str | None = None,
        leads: bool = False,
    ) -> None:
        start_fork_server(__name__)
        context = multiprocessing.get_context("forkserver")
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        outputs = [there for _, there in pipes]
        self._process = context.Process(
            target=_command, args=(tuple(words), str(cwd), dict(environment), outputs, umask, host, screen, leads)
        )
        self._process.start()
        for there in outputs:
            there.close()
        self.stdout, self.stderr = (_text(here) for here, _ in pipes)

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or None before the end; below 0 for the signal that ended the process."""
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return all that is still to be read of both outputs; raises `subprocess.TimeoutExpired`."""
        with ThreadPoolExecutor(2) as readers:
            texts = [readers.submit(output.read) for output in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            return texts[0].result(), texts[1].result()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("terrace", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        """End the process."""
        self._process.kill()


def run(
    words: Sequence[str], cwd: Path, environment: Mapping[str, str], timeout_s: float, umask: int | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run `terrace` with these words to its end; raises `subprocess.TimeoutExpired`."""
    command = Command(words, cwd, environment, umask)
    said, errors = command.communicate(timeout_s)
    return subprocess.CompletedProcess(list(words), command.wait(), said, errors)


def _text(connection: "Connection[Any, Any]") -> IO[str]:
    number = os.dup(connection.fileno())
    connection.close()
    return os.fdopen(number, encoding="utf-8", errors="replace")


def _command(
    words: Sequence[str],
    cwd: str,
    environment: Mapping[str, str],
    outputs: "Sequence[Connection[Any, Any]]",
    umask: int | None,
    host: str | None,
    screen: str | None,
    leads: bool,
) -> None:
    if leads:
        os.setsid()
    for number, output in enumerate(outputs, start=1):
        os.dup2(output.fileno(), number)
        output.close()
    if screen is not None:
        os.dup2(os.open(screen, os.O_WRONLY), 1)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    os.chdir(cwd)
    if umask is not None:
        os.umask(umask)
    os.environ.clear()
    os.environ.update(environment)
    is_script = words[0].endswith(".py")
    sys.argv = [*words] if is_script else ["terrace", *words]
    for signal_number in SIGNALS:  # the fork server ignores them
        signal.signal(signal_number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fork_servers()
    if host is not None:
        socket.gethostname = lambda: host
        vars(start)["boot_id"] = lambda: host
    _measure_for_a_moment()
    sample._SAMPLE_TOKENS = _TOKENS
    multiprocessing.process.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]  # the parent's
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # one may have come meanwhile
        code = _run_script(words[0]) if is_script else main()
    except KeyboardInterrupt:  # as in terrace/__main__.py, but that nothing is left to import
        print("terrace: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


def _measure_for_a_moment() -> None:
    calibrate._BUDGET_S, calibrate._REPEATS = _MOMENT_S, _FEW


def _run_script(path: str) -> int:
    runpy.run_path(path, run_name="__main__")
    return 0


_starter: Any = util
_spawn = util.spawnv_passfds


def fork_servers() -> None:
    """The next fork server is forked from this process, with all that it has imported.

    Only the next: later this process has run tests, and ranks that inherited its objects, without the threads of some,
    would end in their destructors.
    """
    _starter.spawnv_passfds = _fork_fork_server


def _fork_fork_server(path: bytes, arguments: Sequence[str], kept: Sequence[int]) -> int:
    """Start processes of `multiprocessing`, its fork server by a fork: it has then imported all it needs."""
    program = arguments[-1]
    if "multiprocessing.forkserver" not in program:
        return int(_spawn(path, arguments, kept))
    _starter.spawnv_passfds = _spawn
    pid = os.fork()
    if pid:
        return pid
    try:  # as after an exec: no handlers of the parent, and of its files only those meant for it
        for number in (signal.SIGINT, signal.SIGHUP, *SIGNALS):
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        # Others keep their numbers: objects that own them may be collected at any time, and would close what a rank has
        # opened under the same number meanwhile, such as a socket of gloo.
        null = os.open(os.devnull, os.O_RDWR)
        for file in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, null, *kept}:
            os.dup2(null, file, inheritable=False)
        _measure_for_a_moment()
        vars(forkserver)["_forkserver"].__init__()  # that of the parent is locked, since it is just starting this one
        exec(program, {})
    finally:
        os._exit(1)
