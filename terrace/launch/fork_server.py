"""The fork server of local ranks. It imports their modules once, and the ranks are forked from it.

Its imports take seconds, so `terrace train` starts it before its own. This module therefore needs no torch.
"""

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from terrace.base.own_path import safe_environment
from terrace.launch import flight
from terrace.launch.launchers import is_launched
from terrace.launch.signals import SIGNALS, handled
from terrace.launch.socket_folder import use_socket_folder

# Imported once by the fork server instead of by every rank.
_PRELOAD = [
    "torch",
    "torch.distributed",
    "terrace.launch.workers",
    "terrace.runtime.engine",
    "torch.fx.experimental.symbolic_shapes",  # by the first backward, with 480 modules of sympy
]


@contextmanager
def fork_server_ahead(module: str) -> Iterator[None]:
    """Starts the fork server in the background while the body prepares a run, and ends it afterwards.

    Does nothing under a launcher, or if the server is already running.
    """
    if _server()._forkserver_pid is not None or is_launched(os.environ):
        yield
        return
    start_fork_server(module)
    try:
        yield
    finally:
        # A server that is still importing would end only later, and hold the output of a failed command.
        server = _server()
        if server._forkserver_pid is not None:
            with suppress(ProcessLookupError):
                os.kill(server._forkserver_pid, signal.SIGKILL)
            server._stop()


def _server() -> Any:
    return vars(multiprocessing.forkserver)["_forkserver"]


def start_fork_server(module: str = "__main__") -> None:
    """Starts the fork server of local ranks, which also imports `module`; does nothing if it is already running."""
    use_socket_folder()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD if module == "__main__" else [*_PRELOAD, module])
    # Forking is safe only from a single-threaded server; each child sets its own number of threads. Children are
    # started with `python -c`, which searches the working folder for modules first.
    defaults = {"OMP_NUM_THREADS": "1", **flight.settings(), **safe_environment()}
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    # Gloo would otherwise look up the machine's name on the network, and NCCL would listen on an outer interface.
    for name in loopback:
        defaults |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    # It would undo the blocking of signals below.
    with _defaults_in_environment(safe_environment()):
        multiprocessing.resource_tracker.ensure_running()
    # A job may send stop signals to all its processes, but the ranks end with the fork server, so it ignores them. A
    # signal that reaches this process now must not be lost, so it is held back.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        with _defaults_in_environment(defaults), handled(SIGNALS, signal.SIG_IGN):
            multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _defaults_in_environment(defaults: dict[str, str]) -> Iterator[None]:
    # The user's own settings win.
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
