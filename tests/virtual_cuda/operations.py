"""Every operator on tensors of the device: which storages it reads and writes, and whether the host waits for it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.virtual_cuda import products
from tests.virtual_cuda.findings import Kind, Place, here, told
from tests.virtual_cuda.machine import Machine
from tests.virtual_cuda.storages import DeviceMemory, PageLocked, Record, put_on_device, record_of, record_of_storage

CPU = torch.device("cpu")
DEVICES = ("the CPU", "cuda")

# Operators that wait for the stream on CUDA: what they return, or its size, is a value of the device. From the calls
# of memcpy_and_sync, stream_synchronize and warn_or_error_on_sync in aten/src/ATen/native/cuda of torch 2.13.
WAITS = {
    "_local_scalar_dense": "a number is read",
    "is_nonzero": "a truth value is read",
    "equal": "a comparison is read",
    "nonzero": "the size of the result is counted",
    "masked_select": "the size of the result is counted",
    "_unique": "the size of the result is counted",
    "_unique2": "the size of the result is counted",
    "unique_consecutive": "the size of the result is counted",
    "unique_dim": "the size of the result is counted",
    "repeat_interleave": "the size of the result is counted",
    "bincount": "the size of the result is counted",
    "histc": "the range of the values is read",
}
_INDEXED = ("index", "index_put_", "index_put", "_index_put_impl_")
_COPIES = ("copy_", "_to_copy", "_copy_from")
# Operators that take CPU tensors without dims for nothing else: kernels other than those of TensorIterator.
_STRICT = ("cat", "mm", "bmm", "addmm", "embedding", "gather", "index_select", "scatter", "scatter_add", "index_add")


class Facts:
    """What the schema of an operator says."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = schema.name.split("::")[-1]
        self.room = schema.name.split("::")[0]
        self.arguments = [argument.name for argument in schema.arguments]
        self.written = frozenset(
            argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write
        )
        aliases = [each.alias_info is not None for each in schema.returns]
        self.is_view = not self.written and any(aliases)  # of the same bytes: no access
        self.makes = not all(aliases)
        self.has_device = "device" in self.arguments
        self.is_composite = func._can_decompose()
        self.is_indexed, self.is_copy = self.name in _INDEXED, self.name in _COPIES
        self.waits = WAITS.get(self.name)
        # A kernel of the CPU would take what CUDA refuses.
        self.definition = products.DEFINITIONS.get(self.name)
        self.is_plain = self.waits is None and not (self.is_indexed or self.is_copy or self.name == "set_")


_facts: dict[Any, Facts] = {}
Collective = Callable[[Any, Facts, tuple[Any, ...], dict[str, Any]], Any]


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Watches operators of one thread."""

    def __init__(self, machine: Machine, collective: Collective) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._machine, self._collective = machine, collective

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper would be a third of the time

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = _facts.get(func)
        if facts is None:
            facts = _facts[func] = Facts(func)
        if facts.is_composite and not self._machine.is_over and any(map(_is_of_inference, args)):
            # In inference mode these arrive whole, with what they copy or make unseen.
            with self:
                return func.decompose(*args, **kwargs)
        if facts.is_view or self._machine.is_over:
            return func(*args, **kwargs)
        if facts.room == "c10d":
            return self._collective(func, facts, args, kwargs)
        if facts.room == "symm_mem":
            return self._fused(facts, args, kwargs)
        device = kwargs.get("device")
        if device is not None:
            if device.type == "meta":
                return func(*args, **kwargs)
            if device.type == "cuda":
                kwargs = {**kwargs, "device": CPU}
        if facts.name == "set_":
            self._check_storage(args)
            return func(*args, **kwargs)
        found, is_plain = _tensors(facts, args, kwargs)
        if self._machine.thread.moving is not None and facts.is_copy:
            return self._copy(func, facts, args, kwargs, found, here())
        if is_plain:
            result = func(*args, **kwargs)
            is_made = device is not None and device.type == "cuda"
            if is_made or (facts.has_device and self._machine.thread.target):
                self._made(result, args, facts, here())
            return result
        return self._run(func, facts, args, kwargs, found)

    def _run(
        self, func: Any, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any], found: "list[_Found]"
    ) -> Any:
        machine = self._machine
        here_on = [each for each in found if type(each[2]) is DeviceMemory]
        if not here_on:
            return self._on_host(func, facts, args, kwargs, found)
        place, at = here(), machine.current()
        machine.findings.counts["operations"] += 1
        if len(here_on) < len(found):
            self._check_devices(facts, found, place)
        if not facts.is_plain:
            if facts.is_copy:
                return self._copy(func, facts, args, kwargs, found, place)
            self._check_waits(facts, args, found, place)
        tick = at.tick()
        for tensor, writes, record in here_on:
            assert isinstance(record, DeviceMemory)
            own = record if record.machine is machine else put_on_device(tensor, machine)
            own.access(at, tick, tensor, writes, facts.name, place)
        if facts.waits is not None:
            machine.findings.wait(facts.waits, place)
            machine.host.joins(at.clock)
        result = (facts.definition or func)(*args, **kwargs)
        # A factory with a tensor, such as `new_zeros`: the function called by Python knows the device.
        if facts.makes and not (facts.has_device and machine.thread.target is False):
            self._made(result, args, facts, place)
        return result

    def _fused(self, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Torch's Python for CUDA, operator by operator.
        thread = self._machine.thread
        thread.is_fused = True
        try:
            with self:
                return products.fused(facts.name)(*args, **kwargs)
        finally:
            thread.is_fused = False

    def _on_host(
        self, func: Any, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any], found: "list[_Found]"
    ) -> Any:
        # Some tensors are in page-locked memory, and none on the device.
        for tensor, writes, record in found:
            if type(record) is PageLocked:
                record.used(tensor, writes, facts.name)
        return func(*args, **kwargs)

    def _copy(
        self,
        func: Any,
        facts: Facts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: "list[_Found]",
        place: Place,
    ) -> Any:
        """A copy, maybe between the host and the device."""
        machine, moving = self._machine, self._machine.thread.moving
        at = machine.current()
        tick = at.tick()
        non_blocking = bool(kwargs.get("non_blocking") or (facts.name == "copy_" and len(args) > 2 and args[2]))
        target, source = (found[0], found[1]) if facts.name == "copy_" else (None, found[0])
        result = func(*args, **kwargs)
        if target is None:  # `_to_copy`: into a new tensor
            to_device = moving if moving is not None else type(source[2]) is DeviceMemory
            made: Record | None = None
            if to_device:
                made = put_on_device(result, machine)
            target = (result, True, made)
        is_over = type(target[2]) is type(source[2]) is DeviceMemory
        touched = [target, source]
        if not is_over and non_blocking:
            host = next(each for each in touched if type(each[2]) is not DeviceMemory)
            is_over = type(host[2]) is PageLocked and all(each[0].is_contiguous() for each in touched)
        for (tensor, _, record), writes in zip(touched, (True, False), strict=True):
            if type(record) is DeviceMemory:
                own = record if record.machine is machine else put_on_device(tensor, machine)
                own.access(at, tick, tensor, writes, facts.name, place)
            elif type(record) is PageLocked and is_over:
                record.copied(at, tick, tensor, writes, facts.name, place)
            elif type(record) is PageLocked:
                record.used(tensor, writes, facts.name)
        if not is_over:
            to = "to" if type(target[2]) is not DeviceMemory else "from"
            machine.findings.wait(f"a copy {to} the host", place)
            machine.host.joins(at.clock)
        return result

    def _check_devices(self, facts: Facts, found: "list[_Found]", place: Place) -> None:
        if facts.is_copy or facts.name == "_foreach_copy_":
            return
        for tensor, writes, record in found:
            is_number = tensor.dim() == 0 and not writes and facts.name not in _STRICT
            if type(record) is DeviceMemory or is_number or tensor.is_meta:
                continue
            if facts.is_indexed and tensor.dtype in _INDICES and type(found[0][2]) is DeviceMemory:
                continue
            there = next(each for each, _, other in found if type(other) is DeviceMemory)
            words = f"{facts.name} of {_words(there)} on cuda and {_words(tensor)} on the CPU at {told(place)}"
            self._machine.findings.add(Kind.DEVICES, words)
            return

    def _check_storage(self, args: tuple[Any, ...]) -> None:
        # A tensor takes a storage of its own device alone.
        for source in args[1:2]:
            other = source._untyped_storage if isinstance(source, torch.TypedStorage) else source
            there = isinstance(record_of_storage(other), DeviceMemory)
            if there != isinstance(record_of(args[0]), DeviceMemory):
                words = f"set_ of a tensor on {DEVICES[not there]} to a storage on {DEVICES[there]} at {told(here())}"
                self._machine.findings.add(Kind.DEVICES, words)

    def _check_waits(self, facts: Facts, args: tuple[Any, ...], found: "list[_Found]", place: Place) -> None:
        if not facts.is_indexed:
            return
        indices = [each for each in args[1] if isinstance(each, Tensor)]
        reason = None
        if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
            reason = "a mask is an index, whose places are counted"
        elif any(type(record_of(each)) is not DeviceMemory for each in indices):
            reason = "indices are copied from the host"
        if reason is not None:
            self._machine.findings.wait(reason, place)
            self._machine.host.joins(self._machine.current().clock)

    def _made(self, result: Any, args: tuple[Any, ...], facts: Facts, place: Place) -> None:
        machine = self._machine
        at = machine.current()
        tick = at.tick()
        for tensor in (result,) if isinstance(result, Tensor) else result if isinstance(result, (tuple, list)) else ():
            if isinstance(tensor, Tensor) and record_of(tensor) is None:
                put_on_device(tensor, machine).access(at, tick, tensor, True, facts.name, place)


_Found = tuple[Tensor, bool, Record | None]
_INDICES = (torch.int64, torch.int32, torch.bool, torch.uint8)


def _tensors(facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[_Found], bool]:
    """The tensors among the arguments of an operator, whether it writes them, and their records.

    Also returns whether all are in pageable memory of the host.
    """
    found, is_plain, written, names = list[_Found](), True, facts.written, facts.arguments
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            record = record_of(value)
            found.append((value, names[index] in written, record))
            is_plain = is_plain and record is None
        elif isinstance(value, (list, tuple)):
            for each in value:
                if isinstance(each, Tensor):
                    record = record_of(each)
                    found.append((each, names[index] in written, record))
                    is_plain = is_plain and record is None
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            record = record_of(value)
            found.append((value, name in written, record))
            is_plain = is_plain and record is None
    return found, is_plain


def _is_of_inference(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_inference()


def _words(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
