"""The gradient of a flat parameter, from the backwards of its block to the update.

    open      a buffer of all elements, in which the backwards of one unit of micro-batches add up
    take      hands that buffer to a lane
    reduce    sums it over ranks down to the grads tier, and adds the result to the accumulated gradient
    release   takes the buffer's memory back
    tie       adds the accumulated gradient of another stage that holds the same block
    sync      sums the accumulated gradient over the ranks of outer tiers

Without a tier to reduce over, backwards add to the accumulated gradient itself, and the first four steps fall away.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from terrace.comm.collectives import Collectives, Piece
from terrace.comm.lane import Ticket
from terrace.comm.ledger import Meter
from terrace.comm.rounding import Origin
from terrace.comm.stage_p2p import StageP2P
from terrace.plan.gaps import slices_of
from terrace.plan.state_bytes import accumulates_in_place
from terrace.plan.wire import MessageClass
from terrace.program.message import Transfer
from terrace.runtime.flat_slices import RankSlices
from terrace.runtime.gradients import GradientViews
from terrace.runtime.kept.offloaded import Offloaded
from terrace.runtime.kept.whole import Whole
from terrace.runtime.norm import squared_norm
from terrace.runtime.pages import Pages


def _ignore(gradient: Tensor) -> None:
    """Do nothing."""


class FlatGradient:
    """The gradient of one flat buffer on one rank.

    `views` are the gradients of its `parameters` in the buffer that is open. `accumulated` is the sum over a step's
    micro-batches, sharded on the grads tier, and `owned` the slice of it that the optimizer updates; both are empty
    before `allocate`. `dtype` is that of the buffer that is reduced, `origin` that of its messages. `resting` has the
    accumulated gradient if it is kept below the device (docs/offload.md): then it has memory on the device only from
    `open_resting` to `evict`, and from its read to the end of its update. `observe` is called with each micro-batch's
    gradient that is added without a buffer (terrace.runtime.table_param).
    """

    def __init__(
        self,
        slices: RankSlices,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        device: torch.device,
        pages: Pages,
        meter: Meter,
        origin: Origin,
    ) -> None:
        self._slices, self._dtype, self._device = slices, dtype, device
        self._pages, self._meter, self._origin = pages, meter, origin
        self.views = GradientViews(parameters, [(start, stop) for _, start, stop in slices.spec.extents])
        self._width = slices.padded // slices_of(slices.layout)  # columns of the buffer, of which a transfer has some
        self._in_place = accumulates_in_place(slices.layout)
        self._buffers: list[Tensor] = []  # the one that is open
        self._spare: list[Tensor] = []  # without memory
        self._is_fresh = True  # `accumulated` holds nothing of this step yet
        self.accumulated, self.owned, self._squares = torch.empty(0), torch.empty(0), torch.empty(0)
        self._is_noted = False  # whether `_squares` stand for a gradient that is gone, or scaled, when CLIP reads it
        self.resting: list[Offloaded] = []
        self.observe: Callable[[Tensor], None] = _ignore

    def allocate(self, dtype: torch.dtype, below: Sequence[Whole] = ()) -> None:
        """Allocate the accumulated gradient with zeros, and begin the first step. `below` has it if kept below."""
        slices, layout = self._slices, self._slices.layout
        size = slices.padded // layout.span(layout.grads)
        make = self._pages.make if below else torch.zeros
        self.accumulated = make(size, dtype=dtype, device=self._device)
        self.owned = self.accumulated[slices.part_within(layout.optimizer, layout.grads)]
        self.resting = [
            Offloaded(self.accumulated, self.owned, each, self._pages, self._meter, "grads") for each in below
        ]
        self._meter.add("grads", 0 if below else self.accumulated.nbytes)
        self.begin()

    def begin(self) -> None:
        if self._in_place and not self.resting:
            self.views.open(self.accumulated)
        self._is_fresh = True

    def open_resting(self) -> None:
        """Give memory on the device, for the backwards of a step, to a gradient that is kept below."""
        for each in self.resting:
            each.open(reads=False)
            if self._in_place:
                self.views.open(self.accumulated)

    def evict(self) -> Ticket:
        """Begin to write the complete gradient `owned` below the device; its memory is freed once it is written."""
        if self._in_place:
            self.views.close()
        self.note_norm()
        (resting,) = self.resting
        if (dtype := resting.whole.dtype) != self.owned.dtype:  # an element that is finite here may be inf there
            is_inf = torch.linalg.vector_norm(self.owned, math.inf) > torch.finfo(dtype).max
            self._squares = torch.where(is_inf, math.inf, self._squares)
        return resting.evict()

    def note_norm(self) -> None:
        """Compute `squared_norm` now, as long as the complete gradient is there."""
        self._squares, self._is_noted = squared_norm(self.owned), True

    @property
    def squared_norm(self) -> Tensor:
        """Squared norm of the complete gradient `owned`, fp64; computed by `note_norm` where it does not stay."""
        return self._squares if self._is_noted else squared_norm(self.owned)

    @property
    def has_elements(self) -> bool:
        return self.owned.numel() > 0

    @property
    def finite_witness(self) -> Tensor:
        """Numbers that are finite if the complete gradient is: `owned`, or its squared norm if it is kept below."""
        return self._squares.view(-1) if self._is_noted else self.owned

    @property
    def has_buffer(self) -> bool:
        """Whether a backward through these parameters needs a buffer of its own."""
        return self._slices.spec.trainable and not self._in_place

    @property
    def is_open(self) -> bool:
        return bool(self._buffers)

    def open(self) -> None:
        """Allocate a buffer that accumulates the gradients of the following backwards."""
        # One may still be reduced while the next is opened.
        buffer = self._spare.pop() if self._spare else self._pages.make(self._slices.padded, self._dtype, self._device)
        self._pages.fill(buffer)
        self._buffers.append(buffer)
        self._meter.add("grads_full", buffer.nbytes)
        self.views.open(buffer)

    def take(self) -> list[Tensor]:
        """The open buffer, to be reduced and then released; none if backwards add to the accumulated gradient."""
        # Ownership moves to the lane: the next backward opens a new buffer.
        taken, self._buffers = self._buffers, []
        if taken:
            self.views.close()
        else:
            self.views.fill_missing()
        return taken

    def reduce(self, collectives: Collectives, transfer: Transfer, buffer: Tensor) -> None:
        """Reduce the gradient of one unit of micro-batches to the grads tier and accumulate it."""
        source, target = self.columns(buffer, transfer), self.columns(self.accumulated, transfer)
        result = collectives.reduce(transfer, source, self._origin).view_as(target)
        # Copying spares a pass that would zero the sums.
        if self._is_fresh:
            target.copy_(result)
        else:
            target.add_(result)
        # A gradient that is sent in parts is fresh until its last part has arrived.
        _, last = transfer.columns or (0, self._width)
        self._is_fresh &= last < self._width

    def release(self, buffer: Tensor) -> None:
        """Free the memory of a reduced buffer. The caller drops its reference."""
        self._pages.give(buffer)
        self._spare.append(buffer)
        self._meter.add("grads_full", -buffer.nbytes)

    def tie(self, stages: StageP2P, stage: int) -> None:
        """Add another stage's accumulated gradient of the same slice. Both stages end with the same bits."""
        theirs = torch.empty_like(self.accumulated)
        self._meter.add("buffers", theirs.nbytes)
        # Both directions are posted before either is waited for, or the two stages would block each other.
        tickets = stages.send(MessageClass.TIE, self.accumulated, stage), stages.receive(theirs, stage)
        for ticket in tickets:
            ticket.wait()
        self.accumulated.add_(theirs)
        self._meter.add("buffers", -theirs.nbytes)

    def sync(self, collectives: Collectives, transfer: Transfer) -> None:
        """Finish the accumulated gradient: `owned` becomes the sum over all ranks."""
        layout = self._slices.layout

        def piece(tier: int) -> Tensor:
            return self.accumulated[self._slices.part_within(tier, layout.grads)]

        if transfer.columns is not None:
            self._sync_columns(collectives, transfer, transfer.columns, piece)
            return
        total = collectives.reduce(transfer, self.accumulated, self._origin)
        # Without a tier to reduce over, the result is the accumulated gradient itself.
        if total is not self.accumulated:
            piece(transfer.reduced_to(layout.island)).copy_(total)
        collectives.gather(transfer, piece, self._origin)

    def _sync_columns(
        self, collectives: Collectives, transfer: Transfer, columns: tuple[int, int], piece: Piece
    ) -> None:
        layout, (start, stop) = self._slices.layout, columns
        total = collectives.reduce(transfer, self.columns(self.accumulated, transfer), self._origin)
        summed = self.columns(piece(transfer.reduced_to(layout.island)), transfer)
        summed.copy_(total.view(summed.shape))
        numel = (stop - start) * slices_of(layout)

        def own(tier: int) -> slice:
            return self._slices.part_within(tier, layout.optimizer, numel)

        collectives.gather_columns(transfer, self.columns(piece(layout.optimizer), transfer), own, self._origin)

    def columns(self, values: Tensor, transfer: Transfer) -> Tensor:
        """The columns of `values`, a slice of the buffer, in a transfer: (slices, columns), or `values` for all."""
        if transfer.columns is None:
            return values
        return values.view(-1, self._width)[:, slice(*transfer.columns)]

    def end(self, *, undo: bool) -> None:
        """Commit the rounding residuals of a step's gradients; with `undo`, restore them and drop the gradients."""
        if not self._slices.spec.trainable:
            return
        if not undo:
            self._origin.keep()
            return
        self._origin.undo()
        self.begin()
