"""A rank of a local pool: a process that runs the calls it is sent, one after the other, until its controller is gone.

Messages are pickled, and go between processes of one run alone: whoever opens the link proves that it has the run's
secret (`multiprocessing.connection`).
"""

import pickle
import queue
import threading
from multiprocessing.connection import Client, Connection
from typing import Any

from terrace.base.errors import TerraceError
from terrace.launch.signals import SIGNALS
from terrace.launch.silence import NEVER_S
from terrace.launch.stop import StopSignal
from terrace.launch.watchdog import watch
from terrace.launch.world import World, is_communication_error
from terrace.rl.calls.host import Host, Task
from terrace.rl.values.memory import SharedMemory

PROTOCOL = 5  # of pickle


class CallError(Exception):
    """An error of a worker that is none of Terrace's."""


def serve(world: World, address: str, secret: bytes) -> None:
    """Run tasks that arrive from the controller at `address`; every rank of a pool runs this.

    Raises the worker's error, with role and method in its message.
    """
    store, everyone = SharedMemory(), tuple(range(world.world_size))
    host = Host(world if world.world_size > 1 else None, store)
    # A signal that was sent to all processes of a run is for the controller; as a rank of `terrace train`, this one
    # takes the first. The controller looks at heartbeats when a call is late.
    with (
        StopSignal(SIGNALS[:1]),
        watch(world, timeout_s=NEVER_S) as dog,
        Client(address, "AF_UNIX", secret) as link,
    ):
        dog.idle("between calls")
        link.send_bytes(str(world.rank).encode())
        inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # A controller that sends must not wait for a worker that sends to it.
        threading.Thread(target=_listen, args=(link, inbox), name="calls", daemon=True).start()
        while (message := inbox.get()) is not None:
            dropped, task = pickle.loads(message)
            for place in dropped:
                store.drop(place)
            dog.at(task.step, task.number, task.name, everyone)
            try:
                answer = host.run(task)
            except Exception as error:
                raise named(error, task) from error
            dog.idle("between calls")
            link.send_bytes(pickle.dumps(answer, PROTOCOL))


def _listen(link: "Connection[Any, Any]", inbox: "queue.SimpleQueue[bytes | None]") -> None:
    try:
        while True:
            inbox.put(link.recv_bytes())
    except (EOFError, OSError):
        inbox.put(None)


def named(error: Exception, task: Task) -> Exception:
    """The error of a call, with role and method, from its worker's."""
    # The error of a rank whose peer failed is told from that peer's own by its words.
    if is_communication_error(error, waiting=False):
        return error
    if isinstance(error, TerraceError):
        return type(error)(f"{task.name}: {error}")
    return CallError(f"{task.name}: {type(error).__name__}: {error}")
