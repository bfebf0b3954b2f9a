"""Triton's interpreter with bounds: a load or store outside the tensor that its pointer was made from ends the test.

The interpreter reads and writes real addresses, so an access beyond a tensor meets whatever lies there, and a wrong
kernel may go unnoticed. Here each tensor of a launch has a number, which its address carries in the 16 bits that no
address of a process uses. Arithmetic on pointers keeps it, so every access knows its tensor, also where another one
lies beside it. Inside are the elements of the tensor as it was passed: gaps between rows of a view are not.
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ADDRESS_BITS = 48
_ADDRESS = np.uint64((1 << _ADDRESS_BITS) - 1)
_ACCESSES = {  # methods of the interpreter: which argument has the pointers, which the mask, and what they do
    "create_masked_load": (0, 1, "load"),
    "create_masked_store": (0, 2, "store"),
    "create_atomic_rmw": (1, 3, "atomic operation"),
    "create_atomic_cas": (0, None, "atomic operation"),
}


class OutsideError(BaseException):
    """An access outside a tensor. No `Exception`: code that replaces a kernel which cannot run must not catch it."""


class _Argument(NamedTuple):
    """A tensor of a launch: the address of its first element, and how many of its bytes lie before each byte."""

    address: int
    before: NDArray[np.int64]
    words: str


class _Launch:
    """The tensors of the kernel that runs."""

    def __init__(self) -> None:
        self.name, self.arguments = "", list[_Argument]()

    def add(self, tensor: Tensor) -> int:
        """The number of a tensor, from 1."""
        words = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        self.arguments.append(_Argument(tensor.data_ptr(), _bytes_before(tensor), words))
        return len(self.arguments)

    def check(self, pointers: NDArray[np.uint64], mask: NDArray[np.bool_], size: int, does: str) -> None:
        """Raise `OutsideError` unless each unmasked access of `size` bytes is inside its tensor."""
        used = pointers[np.broadcast_to(mask, pointers.shape)]
        for number in np.unique(used >> np.uint64(_ADDRESS_BITS)).tolist():
            if not 1 <= number <= len(self.arguments):
                raise OutsideError(f"{self.name}: a {does} through a pointer that is no tensor's")
            argument = self.arguments[number - 1]
            own = used[used >> np.uint64(_ADDRESS_BITS) == number] & _ADDRESS
            first = own.astype(np.int64) - argument.address
            end = len(argument.before) - 1
            is_inside = (first >= 0) & (first + size <= end)
            first = first.clip(0, max(0, end - size))
            is_inside &= argument.before[np.minimum(first + size, end)] - argument.before[first] == size
            if not is_inside.all():
                at = own[~is_inside][0].astype(np.int64) - argument.address
                words = f"{does} of {size} bytes at byte {at} of argument {number}, {argument.words}"
                raise OutsideError(f"{self.name}: a {words}, lies outside it")


def _bytes_before(tensor: Tensor) -> NDArray[np.int64]:
    """For each byte from a tensor's first element to its last, and their end, how many before it are the tensor's."""
    if not tensor.numel():
        return np.zeros(1, dtype=np.int64)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    has = torch.zeros(last + 1, dtype=torch.uint8)
    has.as_strided(tensor.shape, tensor.stride()).fill_(1)
    return np.concatenate([[0], np.cumsum(np.repeat(has.numpy(), tensor.element_size()), dtype=np.int64)])


def check_bounds() -> None:
    """From now on kernels of this process are checked; the interpreter must be on (TRITON_INTERPRET=1)."""
    interpreter = import_module("triton.runtime.interpreter")
    launch, convert, execute = _Launch(), interpreter._implicit_cvt, interpreter.GridExecutor.__call__
    if getattr(convert, "has_bounds", False):
        return

    @wraps(convert)
    def converted(argument: Any) -> Any:
        found = convert(argument)
        if hasattr(argument, "data_ptr"):
            number = launch.add(getattr(argument, "base", argument))
            found.handle.data = found.handle.data | np.uint64(number << _ADDRESS_BITS)
        return found

    @wraps(execute)
    def executed(self: Any, *given: Any, **named: Any) -> Any:
        launch.__init__()  # type: ignore[misc]
        launch.name = self.fn.__name__
        return execute(self, *given, **named)

    converted.has_bounds = True  # type: ignore[attr-defined]
    vars(interpreter)["_implicit_cvt"] = converted
    interpreter.GridExecutor.__call__ = executed
    for name, (pointers, mask, does) in _ACCESSES.items():
        inner = getattr(interpreter.InterpreterBuilder, name)
        setattr(interpreter.InterpreterBuilder, name, _checked(inner, launch, pointers, mask, does))


def _checked(inner: Callable[..., Any], launch: _Launch, place: int, masked: int | None, does: str) -> Any:
    @wraps(inner)
    def checked(self: Any, *given: Any) -> Any:
        pointers = given[place]
        mask = np.ones((), dtype=bool) if masked is None else given[masked].data
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        launch.check(pointers.data, mask, size, does)
        plain = type(pointers)(pointers.data & _ADDRESS, pointers.dtype)
        return inner(self, *given[:place], plain, *given[place + 1 :])

    return checked
