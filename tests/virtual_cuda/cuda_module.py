"""Stand-ins for torch.cuda, torch.accelerator, torch.Stream and torch.Event."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch

from tests.virtual_cuda.clocks import Moment
from tests.virtual_cuda.findings import here
from tests.virtual_cuda.functions import Patch
from tests.virtual_cuda.machine import H100, Hardware, Machine

MEMORY_BYTES, NUM_DEVICES = 80 << 30, 8


def patches(machine: Machine) -> Iterator[Patch]:
    """All that is replaced in these modules."""
    stream, event = _streams(machine)
    default = stream(timeline=machine.default)

    def current(device: Any = None) -> Any:
        stack = machine.thread.streams
        return stack[-1] if stack else default

    def synchronize(device: Any = None) -> None:
        machine.findings.wait("the device is synchronised", here())
        machine.host.joins_all()

    def set_device(device: Any) -> None:
        machine.index = device if isinstance(device, int) else torch.device(device).index or 0

    def set_stream(chosen: Any) -> None:
        machine.thread.streams[:] = [chosen]

    shared: dict[str, Any] = {
        "current_stream": current,
        "synchronize": synchronize,
        "is_available": lambda: True,
        "device_count": lambda: NUM_DEVICES,
        "set_stream": set_stream,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: machine.allocator.reset_peaks(),
        "get_device_capability": lambda device=None: machine.hardware.capability,
    }
    memory = {
        f"{prefix}memory_{name}": _memory(machine, prefix, name)
        for prefix in ("", "max_")
        for name in ("allocated", "reserved")
    }
    for name, value in (shared | memory).items():
        yield torch.cuda, name, value
        yield torch.accelerator, name, value
    only_cuda: dict[str, Any] = {
        "Stream": stream,
        "Event": event,
        "stream": _made_current(machine),
        "default_stream": lambda device=None: default,
        "current_device": lambda: machine.index,
        "set_device": set_device,
        "get_device_properties": lambda device=None: properties(machine.hardware),
        "get_device_name": lambda device=None: properties(machine.hardware).name,
        "mem_get_info": lambda device=None: (MEMORY_BYTES - machine.allocator.reserved, MEMORY_BYTES),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "memory_stats": lambda device=None: {
            "allocated_bytes.all.peak": machine.allocator.peaks["allocated"],
            "reserved_bytes.all.peak": machine.allocator.peaks["reserved"],
        },
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "clock_rate": lambda device=None: 1000,
        "is_current_stream_capturing": lambda: False,
        "_sleep": lambda cycles: machine.current().tick(),
    }
    for name, value in only_cuda.items():
        yield torch.cuda, name, value
    yield torch.cuda.memory, "_record_memory_history", machine.allocator.record
    yield torch.cuda.memory, "_dump_snapshot", machine.allocator.write
    for name, value in (
        ("current_accelerator", lambda check_available=False: torch.device("cuda")),
        ("current_device_index", lambda: machine.index),
        ("set_device_index", set_device),
    ):
        yield torch.accelerator, name, value
    yield torch.cuda.nccl, "version", lambda: (2, 28, 9)
    yield torch, "Stream", stream
    yield torch, "Event", event
    yield torch.version, "hip", "7.0" if machine.hardware.architecture else None


def properties(hardware: Hardware = H100) -> Any:
    """Of a device."""
    return SimpleNamespace(
        name="virtual AMD device" if hardware.architecture else "virtual CUDA device",
        total_memory=MEMORY_BYTES,
        major=hardware.capability[0],
        minor=hardware.capability[1],
        multi_processor_count=132,
        uuid="00000000-0000-0000-0000-000000000000",
        gcnArchName=hardware.architecture,
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
    )


def _memory(machine: Machine, prefix: str, name: str) -> Any:
    def read(device: Any = None) -> int:
        machine.settle()
        return machine.allocator.peaks[name] if prefix else getattr(machine.allocator, name)

    return read


def _made_current(machine: Machine) -> Any:
    @contextmanager
    def made_current(chosen: Any) -> Iterator[None]:
        if chosen is None:
            yield
            return
        with chosen:
            yield

    return made_current


def _streams(machine: Machine) -> tuple[type, type]:
    class Stream:
        """A stream of the virtual device."""

        def __init__(self, device: Any = None, priority: int = 0, *, timeline: Any = None, **_: Any) -> None:
            self.timeline = timeline or machine.host.timeline()
            self.priority, self.device = priority, torch.device("cuda", machine.index)

        @property
        def cuda_stream(self) -> int:
            return self.timeline.number

        stream_id = native_handle = cuda_stream

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.timeline is self.timeline

        def __hash__(self) -> int:
            return hash(self.timeline.number)

        def __enter__(self) -> "Stream":
            machine.thread.streams.append(self)
            return self

        def __exit__(self, *_: object) -> None:
            machine.thread.streams.pop()

        def wait_stream(self, other: "Stream") -> None:
            self.timeline.waits_for(other.timeline.now())

        def wait_event(self, event: "Event") -> None:
            self.timeline.waits_for(event.moment.clock)

        def record_event(self, event: "Event | None" = None) -> "Event":
            event = event or Event()
            event.record(self)
            return event

        def synchronize(self) -> None:
            machine.findings.wait("a stream is synchronised", here())
            machine.host.joins(self.timeline.now())

        def is_capturing(self) -> bool:
            return False

        def query(self) -> bool:
            moment = Moment(machine.host)
            moment.record(self.timeline)
            return moment.is_over()

    class Event:
        """An event of the virtual device."""

        def __init__(self, device: Any = None, enable_timing: bool = False, **_: Any) -> None:
            self.moment, self.device = Moment(machine.host), torch.device("cuda", machine.index)
            self.at_s = 0.0

        def record(self, stream: Stream | None = None) -> None:
            self.at_s = perf_counter()
            self.moment.record(machine.current() if stream is None else stream.timeline)

        def wait(self, stream: Stream | None = None) -> None:
            (machine.current() if stream is None else stream.timeline).waits_for(self.moment.clock)

        def synchronize(self) -> None:
            machine.findings.wait("an event is waited for", here())
            machine.host.joins(self.moment.clock)

        def query(self) -> bool:
            return self.moment.is_over()

        def elapsed_time(self, end: "Event") -> float:
            # The clocks have no seconds. Those of the host, so that what measures for a while comes to an end.
            return max(1e-3, 1e3 * (end.at_s - self.at_s))

    return Stream, Event
