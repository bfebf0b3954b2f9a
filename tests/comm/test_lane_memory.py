"""Memory that work on a lane reads stays until it has been read, whatever the caller drops."""

import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from terrace.comm.lane import Lane, StreamLane, ThreadLane, behind
from terrace.comm.rounding import ErrorLog
from terrace.plan.in_block_messages import Leg, TensorMessage
from terrace.plan.layout import INSIDE
from terrace.plan.wire import MessageClass
from terrace.runtime.clock import HostClock
from terrace.runtime.in_block import InBlockComm
from terrace.runtime.linear import WeightGradients

DEVICE = torch.device("cuda", 0)


class Event:
    """Done when the test says so."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cuda"
        self.is_done = False

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True


class Stream:
    """The current stream in the body of a `with`."""

    device = DEVICE
    current: list["Stream"]

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> None:
        self.current.append(self)

    def __exit__(self, *_: object) -> None:
        self.current.pop()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """Streams without a device; the last one is the current one."""
    current = Stream.current = [Stream()]
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: current[-1])
    return current


def waits_for(go: threading.Event) -> None:
    assert go.wait(10)


def work_on(values: Tensor) -> Any:
    return lambda: values.add_(1)


def submitted(lane: Lane) -> tuple[Any, "weakref.ref[Tensor]"]:
    """A ticket of work on a tensor that nobody else refers to."""
    values = torch.zeros(3)
    return lane.submit(work_on(values)), weakref.ref(values)


def test_a_stream_reads_memory_until_computing_waits_for_it(streams: list[Stream]) -> None:
    ticket, values = submitted(StreamLane(DEVICE))
    assert values() is not None
    ticket.wait()
    assert values() is None


def test_a_wait_of_another_lane_frees_nothing(streams: list[Stream]) -> None:
    """Only the other lane then follows the work: computing would overwrite what is read."""
    first, second = StreamLane(DEVICE), StreamLane(DEVICE)
    ticket, values = submitted(first)
    after = second.submit(behind(ticket, lambda: None))
    del ticket
    assert values() is not None
    after.wait()
    del after
    first._under_way[0].event.synchronize()
    submitted(first)
    assert values() is None


@pytest.mark.parametrize("way", ["host", "dropped"])
def test_memory_of_a_stream_is_free_once_its_work_is_done(streams: list[Stream], way: str) -> None:
    lane = StreamLane(DEVICE)
    ticket, values = submitted(lane)
    if way == "host":
        ticket.wait_on_host()
    else:
        # A ticket that nobody keeps: the lane does, until the work is done.
        event = ticket.event
        del ticket
        submitted(lane)
        assert values() is not None
        event.is_done = True
        submitted(lane)
    assert values() is None


def test_a_closed_stream_keeps_nothing(streams: list[Stream]) -> None:
    lane = StreamLane(DEVICE)
    ticket, values = submitted(lane)
    del ticket
    lane.close()
    assert values() is None


def test_a_thread_reads_memory_until_it_has_run() -> None:
    lane, go = ThreadLane(), threading.Event()
    lane.submit(partial(waits_for, go))
    ticket, values = submitted(lane)
    assert values() is not None
    go.set()
    ticket.wait()
    lane.close()
    assert values() is None


@pytest.mark.parametrize("kind", [StreamLane, ThreadLane])
def test_messages_inside_blocks_keep_what_they_read(streams: list[Stream], kind: type[Lane]) -> None:
    """Their work goes through a closure of its own, and may follow that of another lane."""
    lane = StreamLane(DEVICE) if kind is StreamLane else ThreadLane()
    comm = InBlockComm({INSIDE: lane}, HostClock(), WeightGradients())
    go, values = threading.Event(), torch.zeros(3)
    if kind is ThreadLane:
        lane.submit(partial(waits_for, go))
    flight = comm.submit(work_on(values), TensorMessage(Leg.GATHER, ("tensor",), 3))
    held = weakref.ref(values)
    del values
    assert held() is not None
    go.set()
    comm.wait(flight, (0,))
    lane.close()
    assert held() is None


class OnCuda(Tensor):
    device = DEVICE


def test_samples_of_a_message_reach_all_of_it() -> None:
    log, key = ErrorLog((MessageClass.SYNC,), torch.device("cpu")), (MessageClass.SYNC, "block.0", 1)
    parts = [log.sample(key, "reduce", 10_000, 64) for _ in range(3)]
    assert [(part.start, part.stop) for part in parts] == [(0, 4096), (4096, 8192), (8192, 10_000)]


def test_errors_of_a_message_under_way_are_taken_when_they_are_there(streams: list[Stream]) -> None:
    """On CUDA their sums are made on another stream, which a step does not wait for."""
    log = ErrorLog((MessageClass.OUTER,), torch.device("cpu"))
    key = MessageClass.OUTER, "block.0", 1
    sums = torch.tensor([1.0, 2.0], dtype=torch.float64).as_subclass(OnCuda)
    log.add(key, sums)
    assert log.take().tolist() == [0.0, 0.0]
    event: Any = log._made[key]
    event.is_done = True
    assert log.take().tolist() == [1.0, 2.0]
    assert log.take().tolist() == [0.0, 0.0]
