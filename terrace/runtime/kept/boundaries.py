"""Inputs of blocks that are kept below the device from their forward to their backward (terrace.plan.boundaries).

An input's memory is its storage, which the block's graph and the output of the block before share. EVICT writes its
values; the next EVICT waits for that write and frees the storage. FETCH gives it memory again and reads the values. So
whoever refers to the input finds it when a backward runs, and its memory is free in between.
"""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from terrace.base.errors import ModelError
from terrace.comm.lane import Ticket
from terrace.plan.wire import MessageClass
from terrace.runtime.kept.whole import Whole

if TYPE_CHECKING:
    from terrace.runtime.messages import Messages

Key = tuple[int, int]  # block, micro-batch
_WAIT_READ, _WAIT_WRITE = f"wait {MessageClass.KEEP_READ.value}", f"wait {MessageClass.KEEP_WRITE.value}"


class _Evicted(NamedTuple):
    place: Whole
    values: Tensor  # (n), over the storage of the input
    num_bytes: int
    written: Ticket


class _Fetched(NamedTuple):
    place: Whole
    read: Ticket


class Boundaries:
    """The inputs of one step that are below the device. `places` have room for one of `num_bytes` each."""

    def __init__(self, places: Sequence[Whole] = (), num_bytes: int = 0) -> None:
        self._free, self._num_bytes = deque(places), num_bytes
        self._evicted, self._fetched = dict[Key, _Evicted](), dict[Key, _Fetched]()
        self._leaving: list[_Evicted] = []  # the newest, until its memory is free

    def evict(self, key: Key, inputs: Tensor, messages: "Messages") -> None:
        """EVICT: write an `alone` input, once the one before has left. Raises `ModelError` for another size."""
        if inputs.nbytes != self._num_bytes:
            raise ModelError(
                f"block {key[0]} reads {tuple(inputs.shape)} in {inputs.dtype}, {inputs.nbytes} bytes, but inputs that "
                f"plan.keep.activations keeps have {self._num_bytes}: micro_batch x activation=(sequence, hidden)"
            )
        self._leave(messages)
        # Without the graph and its count of versions: a read gives the values that the graph has seen.
        values, place = inputs.data.as_strided((inputs.numel(),), (1,)), self._free.popleft()
        evicted = self._evicted[key] = _Evicted(place, values, values.nbytes, place.write(values))
        self._leaving.append(evicted)

    def fetch(self, key: Key, messages: "Messages") -> None:
        """FETCH: give the input memory and begin to read it."""
        evicted = self._evicted.pop(key)
        if any(each is evicted for each in self._leaving):
            self._leave(messages)
        evicted.values.untyped_storage().resize_(evicted.num_bytes)
        self._fetched[key] = _Fetched(evicted.place, evicted.place.read(evicted.values))

    def _leave(self, messages: "Messages") -> None:
        while self._leaving:
            messages.wait_below(self._leaving[0].written, _WAIT_WRITE)
            self._leaving.pop().values.untyped_storage().resize_(0)

    def await_for(self, key: Key, messages: "Messages") -> None:
        """Wait until a fetched input is there; at once for one that has not left."""
        if key in self._fetched:
            place, read = self._fetched.pop(key)
            messages.wait_below(read, _WAIT_READ)
            self._free.append(place)


def alone(inputs: Tensor) -> Tensor:
    """`inputs`, or a copy of them, whose storage holds nothing else and may be freed."""
    storage = inputs.untyped_storage()
    is_alone = storage.resizable() and storage.nbytes() == inputs.nbytes
    return inputs if is_alone else inputs.clone()


def shares(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
