"""Process pool, the child's side: take a job, join its world, run it, report.

One socket pair links a process to its parent. Only the parent holds the parent's end, so end of file means that the
parent is gone, however it died, and the process exits at once.
"""

import ctypes
import faulthandler
import gc
import multiprocessing.forkserver
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from terrace.base.collection import keep_all
from terrace.base.errors import HangError, TerraceError
from terrace.base.own_path import free_children
from terrace.launch.device import take_device
from terrace.launch.rendezvous import open_store
from terrace.launch.seal import Seal
from terrace.launch.signals import SIGNALS
from terrace.launch.socket_folder import clear_all_abandoned
from terrace.launch.world import World, is_communication_error

LOOPBACK = "127.0.0.1"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class PoolJob:
    """One rank's part of a call. `payload` is the pickled function with its arguments."""

    number: int
    rank: int
    world_size: int
    num_threads: int
    timeout_s: float
    backend: str
    seal: Seal
    payload: bytes
    first_device: int = 0  # of the CUDA devices that the ranks use


@dataclass(frozen=True)
class Report:
    """Outcome of one rank's part. `payload` is the pickled result, or the class of a `TerraceError`."""

    number: int
    rank: int
    kind: Literal["done", "hang", "terrace", "communication", "other"]
    payload: bytes = b""
    message: str = ""
    trace: str = ""


def serve(link: "Connection[Any, Any]", port: int) -> None:
    """Runs jobs from `link` until it says to quit. The store is on `port` of this machine.

    After a failed job the process reports and exits. Its connections close, which its peers notice.
    """
    free_children()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the fork server ignores it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # and was started while they were held back
    # The parent asks for stacks with SIGUSR1 when a call exceeds its time limit.
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    # Second safeguard after `_listen`: the kernel also ends a process that is stopped, or whose main thread never
    # releases the interpreter lock.
    _die_with_the_forkserver()
    inbox: queue.SimpleQueue[PoolJob | str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(link, inbox), name="link", daemon=True).start()
    lock = threading.Lock()

    def send(report: Report) -> None:
        # The watchdog's thread reports, too.
        with lock:
            link.send(report)

    keep_all()  # the collection after every job skips what was imported
    while isinstance(job := inbox.get(), PoolJob):
        try:
            send(_run(job, port, send))
        except BaseException as error:
            with suppress(OSError):  # the parent was killed, which ended what the job waited for
                send(failure(job.number, job.rank, error))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        # The parent reports when every rank is done; only then may connections close.
        inbox.get()
        dist.destroy_process_group()
        # An engine is a reference cycle that keeps its process groups alive, whose gloo threads wake up a hundred times
        # a second. Without a collection every job would leave some behind.
        gc.collect()


def _run(job: PoolJob, port: int, send: Any) -> Report:
    torch.set_num_threads(job.num_threads)
    timeout = timedelta(seconds=job.timeout_s)
    store = PrefixStore(f"job/{job.number}", open_store(LOOPBACK, port, job.timeout_s))
    if job.backend == "nccl":
        take_device(job.first_device + job.rank)
    dist.init_process_group(
        job.backend,
        store=PrefixStore("group", store),
        rank=job.rank,
        world_size=job.world_size,
        timeout=timeout,  # no `device_id`: see terrace/comm/process_group.py
    )

    def on_hang(message: str) -> None:
        send(Report(job.number, job.rank, "hang", message=message))

    own = PrefixStore("world", store)
    world = World(job.rank, job.world_size, job.rank, job.world_size, own, on_hang, seal=job.seal)
    function, arguments = pickle.loads(job.payload)
    return Report(job.number, job.rank, "done", pickle.dumps(function(world, *arguments)))


def failure(number: int, rank: int, error: BaseException) -> Report:
    message, trace = str(error), "".join(traceback.format_exception(error))
    if isinstance(error, HangError):
        return Report(number, rank, "hang", message=message)
    if isinstance(error, TerraceError):
        return Report(number, rank, "terrace", pickle.dumps(type(error)), message, trace)
    kind: Any = "communication" if is_communication_error(error, waiting=False) else "other"
    return Report(number, rank, kind, message=f"{type(error).__name__}: {message}", trace=trace)


def _listen(link: "Connection[Any, Any]", inbox: "queue.SimpleQueue[PoolJob | str]") -> None:
    while True:
        try:
            inbox.put(link.recv())
        except (EOFError, OSError):
            # Otherwise the folder of a killed parent would stay until the next start.
            clear_all_abandoned()
            os._exit(1)


def _die_with_the_forkserver() -> None:
    if not sys.platform.startswith("linux"):
        return
    lifeline = getattr(getattr(multiprocessing.forkserver, "_forkserver", None), "_forkserver_alive_fd", None)
    if lifeline is not None:
        # The fork server lives while any process holds its lifeline, so this process closes its end.
        os.close(lifeline)
        multiprocessing.forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
