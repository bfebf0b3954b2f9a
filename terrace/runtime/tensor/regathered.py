"""The gathered input of a region (attention or MLP) under sequence parallelism."""

from collections.abc import Iterator

import torch
from torch import Tensor

from terrace.plan.tensor_traffic import chunk_bounds
from terrace.program.block_program.steps import ComputeKind
from terrace.runtime.in_block import InFlight
from terrace.runtime.pages import mark_returning
from terrace.runtime.tensor.axis_comm import AxisComm, mapped


class RegatheredInput:
    """Gathered input of a region: dropped after its forward, and gathered again for its weight gradients.

    So a rank keeps only its own part of every input (Korthikanti et al. 2205.05198, section 4.2.2). Autograd has
    saved views of the whole input, so its storage object stays and is empty in between. It is refilled through a view
    with a separate version counter, because the values do not change.
    """

    def __init__(self, drops: bool, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        # Without a backward nothing needs the input again.
        self.drops = drops and torch.is_grad_enabled()
        self._refill: InFlight | None = None
        self._arriving: list[tuple[int, int, Tensor, InFlight]] = []  # parts under way: (start, stop, values, flight)

    @property
    def num_tokens(self) -> int:
        """Tokens of one rank, with padding."""
        return self._whole.shape[1]

    @property
    def is_arriving(self) -> bool:
        """Whether parts of the input are still in flight."""
        return bool(self._arriving)

    def start(self, whole: Tensor, x: Tensor, comm: AxisComm) -> None:
        """Start to gather x (m, ...) into `whole` (n m, ...), in parts that each hold tokens of all ranks."""
        self.comm, self._whole = comm, whole.view(comm.degree, *x.shape)
        for start, stop in chunk_bounds(x.shape[0], self.num_chunks):
            # A part holds the same tokens of every rank, which are not contiguous in the whole.
            part = x.new_empty((comm.degree * (stop - start), *x.shape[1:]))
            self._arriving.append((start, stop, part, comm.start_gather(part, x[start:stop])))

    def parts(self) -> Iterator[tuple[int, int, Tensor]]:
        """Wait for each part, copy it to the whole input, and yield (start, stop, values of all ranks)."""
        for start, stop, part, flight in self._arriving:
            self.comm.wait(flight)
            # Later products and the backward read the whole input.
            self._whole[:, start:stop] = part.view(self.comm.degree, stop - start, *part.shape[1:])
            yield start, stop, part
        self._arriving = []

    def hold(self, whole: Tensor, x: Tensor) -> None:
        """Store what `drop` and `refill` need: the whole input (n m, ...) and this rank's part, x (m, ...)."""
        if self.drops:
            self._part = x.detach()
            self._storage = whole.untyped_storage()
            self._num_bytes = self._storage.nbytes()
            self._again = torch.empty(0, dtype=whole.dtype, device=whole.device)
            # A view with its own version counter, so autograd does not take the refill for a change.
            self._again.set_(self._storage, 0, whole.shape, whole.stride())

    def drop(self) -> None:
        """Free the whole input, after the region's forward."""
        if self.drops:
            self._storage.resize_(0)

    def refill(self, comm: AxisComm) -> None:
        if self.drops:
            # The same storage grows again, so views saved by autograd see the values.
            self._storage.resize_(self._num_bytes)
            self._refill = comm.start_gather(self._again, self._part)

    def await_refilled(self, comm: AxisComm) -> None:
        """Wait for `refill`; only the first caller in a region waits."""
        if self._refill is not None:
            comm.in_block.computes(ComputeKind.INPUT_GRADIENTS)  # by autograd, since the gather was begun
            comm.wait(self._refill)
            self._refill = None


def gather_input(x: Tensor, comm: AxisComm, held: RegatheredInput) -> Tensor:
    """All-gather the input of a region, x (m, ...). `held` may drop it until the region's backward."""

    def forward(x: Tensor) -> Tensor:
        if held.num_chunks == 1:
            whole = comm.all_gather(x)
        else:
            whole = x.new_empty((comm.degree * x.shape[0], *x.shape[1:]))
            held.start(whole, x, comm)
        held.hold(whole, x)
        return whole

    def backward(gradient: Tensor) -> Tensor:
        held.await_refilled(comm)
        return comm.reduce_scatter(gradient, ends_region=True)

    whole = mapped(x, forward, backward)
    return mark_returning(whole) if held.drops else whole


def reduce_output(x: Tensor, comm: AxisComm, held: RegatheredInput) -> Tensor:
    """Reduce-scatter x, the output of a region. The backward starts to gather the dropped input again."""

    def forward(x: Tensor) -> Tensor:
        held.drop()
        return comm.reduce_scatter(x)

    def backward(gradient: Tensor) -> Tensor:
        # The output's gradient first: input gradients wait for it, while only weight gradients need the input.
        gradient = comm.all_gather(gradient)
        held.refill(comm)
        return gradient

    return mapped(x, forward, backward)


def await_input(y: Tensor, comm: AxisComm, held: RegatheredInput) -> Tensor:
    """Identity; the backward waits until the region's input has been gathered again."""

    def backward(gradient: Tensor) -> Tensor:
        held.await_refilled(comm)
        return gradient

    return mapped(y, lambda y: y.view_as(y), backward)
