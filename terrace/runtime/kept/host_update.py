"""Updates on the host's cores (`keep.update = "host"`), one after the other on a lane, beside what the device computes.

The cores read the gradient of a slice in their memory: on a CPU the device's own, else the host's, to which it was
written when it was complete. There new parameters take the place of the gradient, piece by piece, and when the slice is
updated a read brings them to the device:

    lane keep_write    gradients of b1, b0
    lane host cores                          update b0   update b1
    lane keep_read                                       params b0    params b1
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from terrace.accelerator import HOST
from terrace.comm.lane import DONE, ThreadLane, Ticket
from terrace.comm.pace import Pace
from terrace.plan.keep import CORES
from terrace.runtime.kept.channel import Around, Work, untimed
from terrace.runtime.kept.host import HostMemory
from terrace.runtime.kept.whole import Whole

UPDATE = "update"
Scale = Callable[[], Sequence[Tensor]]  # the scale of a gradient; none if its update is skipped


class Cores:
    """The lane of a rank's updates on its host, which `pace` may hold to the rate of the cluster's file."""

    def __init__(self, pace: Pace) -> None:
        self._lane, self._pace = ThreadLane(), pace
        self.around: Around = untimed  # wraps the work; a recording of a step sets it

    def submit(self, waits: Work, update: Work, num_bytes: int, then: Work) -> Ticket:
        """Run an `update` that reads and writes `num_bytes`, after all submitted before it, then call `then`.

        It first `waits` for what it reads. That is none of its time.
        """

        def paced() -> None:
            with self._pace(CORES, num_bytes):
                update()

        timed = self.around(paced, UPDATE, CORES)

        def work() -> None:
            waits()
            timed()
            then()

        return self._lane.submit(work)

    def rate(self, rate: float) -> float:
        """Bytes per second of updates, which reach `rate` without a pace."""
        return 1.0 / max(1.0 / rate, self._pace.least_s(CORES, 1))

    def close(self) -> None:
        self._lane.close(wait=not self._lane.failed)


class SharedGradient:
    """The gradient `owned` (n) of a slice on a CPU, as an update reads it: scaled."""

    device = HOST

    def __init__(self, owned: Tensor) -> None:
        self._owned, self.dtype, self.scale = owned, owned.dtype, torch.ones(())

    def numel(self) -> int:
        return self._owned.numel()

    def __getitem__(self, part: slice) -> Tensor:
        return self._owned[part].mul_(self.scale.to(self.dtype))

    def wait(self) -> None:
        """Block until the gradient is where it is read."""

    def replace(self, part: slice, values: Tensor) -> bool:
        """Store new parameters in the memory of the gradient. False: they are written to the device instead."""
        return False

    def returning(self, target: Tensor) -> Callable[[], Ticket]:
        """A function that begins to bring new parameters to `target` (n) on the device, for any thread to call."""
        return lambda: DONE


class LandedGradient:
    """As `SharedGradient`, for a gradient that `whole` has written to the host's `memory`.

    It is read as `sums`; new parameters are stored in its place and its dtype.
    """

    device = HOST

    def __init__(self, whole: Whole, memory: HostMemory, sums: torch.dtype) -> None:
        self._whole, self._memory, self.dtype = whole, memory, sums
        self.scale = torch.ones(())

    def numel(self) -> int:
        last: int = self._whole.parts[-1].stop
        return last

    def __getitem__(self, part: slice) -> Tensor:
        found = torch.empty(part.stop - part.start, dtype=self.dtype)
        for inside, values in self._within(part):
            found[inside].copy_(values)
        return found.mul_(self.scale.to(self.dtype))

    def wait(self) -> None:
        self._whole.written.wait_on_host()

    def replace(self, part: slice, values: Tensor) -> bool:
        for inside, place in self._within(part):
            place.copy_(values[inside])
        return True

    def returning(self, target: Tensor) -> Callable[[], Ticket]:
        return self._whole.reading(target)

    def _within(self, part: slice) -> Iterator[tuple[slice, Tensor]]:
        """The elements of `part` in each piece: their place in `part`, and their values."""
        dtype = self._whole.dtype
        for number, piece in zip(self._whole.numbers, self._whole.parts, strict=True):
            first, last = max(part.start, piece.start), min(part.stop, piece.stop)
            if first < last:
                found = self._memory.piece(number)[: (piece.stop - piece.start) * dtype.itemsize].view(dtype)
                yield slice(first - part.start, last - part.start), found[first - piece.start : last - piece.start]


HostGradient = SharedGradient | LandedGradient


class _Returned(Ticket):
    """Done when a slice is updated and its new parameters are on the device."""

    def __init__(self, updated: Ticket, reads: Sequence[Ticket]) -> None:
        self._updated, self._reads = updated, reads  # one, from the end of the update on

    def wait(self) -> None:
        self._updated.wait()
        self._reads[0].wait()

    @property
    def is_done(self) -> bool:
        return self._updated.is_done and self._reads[0].is_done


class HostUpdate:
    """The updates of one slice on `cores`, from its `gradient`; each reads and writes `num_bytes`."""

    def __init__(self, cores: Cores, gradient: HostGradient, num_bytes: int) -> None:
        self._cores, self.gradient, self._num_bytes, self._runs = cores, gradient, num_bytes, False

    def submit(self, update: Work, scale: Scale, target: Tensor) -> Ticket:
        """Run `update`, which reads the gradient times `scale`, and bring new parameters to `target` (n).

        Nothing changes if there is no scale. `scale` is called when this update starts, and may wait.
        """
        returning, reads, scales = self.gradient.returning(target), list[Ticket](), list[Tensor]()

        def waits() -> None:
            scales.extend(scale())
            if scales:
                self.gradient.wait()

        def work() -> None:
            for self.gradient.scale in scales:
                self._runs = True
                update()
                self._runs = False

        def then() -> None:
            # Submitted only once the update is over: before that it would hold up the reads behind it on their lane.
            reads.append(returning() if scales else DONE)

        return _Returned(self._cores.submit(waits, work, self._num_bytes, then), reads)

    def takes(self, part: slice, values: Tensor) -> bool:
        """Store new parameters to be copied to the device, if an update runs and they are. Returns whether it did."""
        return self._runs and self.gradient.replace(part, values)
