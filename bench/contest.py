"""Contestants in processes of their own that take turns: processor seconds of the same work, side by side.

A contestant is a function at the top of a module and its arguments; called in its process, it prepares the work and
returns a function without arguments that does the work once. Its result must be equal for all, or is shown.
"""

import multiprocessing
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

Work = Callable[[], Any]
Contestant = tuple[Callable[..., Work], tuple[Any, ...]]


def take_turns(contestants: Mapping[str, Contestant], rounds: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Processor seconds of every round, and the last result, of each contestant; one thread, one round to warm up."""
    context = multiprocessing.get_context("spawn")
    ends: dict[str, Connection] = {}
    for name, contestant in contestants.items():
        ends[name], theirs = context.Pipe()
        context.Process(target=_work, args=(theirs, contestant), daemon=True).start()
        theirs.close()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    results: dict[str, Any] = {}
    for number in range(rounds + 1):
        for name in list(ends) if number % 2 else reversed(ends):
            ends[name].send(None)
            took_s, results[name] = ends[name].recv()
            if number:
                seconds[name].append(took_s)
    for end in ends.values():
        end.close()
    return seconds, results


def _work(end: Connection, contestant: Contestant) -> None:
    torch.set_num_threads(1)
    prepare, arguments = contestant
    work = prepare(*arguments)
    try:
        while True:
            end.recv()
            begin_s = time.process_time()
            result = work()
            end.send((time.process_time() - begin_s, result))
    except EOFError:
        pass  # the other end is closed: no turn is left
