"""Torch's functions and methods that name a device, or leave torch: replaced during a rehearsal.

The C++ side knows CPU tensors only, so a device that is named in Python is translated here, and the operators below a
function learn from `Thread.target` on which device its result is. Functions of C++ that make tensors for themselves
make them on the device in a backward of the device, or below a function of `COMPOSITES`.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.virtual_cuda.clocks import Timeline
from tests.virtual_cuda.findings import Kind, here, told
from tests.virtual_cuda.machine import Machine
from tests.virtual_cuda.storages import (
    DeviceMemory,
    PageLocked,
    is_on_device,
    lock_pages,
    put_on_device,
    record_of,
    resize,
)

CPU = torch.device("cpu")
FACTORIES = (
    *("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn"),
    *("randperm", "scalar_tensor", "tril_indices", "triu_indices", "zeros"),
)
LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")
COMPOSITES = (
    (F, "one_hot"),
    (F, "scaled_dot_product_attention"),
    (torch, "block_diag"),
    (torch, "cartesian_prod"),
    (torch, "nonzero_static"),
)

Patch = tuple[Any, str, Any]  # object, name, what stands there meanwhile
_getter = torch._C.TensorBase.device


def patches(machine: Machine) -> Iterator[Patch]:
    """All replaced functions of tensors."""
    yield from _properties(machine)
    for name in FACTORIES:
        yield torch, name, _factory(machine, getattr(torch, name), lambda args: False)
    for owner, names in ((torch, LIKE), (Tensor, NEW)):
        for name in names:
            yield owner, name, _factory(machine, getattr(owner, name), lambda args: is_on_device(args[0]))
    for name in ("tensor", "as_tensor"):
        yield torch, name, _from_numbers(machine, getattr(torch, name))
    for owner, name in COMPOSITES:
        yield owner, name, _inside(machine, getattr(owner, name), lambda args: is_on_device(args[0]))
    for name in ("backward", "grad"):
        yield torch.autograd, name, _inside(machine, getattr(torch.autograd, name), _roots_on_device)
    to = _to(machine, Tensor.to)
    yield Tensor, "to", to
    yield Tensor, "cpu", lambda self, **more: to(self, CPU, **more)
    yield (
        Tensor,
        "cuda",
        lambda self, device=None, non_blocking=False, **more: to(
            self, torch.device("cuda", machine.index), non_blocking=non_blocking, **more
        ),
    )
    yield Tensor, "pin_memory", _pin_memory(machine)
    yield Tensor, "is_pinned", lambda self, device=None: type(record_of(self)) is PageLocked
    yield Tensor, "record_stream", _record_stream
    for name in ("numpy", "tolist", "__array__"):
        yield Tensor, name, _read(machine, name, getattr(Tensor, name))
    yield torch.UntypedStorage, "resize_", resize


def _properties(machine: Machine) -> Iterator[Patch]:
    def device(self: Tensor) -> torch.device:
        return torch.device("cuda", machine.index) if is_on_device(self) else _getter.__get__(self)

    yield Tensor, "device", property(device)
    yield Tensor, "is_cuda", property(is_on_device)
    yield Tensor, "is_cpu", property(lambda self: device(self).type == "cpu")
    yield Tensor, "get_device", lambda self: machine.index if is_on_device(self) else -1


@contextmanager
def aiming(machine: Machine, on_device: bool | None) -> Iterator[None]:
    """Tensors made by operators are on the device or not."""
    thread = machine.thread
    before, thread.target = thread.target, on_device
    try:
        yield
    finally:
        thread.target = before


def is_cuda(device: Any) -> bool:
    """Whether a value that names a device names one of CUDA."""
    return device is not None and (isinstance(device, int) or torch.device(device).type == "cuda")


def _factory(machine: Machine, inner: Callable[..., Any], default: Callable[[Any], bool]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def made(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None:
            on_device = default(args)
        elif torch.device(device).type == "meta":
            return inner(*args, **kwargs)
        else:
            on_device = is_cuda(device)
            kwargs["device"] = CPU
        pinned = kwargs.pop("pin_memory", False)
        thread = machine.thread
        before, thread.target = thread.target, on_device
        try:
            found = inner(*args, **kwargs)
        finally:
            thread.target = before
        return lock_pages(found, machine) if pinned else found

    return made


def _from_numbers(machine: Machine, inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def made(data: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.pop("device", None)
        pinned = kwargs.pop("pin_memory", False)
        if isinstance(data, Tensor):
            moved = data.to(device) if device is not None else data
            return inner(moved, *args, **kwargs)
        if device is not None and not is_cuda(device):
            return inner(data, *args, device=device, **kwargs)
        if hasattr(data, "__cuda_array_interface__"):
            return _wrapped(machine, data.__cuda_array_interface__)
        found = inner(data, *args, **kwargs)
        if is_cuda(device):
            _arrives(machine, found, "numbers are copied from the host")
        return lock_pages(found, machine) if pinned else found

    return made


def _wrapped(machine: Machine, interface: dict[str, Any]) -> Tensor:
    """Bytes of the device that torch's allocator does not own."""
    (size,), (address, _) = interface["shape"], interface["data"]
    found = torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)
    record, pages = put_on_device(found, machine, is_allocated=False), machine.ranges.get(address)
    if pages is not None:
        pages.check(0, "torch asks for the device of an address")
        record.pages = pages
    return found


def _arrives(machine: Machine, tensor: Tensor, reason: str) -> None:
    # From pageable memory: the host waits for the stream, then for the copy.
    at, place = machine.current(), here()
    put_on_device(tensor, machine).access(at, at.tick(), tensor, True, "tensor", place)
    machine.findings.wait(reason, place)
    machine.host.joins(at.clock)


def _inside(machine: Machine, inner: Callable[..., Any], on_device: Callable[[Any], bool]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def run(*args: Any, **kwargs: Any) -> Any:
        with aiming(machine, on_device((*args, *kwargs.values()))):
            return inner(*args, **kwargs)

    return run


def _roots_on_device(args: Any) -> bool:
    # An edge of a graph has no device, the gradient that is passed with it has.
    return any(isinstance(each, Tensor) and is_on_device(each) for each in tree_leaves(args))


def _to(machine: Machine, inner: Callable[..., Any]) -> Callable[..., Any]:
    def to(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        here_on, target = is_on_device(self), kwargs.pop("device", None)
        rest = list(args)
        for index, value in enumerate(rest):
            if isinstance(value, (torch.device, str)) or (isinstance(value, int) and not isinstance(value, bool)):
                target = rest[index]
                rest[index] = CPU
                break
            if isinstance(value, Tensor):
                rest[index : index + 1] = [value.dtype]
                target = value.device
                break
        else:
            kwargs |= {"device": CPU} if target is not None else {}
        if target is not None and (self.is_meta or (not isinstance(target, int) and _kind(target) == "meta")):
            return inner(self, *args, **{**kwargs, "device": target} if "device" in kwargs else kwargs)
        thread, to_device = machine.thread, here_on if target is None else is_cuda(target)
        before = thread.moving, thread.target
        thread.target = to_device
        if to_device != here_on:
            thread.moving = to_device
            kwargs["copy"] = True
        try:
            return inner(self, *rest, **kwargs)
        finally:
            thread.moving, thread.target = before

    return to


def _kind(device: Any) -> str:
    return torch.device(device).type


def _pin_memory(machine: Machine) -> Callable[[Tensor], Tensor]:
    def pin_memory(self: Tensor, device: Any = None) -> Tensor:
        if is_on_device(self):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        return self if type(record_of(self)) is PageLocked else lock_pages(self.clone(), machine)

    return pin_memory


def _record_stream(self: Tensor, stream: Any) -> None:
    record = record_of(self)
    if isinstance(record, DeviceMemory):
        timeline: Timeline = stream.timeline
        record.recorded.add(timeline.number)


def _read(machine: Machine, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    # These leave torch without an operator.
    @functools.wraps(inner)
    def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        record = record_of(self)
        if type(record) is DeviceMemory and name == "tolist":
            at, place = machine.current(), here()
            record.access(at, at.tick(), self, False, "tolist", place)
            machine.findings.wait("numbers are read", place)
            machine.host.joins(at.clock)
        elif type(record) is DeviceMemory:
            machine.findings.add(Kind.NOT_ON_HOST, f"{name} at {told(here())}")
            raise TypeError(f"can't convert cuda:{machine.index} device type tensor to numpy")
        elif type(record) is PageLocked:
            record.used(self, False, name)
        return inner(self, *args, **kwargs)

    return read
