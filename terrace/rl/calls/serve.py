"""A rank of a local pool: a process that runs the calls it receives, in order, until its controller is gone.

Messages are pickled. They are exchanged only between processes of one run, since a connection requires the run's secret
(`multiprocessing.connection`).
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
    """A worker's error that is not a `TerraceError`."""


def serve(world: World, address: str, secret: bytes) -> None:
    """Run the tasks that the controller at `address` sends; the main function of every rank of a pool.

    Raises a worker's error with role and method in its message.
    """
    store, everyone = SharedMemory(), tuple(range(world.world_size))
    host = Host(world if world.world_size > 1 else None, store)
    # A SIGTERM to all processes of a run is meant for the controller, so this process only records the first, as ranks
    # of `terrace train` do. The controller checks heartbeats when a call is late.
    with StopSignal(SIGNALS[:1]), watch(world, timeout_s=NEVER_S) as dog, Client(address, "AF_UNIX", secret) as link:
        dog.idle("between calls")
        link.send_bytes(str(world.rank).encode())
        inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # Receive in a thread: a controller blocked in send must not wait for a worker that is blocked in send to it.
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
    """Add role and method to a worker's error."""
    # Left unchanged: a lost peer is told from the peer's own failure by its message.
    if is_communication_error(error, waiting=False):
        return error
    if isinstance(error, TerraceError):
        return type(error)(f"{task.name}: {error}")
    return CallError(f"{task.name}: {type(error).__name__}: {error}")
