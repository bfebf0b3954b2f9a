"""The gathered input of a region: attention or MLP between the residual stream and back, under sequence parallelism."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from terrace.comm import Ticket
from terrace.plan.tensor_traffic import chunk_bounds
from terrace.runtime.tensor.line import Line, apply


def enter(x: Tensor, line: Line, entry: "Entry") -> Tensor:
    """Return x (m, ...) of all ranks, the input of a region, which `entry` may drop until the region's backward."""
    return apply(_Enter, x, line, entry)


def leave(x: Tensor, line: Line, entry: "Entry") -> Tensor:
    """Return this rank's part of the sum of x, the output of the region; backward gathers the dropped input again."""
    return apply(_Leave, x, line, entry)


def needs_input(y: Tensor, line: Line, entry: "Entry") -> Tensor:
    """Return y, whose backward reads the region's input itself, not by way of the weight gradients that wait."""
    return apply(_Refilled, y, line, entry)


class Entry:
    """The gathered input of a region: dropped after its forward, gathered again for its weight gradients.

    So a rank keeps its part of every input alone (Korthikanti et al. 2205.05198, section 4.2.2). Autograd has saved
    views of the whole: it stays the same storage, empty in between. It is refilled through a view with a version
    counter of its own, since its values are what they were.
    """

    def __init__(self, drops: bool, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self._drops = drops and torch.is_grad_enabled()
        self._ticket: Ticket | None = None
        self._arriving: list[tuple[int, int, Tensor, Ticket]] = []  # parts under way: (start, stop, values, ticket)

    @property
    def line(self) -> Line:
        """The ranks that the input was gathered from."""
        return self._line

    @property
    def num_rows(self) -> int:
        """How many these are."""
        return self._line.degree

    @property
    def num_tokens(self) -> int:
        """Tokens of one of them, padded."""
        return self._whole.shape[1]

    @property
    def is_arriving(self) -> bool:
        """Whether parts of the input are still under way."""
        return bool(self._arriving)

    def start(self, whole: Tensor, x: Tensor, line: Line) -> None:
        """Begin to gather x (m, ...) into `whole` (n m, ...), part by part, each of all ranks."""
        self._line, self._whole = line, whole.view(line.degree, *x.shape)
        for start, stop in chunk_bounds(x.shape[0], self.num_chunks):
            part = x.new_empty((line.degree * (stop - start), *x.shape[1:]))
            self._arriving.append((start, stop, part, line.start_gather(part, x[start:stop])))

    def parts(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (start, stop, values of all ranks) as they arrive; they are in the whole input then."""
        for start, stop, part, ticket in self._arriving:
            self._line.wait(ticket)
            self._whole[:, start:stop] = part.view(self._line.degree, stop - start, *part.shape[1:])
            yield start, stop, part
        self._arriving = []

    def hold(self, whole: Tensor, x: Tensor) -> None:
        """Remember the input (n m, ...) and this rank's part of it, x (m, ...)."""
        if self._drops:
            self._part = x.detach()
            self._storage = whole.untyped_storage()
            self._num_bytes = self._storage.nbytes()
            self._again = torch.empty(0, dtype=whole.dtype, device=whole.device)
            self._again.set_(self._storage, 0, whole.shape, whole.stride())

    def drop(self) -> None:
        """Free the whole input: the region's forward is done."""
        if self._drops:
            self._storage.resize_(0)

    def refill(self, line: Line) -> None:
        """Begin to gather it again."""
        if self._drops:
            self._storage.resize_(self._num_bytes)
            self._ticket = line.start_gather(self._again, self._part)

    def await_refilled(self, line: Line) -> None:
        """Return when it is there; a region's first to ask waits."""
        if self._ticket is not None:
            line.wait(self._ticket)
            self._ticket = None


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line, entry: Entry) -> Tensor:
        ctx.line, ctx.entry = line, entry
        if entry.num_chunks == 1:
            whole = line.all_gather(x)
        else:
            whole = x.new_empty((line.degree * x.shape[0], *x.shape[1:]))
            entry.start(whole, x, line)
        entry.hold(whole, x)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.entry.await_refilled(ctx.line)
        return ctx.line.last_reduce_scatter(gradients[0]), None, None


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line, entry: Entry) -> Tensor:
        ctx.line, ctx.entry = line, entry
        entry.drop()
        return line.reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = ctx.line.all_gather(gradients[0])
        ctx.entry.refill(ctx.line)
        return gradient, None, None


class _Refilled(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, line: Line, entry: Entry) -> Tensor:
        ctx.line, ctx.entry = line, entry
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.entry.await_refilled(ctx.line)
        return gradients[0], None, None
