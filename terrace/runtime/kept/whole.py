"""Tensors that are kept below the device as wholes: working copies of parameters, and accumulated gradients.

GATHER reads a working copy into the block's full parameters on the lane of reads, while other blocks are computed. An
update changes a copy on the device, and the lane of writes then stores it. Reads and writes each pass through a buffer
of one piece, since direct I/O needs page-aligned memory, and copies to and from a device need page-locked memory.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from terrace.accelerator import has_streams
from terrace.comm.lane import DONE, Ticket
from terrace.plan.wire import MessageClass
from terrace.runtime.kept.channel import Channel, Work

if TYPE_CHECKING:
    from terrace.plan.pieces import Piece
    from terrace.runtime.kept.ring import Slot


class _Computed(Ticket):
    """A ticket that is done when all work issued to a device so far is."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.Event(device)
        self._event.record(torch.accelerator.current_stream(device))

    def wait(self) -> None:
        self._event.synchronize()

    @property
    def is_done(self) -> bool:
        return self._event.query()


def computed(device: torch.device) -> Ticket:
    """A ticket that is done when all work issued to `device` so far is; at once on a CPU."""
    return _Computed(device) if has_streams(device) else DONE


def _nothing() -> None:
    """Do nothing."""


class FrozenState:
    """Frozen parameters that are kept below the device, as a state that checkpoints read (terrace.runtime.stored).

    They have the shape and dtype of `shard`.
    """

    is_exact, is_coded, rests_below, nbytes = True, True, True, 0

    def __init__(self, whole: "Whole", shard: Tensor) -> None:
        self._whole, self._shard, self._opened = whole, shard, list[Tensor]()

    @property
    def tensor(self) -> Tensor:
        """The values (n), a copy unless the state is open."""
        if self._opened:
            return self._opened[0]
        found = torch.empty_like(self._shard)
        self._whole.read(found, counted=False).wait()
        return found

    def visits(self, numel: int) -> Iterator[slice]:
        raise AssertionError("frozen parameters have no update")

    def windows(self, numel: int) -> Iterator[slice]:
        yield slice(0, numel)

    def read(self, part: slice) -> Tensor:
        raise AssertionError("frozen parameters have no update")

    def write(self, part: slice, values: Tensor, step: int) -> None:
        raise AssertionError("frozen parameters have no update")

    def open(self) -> None:
        """Hold the values in memory until `close`."""
        self._opened = [self.tensor]

    def close(self) -> None:
        self._whole.write(self._opened.pop(), counted=False).wait()


class Whole:
    """A tensor of one rank, in the pieces `numbers` of a channel; `slots` are the buffers of reads and of writes.

    `parts` are the elements of each piece, which are stored as `dtype`.
    """

    def __init__(
        self,
        channel: Channel,
        pieces: "Sequence[Piece]",
        numbers: Sequence[int],
        slots: "tuple[Slot, Slot]",
        dtype: torch.dtype,
    ) -> None:
        self._channel, self.numbers, (self._reads, self._writes) = channel, tuple(numbers), slots
        self.dtype, self.parts, first = dtype, list[slice](), 0
        for piece in pieces:
            self.parts.append(slice(first, first + piece.numel))
            first += piece.numel
        self._num_bytes = sum(piece.num_bytes for piece in pieces)
        self.written = DONE  # the last write

    def read(self, target: Tensor, *, counted: bool = True) -> Ticket:
        """Fill `target` (n), once the last `write` and all work issued to the device so far are over.

        `counted` bytes enter the ledger: those that a step's program declares.
        """
        return self.reading(target, counted=counted)()

    def reading(self, target: Tensor, *, counted: bool = True) -> Callable[[], Ticket]:
        """A function that begins to `read`, for any thread to call. Work issued up to now is waited for."""
        written, ready = self.written, computed(target.device)

        def work() -> None:
            written.wait_on_host()
            ready.wait_on_host()
            for number, part in zip(self.numbers, self.parts, strict=True):
                self._reads.fill(self._channel.store, number)
                self._reads.copy_to(target[part])

        work_of = self._counted(work, MessageClass.KEEP_READ) if counted else work
        return lambda: self._channel.reader.submit(work_of)

    def write(self, source: Tensor, after: Ticket = DONE, then: Work = _nothing, *, counted: bool = True) -> Ticket:
        """Store `source` (n), once `after` and all work issued to the device so far are over, then call `then`."""
        ready = computed(source.device)

        def work() -> None:
            after.wait_on_host()
            ready.wait_on_host()
            for number, part in zip(self.numbers, self.parts, strict=True):
                self._writes.copy_from(source[part], self.dtype)
                self._writes.store(self._channel.store, number)
            then()

        work_of = self._counted(work, MessageClass.KEEP_WRITE) if counted else work
        self.written = self._channel.writer.submit(work_of)
        return self.written

    def _counted(self, work: Work, message: MessageClass) -> Work:
        self._channel.count(message, self._num_bytes)
        return self._channel.timed(work, message)
