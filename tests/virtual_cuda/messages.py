"""torch.distributed as NCCL's: communicators, collectives on the current stream, sends and receives on their own.

Messages travel by gloo. A collective blocks the host until it is done, a receive where it is waited for, and a send
never: it leaves from a copy.
"""

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from tests.virtual_cuda.clocks import Clock, Moment, Timeline
from tests.virtual_cuda.findings import Kind, Place, here, told
from tests.virtual_cuda.functions import Patch
from tests.virtual_cuda.machine import Machine
from tests.virtual_cuda.operations import Facts
from tests.virtual_cuda.rules import COLLECTIVES, Entry, Key
from tests.virtual_cuda.storages import DeviceMemory, record_of

_isend, _irecv, _new_group, _get_backend = dist.isend, dist.irecv, dist.new_group, dist.get_backend
_init, _barrier = dist.init_process_group, dist.barrier


class Communicator:
    """A process group."""

    def __init__(self, key: Key, backend: str, timeline: Timeline) -> None:
        self.key, self.backend, self.timeline = key, backend, timeline
        self.last: tuple[int, int, Place] | None = None  # stream, tick and lines of the last message


class Messages:
    """The process groups of a rank."""

    def __init__(self, machine: Machine, limit_s: float, *, agrees: bool = False) -> None:
        self._agrees, self._machine, self._limit = agrees, machine, timedelta(seconds=limit_s)
        self.log: list[Entry] = []
        self._communicators: dict[str, Communicator] = {}
        self._numbers = Counter[tuple[int, ...]]()
        self._is_bound = False
        self._sending: list[tuple[Any, Tensor, Place]] = []
        if dist.is_initialized():
            self._register(dist.group.WORLD, "nccl")

    def patches(self) -> Iterator[Patch]:
        """All replaced functions of torch.distributed."""
        own = {
            "new_group": self.new_group,
            "get_backend": self.get_backend,
            "init_process_group": self.init_process_group,
            "isend": self.isend,
            "irecv": self.irecv,
            "send": lambda *args, **more: self.isend(*args, **more).wait(),
            "recv": lambda *args, **more: self.irecv(*args, **more).wait(),
            "batch_isend_irecv": self.batch,
            "barrier": self.barrier,
            "is_nccl_available": lambda: True,
        }
        for name, value in own.items():
            yield dist, name, value
            yield distributed_c10d, name, value

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for work, _, place in self._sending:
            try:
                work.wait()
            except RuntimeError:
                self._machine.findings.add(Kind.STUCK, f"nothing has received what was sent at {told(place)}")
        self._sending.clear()

    # Groups

    def init_process_group(self, backend: str = "nccl", *args: Any, device_id: Any = None, **more: Any) -> None:
        self._is_bound = device_id is not None
        _init("gloo" if backend == "nccl" else backend, *args, **more)
        self._register(dist.group.WORLD, backend)

    def get_backend(self, group: Any = None) -> str:
        found = self._communicators.get(_name(group))
        return found.backend if found is not None else _get_backend(group)

    def new_group(
        self, ranks: Sequence[int] | None = None, timeout: Any = None, backend: Any = None, **more: Any
    ) -> Any:
        device, place = more.pop("device_id", None), here()
        backend = backend or self.get_backend()
        members = tuple(ranks) if ranks is not None else tuple(range(dist.get_world_size()))
        if backend == "nccl" and len(members) > 1 and dist.get_rank() in members:
            number = len(distributed_c10d._world.pg_names)  # a part of the name that its members meet under
            self.log.append(Entry("make", self._key(members), f"as group {number}", -1, told(place)))
            if self._is_bound and more.get("use_local_synchronization"):
                self._machine.findings.add(Kind.BOUND_WORLD, f"group {list(members)} at {told(place)}")
            elif device is None and not self._is_bound:
                self._machine.findings.add(Kind.LATE_MAKING, f"group {list(members)} at {told(place)}")
        limit = self._limit if timeout is None else min(timeout, self._limit)
        group = _new_group(ranks, timeout=limit, backend="gloo", **more)
        if dist.get_rank() in members:
            self._register(group, backend)
        return group

    def barrier(self, group: Any = None, **more: Any) -> Any:
        more.pop("device_ids", None)
        if self.get_backend(group) == "nccl":
            self._machine.findings.wait("a barrier", here())
            self._machine.host.joins_all()
        with torch._C._DisableTorchDispatch():
            return _barrier(group, **more)

    def meet(self, group: Any, words: str, place: Place) -> None:
        """Wait until all ranks of a group have come to the same point of what they do with memory that they share."""
        key = self._communicators[group.group_name].key
        self.log.append(Entry("collective", key._replace(number=-1 - key.number), words, -1, told(place)))
        with torch._C._DisableTorchDispatch():
            _barrier(group)

    def _key(self, members: tuple[int, ...]) -> Key:
        ranks = tuple(sorted(members))
        return Key(ranks, self._numbers[ranks])

    def _register(self, group: Any, backend: str) -> None:
        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
        key = self._key(ranks)
        self._numbers[ranks] += 1
        timeline = self._machine.host.timeline(f"the stream of messages of ranks {list(ranks)}")
        self._communicators[_name(group)] = Communicator(key, backend, timeline)

    # Messages

    def collective(self, func: Any, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A collective that torch.distributed has issued."""
        given = dict(zip(facts.arguments, args, strict=False)) | kwargs
        group = dist.ProcessGroup.unbox(given["process_group"])
        communicator, place = self._communicators.get(group.group_name), here()
        tensors = {name: list(_flat(value)) for name, value in given.items()}
        if communicator is None or communicator.backend != "nccl":
            self._check_memory([each for found in tensors.values() for each in found], False, facts.name, place)
            return func(*args, **kwargs)
        if facts.name not in COLLECTIVES or given.get("async_op"):
            how = " that is asynchronous" if given.get("async_op") else ""
            raise NotImplementedError(f"the virtual device has no {facts.name}{how}: add it to tests/virtual_cuda")
        written, is_even = COLLECTIVES[facts.name]
        self._check_memory([each for found in tensors.values() for each in found], True, facts.name, place)
        at = self._machine.current()
        tick = at.tick()
        self._in_order(communicator, at, tick, place)
        for name, found in tensors.items():
            for each in found:
                self._access(each, at, tick, name in written, facts.name, place)
        every = [each for name, found in tensors.items() if name not in written for each in found]
        sent = (every or [each for found in tensors.values() for each in found])[0]
        size = f" of {sent.numel()}" if is_even else ""
        words = f"{facts.name}{size} {sent.dtype}"
        self.log.append(Entry("collective", communicator.key, words, -1, told(place)))
        if self._agrees:
            self._agree(given["process_group"], group.size(), words)
        if facts.name == "_reduce_scatter_base_":
            return _sum_in_order(given["process_group"], group.size(), given["output_tensor"], given["input_tensor"])
        return func(*args, **kwargs)

    def _agree(self, group: Any, size: int, words: str) -> None:
        # A collective that differs from the others' may end a process of gloo, before anything could be told.
        own = torch.tensor([zlib.crc32(words.encode())])
        every = torch.empty(size, dtype=torch.int64)
        dist.Work.unbox(torch.ops.c10d._allgather_base_(every, own, group, False, -1)[1]).wait()
        if bool((every != own).any()):
            raise RuntimeError("ranks disagree about the next message of a communicator")

    def isend(self, tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0, **more: Any) -> Any:
        peer = dst if dst is not None else dist.get_global_rank(group, more.pop("group_dst"))
        place, communicator = here(), self._communicators[_name(group)]
        if not self._check_memory([tensor], communicator.backend == "nccl", "isend", place):
            return _isend(tensor, peer, group, tag)
        clock = self._start(communicator, tensor, False, "isend", place)
        self._note("send", communicator, tensor, peer, place)
        with torch._C._DisableTorchDispatch():
            copy = tensor.detach().clone()
            self._sending.append((_isend(copy, peer, group, tag), copy, place))
        return Message(self, clock, tensor)

    def irecv(self, tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0, **more: Any) -> Any:
        peer = src if src is not None else dist.get_global_rank(group, more.pop("group_src"))
        place, communicator = here(), self._communicators[_name(group)]
        if not self._check_memory([tensor], communicator.backend == "nccl", "irecv", place):
            return _irecv(tensor, peer, group, tag)
        clock = self._start(communicator, tensor, True, "irecv", place)
        self._note("receive", communicator, tensor, peer, place)
        with torch._C._DisableTorchDispatch():
            work = _irecv(tensor, peer, group, tag)
        return Message(self, clock, tensor, work, Entry("stuck", communicator.key, "receive", peer, ""))

    def batch(self, operations: Sequence[Any]) -> list[Any]:
        """Sends and receives of one group call."""
        return [each.op(each.tensor, each.peer, each.group, each.tag) for each in operations]

    def wait(self, clock: Clock) -> None:
        """The current stream waits for a send or receive."""
        self._machine.current().waits_for(clock)

    def moment(self, clock: Clock) -> Moment:
        """Whether a send is over."""
        found = Moment(self._machine.host)
        found.clock = clock
        return found

    def _start(self, communicator: Communicator, tensor: Tensor, writes: bool, words: str, place: Place) -> Clock:
        at = communicator.timeline
        at.waits_for(self._machine.current().now())
        tick = at.tick()
        self._in_order(communicator, at, tick, place)
        self._access(tensor, at, tick, writes, words, place)
        return dict(at.clock)

    def _note(self, what: str, communicator: Communicator, tensor: Tensor, peer: int, place: Place) -> None:
        words = f"{tensor.numel()} {tensor.dtype}"
        self.log.append(Entry(what, communicator.key, words, peer, told(place)))

    def _in_order(self, communicator: Communicator, at: Timeline, tick: int, place: Place) -> None:
        last, communicator.last = communicator.last, (at.number, tick, place)
        if last is not None and not at.follows(*last[:2]):
            before = f"{self._machine.name(last[0])} at {told(last[2])}"
            words = f"ranks {list(communicator.key.ranks)}: {at.name} at {told(place)}; {before}"
            self._machine.findings.add(Kind.COMMUNICATOR, words)

    def _access(self, tensor: Tensor, at: Timeline, tick: int, writes: bool, words: str, place: Place) -> None:
        record = record_of(tensor)
        if isinstance(record, DeviceMemory):
            record.access(at, tick, tensor, writes, words, place)

    def _check_memory(self, tensors: Sequence[Tensor], wanted: bool, words: str, place: Place) -> bool:
        for each in tensors:
            if isinstance(record_of(each), DeviceMemory) != wanted and (each.numel() or wanted):
                kinds = ("CPU memory on an NCCL group", "CUDA memory on a gloo group")
                self._machine.findings.add(Kind.MEMORY, f"{words} of {kinds[not wanted]} at {told(place)}")
        return wanted


class Message:
    """The work of a send or receive."""

    def __init__(
        self, messages: Messages, clock: Clock, tensor: Tensor, work: Any = None, stuck: Entry | None = None
    ) -> None:
        self._messages, self._clock, self._work, self._stuck = messages, clock, work, stuck
        self._tensor: Tensor | None = tensor  # held until the wait, as torch does
        self._moment = messages.moment(clock)

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait."""
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError:
                assert self._stuck is not None
                self._messages.log.append(self._stuck._replace(line=told(here())))
                raise
            self._work = None
        self._messages.wait(self._clock)
        self._tensor = None
        return True

    def is_completed(self) -> bool:
        """Whether it is over, as an event says it."""
        return self._work is None and self._moment.is_over()


def _name(group: Any) -> str:
    found: Any = dist.group.WORLD if group is None else group
    return str(found.group_name)


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _flat(each)


def _sum_in_order(group: Any, size: int, out: Tensor, values: Tensor) -> tuple[Tensor, Any]:
    """A reduce-scatter whose sums are in the order of ranks, as on a CPU; NCCL's order is its own."""
    rows = torch.empty_like(values)
    work = torch.ops.c10d.alltoall_base_(rows, values, group, [], [], False, -1)
    dist.Work.unbox(work).wait()
    parts = rows.view(size, -1)
    total = parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    out.view(-1).copy_(total)
    return out, work
