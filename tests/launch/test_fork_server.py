"""The fork server that starts ahead of the command that needs it."""

import subprocess
import sys
import time

from tests.support.tiny_runs import environment

# The server would import torch for seconds when the body fails.
FAILS = """
import os, sys
from terrace.launch.fork_server import _server, fork_server_ahead
try:
    with fork_server_ahead("terrace.cli.worker"):
        pid = _server()._forkserver_pid
        os.kill(pid, 0)
        with fork_server_ahead("json"):
            assert _server()._forkserver_pid == pid, "one server, and the first block has it"
        os.kill(pid, 0)
        raise ValueError
except ValueError:
    assert _server()._forkserver_pid is None
    print(pid)
assert "torch" not in sys.modules
try:
    os.kill(pid, 0)
except ProcessLookupError:
    print("gone")
"""
UNDER_A_LAUNCHER = """
from terrace.launch.fork_server import _server, fork_server_ahead
with fork_server_ahead("json"):
    print(_server()._forkserver_pid)
"""


def test_a_server_that_still_imports_ends_with_the_command_that_failed() -> None:
    begin_s = time.monotonic()
    # The server holds this output, too: `run` returns when nobody does.
    done = subprocess.run(
        [sys.executable, "-c", FAILS], env=environment(), capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[1:] == ["gone"]
    assert time.monotonic() - begin_s < 50


def test_a_rank_of_a_launcher_needs_no_server() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNDER_A_LAUNCHER],
        env=environment() | {"RANK": "0"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "None\n"
