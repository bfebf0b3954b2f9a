"""What the virtual device notices in one process, each with the lines of both sides, and what it lets pass."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.virtual_cuda.findings import Kind
from tests.virtual_cuda.rehearsal import rehearsed

Program = Callable[[], None]
cuda: Any = torch.cuda  # without types


def on(stream: Any, work: Callable[[], object]) -> None:
    with cuda.stream(stream):
        work()


def device(*sizes: int) -> Tensor:
    return torch.ones(*sizes, device="cuda")


def devices_meet() -> None:
    device(4) + torch.ones(4)


def a_factory_without_a_device() -> None:
    x = device(4)
    torch.where(x > 0, x, torch.zeros(4))


def a_storage_of_another_device() -> None:
    torch.empty(0).set_(device(4).untyped_storage())


def indices_on_the_device_alone() -> None:
    torch.ones(4)[torch.zeros(2, dtype=torch.int64, device="cuda")]


def a_number_of_the_host_is_written() -> None:
    torch.zeros(()).add_(device(1).sum())


def a_stream_that_waits_for_nothing() -> None:
    x, side = device(4), cuda.Stream()
    on(side, lambda: x.add_(1))
    side.synchronize()
    x.add_(1)
    on(side, lambda: x.add_(1))


def a_wait_in_the_wrong_direction() -> None:
    x, side = device(4), cuda.Stream()
    side.wait_stream(cuda.current_stream())
    on(side, lambda: x.add_(1))
    x.sum()


def an_event_that_is_recorded_too_early() -> None:
    x, side, event = device(4), cuda.Stream(), cuda.Event()
    side.wait_stream(cuda.current_stream())
    event.record(side)
    on(side, lambda: x.add_(1))
    cuda.current_stream().wait_event(event)
    x.sum()


def one_byte_of_a_view() -> None:
    x, side = device(8), cuda.Stream()
    side.wait_stream(cuda.current_stream())
    on(side, lambda: x[:5].add_(1))
    x[4:].add_(1)


def one_column() -> None:
    x, side = device(4, 4), cuda.Stream()
    side.wait_stream(cuda.current_stream())
    on(side, lambda: x[:, 2:].add_(1))
    x[:, 1:3].add_(1)


def freed_under_another_stream() -> None:
    x, side = device(4), cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        x.mul(2)
    del x
    device(4)


def freed_by_its_storage() -> None:
    x, side = device(4), cuda.Stream()
    side.wait_stream(cuda.current_stream())
    on(side, lambda: x.mul(2))
    x.untyped_storage().resize_(0)
    device(4)


def a_view_is_freed_last() -> None:
    x, side = device(4), cuda.Stream()
    view = x[1:]
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        x.mul(2)
    del x, view
    device(4)


def page_locked_memory_is_read_early() -> None:
    there = torch.empty(4, pin_memory=True)
    there.copy_(device(4), non_blocking=True)
    there.numpy()


def page_locked_memory_is_reused_early() -> None:
    there = torch.ones(4).pin_memory()
    there.to("cuda", non_blocking=True)
    there.fill_(2)


def the_device_as_numpy() -> None:
    with pytest.raises(TypeError, match="can't convert cuda"):
        device(4).numpy()


FAULTS: dict[Program, Kind] = {
    devices_meet: Kind.DEVICES,
    a_factory_without_a_device: Kind.DEVICES,
    a_storage_of_another_device: Kind.DEVICES,
    indices_on_the_device_alone: Kind.DEVICES,
    a_number_of_the_host_is_written: Kind.DEVICES,
    a_stream_that_waits_for_nothing: Kind.RACE,
    a_wait_in_the_wrong_direction: Kind.RACE,
    an_event_that_is_recorded_too_early: Kind.RACE,
    one_byte_of_a_view: Kind.RACE,
    one_column: Kind.RACE,
    freed_under_another_stream: Kind.FREED,
    freed_by_its_storage: Kind.FREED,
    a_view_is_freed_last: Kind.FREED,
    page_locked_memory_is_read_early: Kind.HOST_READS,
    page_locked_memory_is_reused_early: Kind.HOST_WRITES,
    the_device_as_numpy: Kind.NOT_ON_HOST,
}

NUM_LINES = {Kind.DEVICES: 1, Kind.NOT_ON_HOST: 1, Kind.FREED: 3}  # that a message names in the program, else 2


@pytest.mark.parametrize("program", FAULTS, ids=lambda program: program.__name__)
def test_a_fault_is_told_with_its_lines(program: Program) -> None:
    with rehearsed() as rehearsal:
        program()
    assert {fault.kind for fault in rehearsal.faults} == {FAULTS[program]}, rehearsal.findings.told()
    lines, first = inspect.getsourcelines(program)
    last = str(rehearsal.faults[-1])
    named = {first + i for i in range(len(lines)) if f"test_device.py:{first + i} {program.__name__}" in last}
    assert len(named) == NUM_LINES.get(FAULTS[program], 2), last


def numbers_and_indices() -> None:
    x = device(4)
    x * torch.tensor(2.0)
    x[torch.tensor([0, 2])]
    x[1] = 3.0
    x.copy_(torch.ones(4))


def both_directions() -> None:
    x, side = device(4), cuda.Stream()
    side.wait_stream(cuda.current_stream())
    on(side, lambda: x.add_(1))
    cuda.current_stream().wait_stream(side)
    x.add_(1)


def a_host_that_waits() -> None:
    x, side, event = device(4), cuda.Stream(), cuda.Event()
    cuda.synchronize()
    on(side, lambda: x.add_(1))
    event.record(side)
    event.synchronize()
    x.add_(1)


def columns_apart() -> None:
    x, side = device(4, 4), cuda.Stream()
    side.wait_stream(cuda.current_stream())
    on(side, lambda: x[:, 2:].add_(1))
    x[:, :2].add_(1)


def two_that_read() -> None:
    x, side = device(4), cuda.Stream()
    side.wait_stream(cuda.current_stream())
    on(side, lambda: x.mul(2))
    x.mul(2)
    cuda.current_stream().wait_stream(side)


def memory_of_a_recorded_stream() -> None:
    x, side = device(4), cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        x.mul(2)
    x.record_stream(side)
    del x
    device(4)


def memory_whose_owner_waits_first() -> None:
    x, side = device(4), cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        x.mul(2)
    del x
    cuda.current_stream().wait_stream(side)
    device(4)


def page_locked_memory_after_its_copy() -> None:
    there = torch.empty(4, pin_memory=True)
    there.copy_(device(4), non_blocking=True)
    cuda.current_stream().synchronize()
    there.numpy()
    there.fill_(1)


def gradients() -> None:
    weight = device(4).requires_grad_()
    loss = (weight * weight).sum() + weight[torch.tensor([1])].sum()
    torch.autograd.backward(loss)
    assert weight.grad is not None
    assert weight.grad.is_cuda


@pytest.mark.parametrize(
    "program",
    [
        numbers_and_indices,
        both_directions,
        a_host_that_waits,
        columns_apart,
        two_that_read,
        memory_of_a_recorded_stream,
        memory_whose_owner_waits_first,
        page_locked_memory_after_its_copy,
        gradients,
    ],
)
def test_what_is_in_order_passes(program: Program) -> None:
    with rehearsed() as rehearsal:
        program()
    assert not rehearsal.faults, rehearsal.findings.told()


WAITS: dict[str, Callable[[Tensor], object]] = {
    "a number is read": lambda x: x.sum().item(),
    "numbers are read": lambda x: x.tolist(),
    "a comparison is read": lambda x: torch.equal(x, x),
    "the size of the result is counted": lambda x: x.nonzero(),
    "a mask is an index, whose places are counted": lambda x: x[x > 0],
    "indices are copied from the host": lambda x: x[[0, 1]],
    "numbers are copied from the host": lambda x: torch.tensor([1.0], device=x.device),
    "a copy to the host": lambda x: x.cpu(),
    "a copy from the host": lambda x: torch.ones(4).to(x.device, non_blocking=True),
    "the device is synchronised": lambda x: cuda.synchronize(),
}


@pytest.mark.parametrize("reason", WAITS)
def test_a_wait_of_the_host_is_counted_with_its_line(reason: str) -> None:
    with rehearsed() as rehearsal:
        WAITS[reason](device(4))
    ((found, line), number), *others = rehearsal.findings.waits.items()
    assert (found, number, others) == (reason, 1, [])
    assert "tests/virtual_cuda/test_device.py:" in line


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.add(1).mul_(2),
        lambda x: torch.ones(4).pin_memory().to(x.device, non_blocking=True),
        lambda x: torch.nonzero_static(x, size=2),
        lambda x: x.masked_fill_(x > 0, 1.0),
        lambda x: x.new_zeros(3),
    ],
)
def test_what_goes_on_without_the_host(work: Callable[[Tensor], Tensor]) -> None:
    with rehearsed() as rehearsal:
        assert work(device(4)).is_cuda
    assert not rehearsal.findings.waits
    assert not rehearsal.faults


def test_devices_of_what_is_made() -> None:
    with rehearsed():
        x, y = device(3), torch.ones(3)
        on_device = [
            x + 1,
            x[1:],
            torch.zeros_like(y, device="cuda"),
            y.to(x.device),
            x.new_empty(2),
            y.cuda(),
            y.to(x),
        ]
        on_host = [x.cpu(), torch.zeros_like(x, device="cpu"), x.to("cpu", torch.float64), y + 1, x.to(y)]
        assert all(each.is_cuda and each.device == torch.device("cuda", 0) for each in on_device)
        assert not any(each.is_cuda for each in on_host)
        assert torch.zeros(3, device="meta").is_meta
    assert x.device == torch.device("cpu"), "all is as before"


def test_an_event_is_over_once_the_host_has_waited() -> None:
    for completes, first in (("late", False), ("early", True)):
        with rehearsed(completes=completes):
            device(4)
            event = cuda.Event()
            event.record()
            assert event.query() is first
            event.synchronize()
            assert event.query()


def test_a_poll_ends() -> None:
    with rehearsed():
        device(4)
        event = cuda.Event()
        event.record()
        while not event.query():
            pass
