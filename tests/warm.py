"""`terrace` in a process of its own whose interpreter is warm: forked from one that has imported torch.

Such a process differs from one that a shell starts in nothing but its first seconds: it has its own directory,
environment, output, signals and exit code, and the ranks that it starts are children of its own fork server, which is
forked, too. Starting cold is left to the tests that start `python -m terrace`, the script `terrace` or torchrun.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

from terrace.cli.main import main
from terrace.runtime.launch import _start_forkserver


def run(
    words: Sequence[str], cwd: Path, environment: Mapping[str, str], timeout_s: float
) -> "subprocess.CompletedProcess[str]":
    """Run `terrace` with these words to its end; raises `subprocess.TimeoutExpired`."""
    _start_forkserver(__name__)
    with tempfile.TemporaryDirectory() as folder:
        outputs = Path(folder, "stdout"), Path(folder, "stderr")
        arguments = (tuple(words), str(cwd), dict(environment), tuple(map(str, outputs)))
        process = multiprocessing.get_context("forkserver").Process(target=_command, args=arguments)
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(words), timeout_s)
        return subprocess.CompletedProcess(list(words), process.exitcode, *(path.read_text() for path in outputs))


def _command(words: Sequence[str], cwd: str, environment: Mapping[str, str], outputs: Sequence[str]) -> None:
    for number, path in enumerate(outputs, start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["terrace", *words]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _starter.spawnv_passfds = _fork_fork_server
    sys.exit(main())


_starter: Any = util
_spawn = util.spawnv_passfds


def _fork_fork_server(path: bytes, arguments: Sequence[str], kept: Sequence[int]) -> int:
    """Start what `multiprocessing` starts, and its fork server by a fork: then it has imported all it needs."""
    program = arguments[-1]
    if "multiprocessing.forkserver" not in program:
        return int(_spawn(path, arguments, kept))
    pid = os.fork()
    if pid:
        return pid
    try:  # as after an exec: no handlers of the parent, and of its files only those meant for it
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        below = 3
        for file in [*sorted(kept), os.sysconf("SC_OPEN_MAX")]:
            os.closerange(below, file)
            below = file + 1
        exec(program, {})
    finally:
        os._exit(1)
