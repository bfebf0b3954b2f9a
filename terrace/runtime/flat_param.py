"""Flat parameters: parameters of a block in one storage, of which each rank keeps a shard.

The module's parameters are views of the storage. Freeing releases its memory and gathering refills the *same* storage
(terrace.runtime.pages), so tensors saved by autograd see the values. Views are made with `set_`: slices would share a
version counter, and a refill would look like an illegal in-place change.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from terrace.comm.collectives import DTYPES, Collectives, Piece
from terrace.comm.ledger import Meter
from terrace.comm.rounding import Origin
from terrace.comm.stage_p2p import StageP2P
from terrace.model.params import ParamSpec
from terrace.plan.flats import FlatParamSpec
from terrace.plan.gaps import slices_of
from terrace.plan.plan import Plan
from terrace.plan.state_bytes import accumulates_in_place, keeps_master
from terrace.plan.wire import MessageClass
from terrace.program.message import Transfer
from terrace.runtime.gradients import GradientViews
from terrace.runtime.matrix_codes import MatrixCodes
from terrace.runtime.muon import ShardedMuon
from terrace.runtime.noise import Noise
from terrace.runtime.optimizer import NoOptimizer, Optimizer, make_optimizer
from terrace.runtime.outer_state import OuterState
from terrace.runtime.pages import Pages
from terrace.runtime.scaling import Scaling
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.stored import Storage

Initial = Callable[[ParamSpec], Tensor]


class FlatParam:
    """One flat buffer of a block on one rank: its parameters, their gradient and optimizer state.

    `full` is the padded buffer of all elements (no memory while freed), `shard` this rank's slice on the params tier,
    `secondary` its slice on the params_backward tier, if any; a slice of everything is `full` itself. Matrices come
    first: they take weight decay. If trainable, `grads` is the accumulated gradient in `plan.sums`, sharded on the
    grads tier, and `owned` the slice of it that the optimizer updates. A separate gradient buffer exists only from a
    block's backward to its reduction, and not if gradients accumulate in `grads`.
    """

    def __init__(
        self,
        name: str,
        spec: FlatParamSpec,
        rank: int,
        plan: Plan,
        device: torch.device,
        meter: Meter,
        *,
        pages: Pages | None = None,
        is_copy: bool = False,
        scaling: Scaling | None = None,
    ) -> None:
        """Allocate the buffers of block `name`; `is_copy` says that another stage owns the block.

        `pages` provides the memory of buffers that come and go, `scaling` the format of products that run in 8 bits.
        """
        layout = self.layout = spec.layout
        self.name, self.spec, self.is_copy = name, spec, is_copy
        self.coordinates = layout.coordinates(rank)
        self.padded = spec.padded
        self.extents: list[tuple[ParamSpec, int, int]] = []  # (parameter, start, stop) in the buffer
        start = 0
        for param in spec.params:
            self.extents.append((param, start, start + param.numel))
            start += param.numel
        self._meter = meter
        self.origin = Origin(name, device, meter)
        self._plan = plan
        self._keeps_master = keeps_master(plan, layout, coded=spec.is_coded)
        self._in_place = accumulates_in_place(layout)
        self._pages = pages or Pages()
        make = self._pages.make if layout.frees else torch.empty
        self.full = make(self.padded, dtype=DTYPES[spec.dtype(plan)], device=device)
        self._values = DTYPES[plan.compute] if spec.is_coded else self.full.dtype  # of gradients and momentum
        self.codes: MatrixCodes | None = None
        if spec.is_coded:
            assert scaling is not None, "codes are those of products"
            self.codes = MatrixCodes([each[1:] for each in self.extents], scaling.values, self._values, device)
        self._magnitudes = torch.empty(0)
        self.parameters = self._make_parameters()  # before the storage is emptied: `set_` would grow it again
        self.gradients = GradientViews(self.parameters, [(start, stop) for _, start, stop in self.extents])
        # The full storage stays empty until gathered.
        if layout.frees:
            self._pages.give(self.full)
        self.shard = self._zeros(layout.params) if layout.gathers else self.full
        self.secondary: Tensor | None = None
        if layout.has_secondary:
            self.secondary = self._zeros(layout.params_backward) if layout.frees else self.full
        self._buffer: Tensor | None = None
        self._spare: list[Tensor] = []  # gradient buffers without memory
        self._is_fresh = True  # `grads` holds nothing of this step yet
        self.outer_states: list[OuterState] = []  # of the slice that the optimizer owns, where there are islands
        self._muon_momentum: Tensor | None = None  # gathered, from ORTHOGONALISE to UPDATE
        self.grads = torch.empty(0)
        self.owned = torch.empty(0)
        self.optimizer: Optimizer = NoOptimizer()

    def initialise(self, initial: Initial, config: OptimizerConfig, noise: Noise | None = None) -> None:
        """Set the parameters from `initial`; allocate gradient and optimizer state if trainable.

        `noise` rounds bf16 states. Temporarily holds the whole buffer on the CPU.
        """
        # In fp32 at least, so that the master copy is not rounded through the compute dtype.
        values = torch.zeros(self.padded, dtype=torch.float64 if self._values == torch.float64 else torch.float32)
        for spec, start, stop in self.extents:
            values[start:stop] = initial(spec).reshape(-1)
        if self.codes is not None:
            own = values[self.part(self.layout.params)].to(self.full.device)
            self._encode(self.codes, own, self.layout.params, self.codes.magnitudes(values, 0))
        else:
            self.shard.copy_(values[self.part(self.layout.params)])
        if self.spec.trainable:
            values = values[self.part(self.layout.optimizer)].clone()
            self._make_optimizer(values, config, noise)
        self._meter.add("params", self.shard.nbytes)
        self._meter.add("secondary", self.secondary.nbytes if self.secondary is not None else 0)
        self._meter.add("outer", sum(each.nbytes for each in self.outer_states))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters by name. They have values only while gathered."""
        for spec, parameter in zip(self.spec.params, self.parameters, strict=True):
            yield spec.name, parameter

    def part(self, tier: int) -> slice:
        """This rank's slice of the buffer for a state placed on `tier`."""
        return self.layout.slice(tier, self.coordinates, self.padded)

    def part_within(self, tier: int, base: int, numel: int | None = None) -> slice:
        """The same slice, relative to the slice of an inner tier `base`; of a buffer of `numel` elements, if given."""
        # A slice on an outer tier lies inside the slice on an inner one.
        inner, outer = (self.layout.slice(each, self.coordinates, numel or self.padded) for each in (base, tier))
        return slice(outer.start - inner.start, outer.stop - inner.start)

    def is_first(self, tier: int) -> bool:
        """Whether this rank is the first of its island's ranks that hold the same slice of a state on `tier`."""
        return not self.is_copy and not any(self.coordinates[tier + 1 : self.layout.island + 1])

    def gather(self, collectives: Collectives, transfer: Transfer, secondary: bool) -> None:
        """Materialise the full parameters from the primary or the secondary copy."""
        layout = self.layout
        if layout.frees:
            self.materialise()
        # Where another buffer of the block has a secondary copy and this one has none, both copies are one slice.
        copy = self.secondary if secondary and self.secondary is not None else self.shard
        source = layout.params_backward if secondary else layout.params
        self._full_piece(source).copy_(copy)
        collectives.gather(transfer, self._full_piece, self.origin)
        # The first gather of a step refreshes the secondary copy for the later ones.
        if self.secondary is not None and self.secondary is not self.full and not secondary:
            self.secondary.copy_(self._full_piece(layout.params_backward))

    def materialise(self) -> None:
        """Allocate the full buffer, uninitialised."""
        self._meter.add("gathered", self.full.nbytes)
        self._pages.fill(self.full)

    def free(self) -> None:
        """Release the full parameters, unless the layout keeps them."""
        if not self.layout.frees:
            return
        self._pages.give(self.full)
        self._meter.add("gathered", -self.full.nbytes)

    @property
    def has_buffer(self) -> bool:
        """Whether a backward through these parameters needs a gradient buffer."""
        return self.spec.trainable and not self._in_place

    @property
    def is_open(self) -> bool:
        """Whether a gradient buffer is allocated."""
        return self._buffer is not None

    def open_gradient(self) -> None:
        """Allocate a buffer that accumulates the gradients of the following backwards."""
        assert self.spec.trainable, f"block {self.name} has nothing to train"
        # One may still be reduced while the next is opened.
        device = self.full.device
        self._buffer = self._spare.pop() if self._spare else self._pages.make(self.padded, self._values, device)
        self._pages.fill(self._buffer)
        self._meter.add("grads_full", self._buffer.nbytes)
        self.gradients.open(self._buffer)

    def take_gradient(self) -> Tensor | None:
        """Return the gradient buffer, to be reduced and then released; None if gradients accumulate in `grads`."""
        # Ownership moves to the lane: the next backward opens a new buffer.
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self.gradients.close()
        else:
            self.gradients.fill_missing()
        return buffer

    def reduce(self, collectives: Collectives, transfer: Transfer, buffer: Tensor) -> None:
        """Reduce the gradient of one unit of micro-batches to the grads tier and accumulate it."""
        source, target = self._columns(buffer, transfer), self._columns(self.grads, transfer)
        result = collectives.reduce(transfer, source, self.origin).view_as(target)
        # Copying spares a pass that would zero `grads`.
        if self._is_fresh:
            target.copy_(result)
        else:
            target.add_(result)
        self._is_fresh &= transfer.columns is not None and transfer.columns[1] < self.padded // slices_of(self.layout)

    def release(self, buffer: Tensor) -> None:
        """Free the memory of a reduced gradient buffer. The caller drops its reference."""
        self._pages.give(buffer)
        self._spare.append(buffer)
        self._meter.add("grads_full", -buffer.nbytes)

    def tie(self, stages: StageP2P, stage: int) -> None:
        """Add another stage's accumulated gradient of the same slice. Both stages end with the same bits."""
        theirs = torch.empty_like(self.grads)
        self._meter.add("buffers", theirs.nbytes)
        # Both directions are posted before either is waited for, or the two stages would block each other.
        tickets = stages.send(MessageClass.TIE, self.grads, stage), stages.receive(theirs, stage)
        for ticket in tickets:
            ticket.wait()
        self.grads.add_(theirs)
        self._meter.add("buffers", -theirs.nbytes)

    def sync(self, collectives: Collectives, transfer: Transfer) -> None:
        """Finish the accumulated gradient: `owned` becomes the sum over all ranks."""
        layout = self.layout

        def piece(tier: int) -> Tensor:
            return self.grads[self.part_within(tier, layout.grads)]

        if transfer.columns is not None:
            self._sync_columns(collectives, transfer, piece)
            return
        total = collectives.reduce(transfer, self.grads, self.origin)
        # Without a tier to reduce over, the result is `grads` itself.
        if total is not self.grads:
            piece(transfer.reduced_to(layout.island)).copy_(total)
        collectives.gather(transfer, piece, self.origin)

    def _sync_columns(self, collectives: Collectives, transfer: Transfer, piece: Piece) -> None:
        layout, (start, stop) = self.layout, transfer.columns or (0, 0)
        total = collectives.reduce(transfer, self._columns(self.grads, transfer), self.origin)
        summed = self._columns(piece(transfer.reduced_to(layout.island)), transfer)
        summed.copy_(total.view(summed.shape))
        numel = (stop - start) * slices_of(layout)

        def own(tier: int) -> slice:
            return self.part_within(tier, layout.optimizer, numel)

        collectives.gather_columns(transfer, self._columns(piece(layout.optimizer), transfer), own, self.origin)

    def _columns(self, values: Tensor, transfer: Transfer) -> Tensor:
        """The columns of `values`, a slice of the buffer, in a transfer: (slices, columns), or `values` for all."""
        if transfer.columns is None:
            return values
        return values.view(-1, self.padded // slices_of(self.layout))[:, slice(*transfer.columns)]

    def end_gradients(self, *, undo: bool) -> None:
        """Commit the rounding residuals of a step's gradients; with `undo`, restore them and drop the gradients."""
        if not self.spec.trainable:
            return
        if not undo:
            self.origin.keep()
            return
        self.origin.undo()
        self._begin_gradients()

    def _begin_gradients(self) -> None:
        if self._in_place:
            self.gradients.open(self.grads)
        self._is_fresh = True

    def prepare_muon_momentum(self, scale: Tensor) -> None:
        """Replace the gradient by the scaled matrix for Muon, and allocate the buffer that gathers whole matrices."""
        optimizer = self.optimizer
        if not isinstance(optimizer, ShardedMuon):
            return
        self.owned.mul_(scale.to(self.owned.dtype))
        optimizer.prepare()
        # A slice that is the whole buffer needs no gather.
        if self.layout.span(self.layout.optimizer) > 1:
            self._muon_momentum = torch.empty(self.padded, dtype=self._values, device=self.full.device)
            self._meter.add("buffers", self._muon_momentum.nbytes)
            # The other ranks' slices arrive by the gather.
            self._muon_momentum[self.part(self.layout.optimizer)] = self.owned

    def gather_muon_momentum(self, collectives: Collectives, transfer: Transfer) -> None:
        """Gather the momentum over the ranks of the optimizer tier."""
        momentum = self._muon_momentum
        if momentum is None:
            return
        collectives.gather(transfer, lambda tier: momentum[self.part(tier)], self.origin)

    def update(self, scale: Tensor, lr: float) -> None:
        """Scale the gradient and step the optimizer. The working copy is stale until refreshed."""
        # Under Muon the gradient was scaled before ORTHOGONALISE.
        if not self.spec.num_orthogonal:
            self.owned.mul_(scale.to(self.owned.dtype))
        self.optimizer.update(lr, self._muon_momentum)
        # The gathered momentum is scratch memory of this update only.
        if self._muon_momentum is not None:
            self._meter.add("buffers", -self._muon_momentum.nbytes)
            self._muon_momentum = None
        self._begin_gradients()  # of the next step

    @property
    def outer_state(self) -> OuterState:
        """Outer optimizer state of this rank's slice. Only under a plan with islands."""
        (found,) = self.outer_states
        return found

    def exchange(self, collectives: Collectives, transfer: Transfer, weight: Tensor) -> None:
        """Replace the change of this island's parameters by its mean over islands."""
        layout = self.layout

        def part(tier: int) -> slice:
            return self.part_within(tier, layout.optimizer)

        inner, outermost = layout.tier_of("island"), layout.outermost
        self.outer_state.exchange(collectives, transfer, part, weight, inner=inner, outermost=outermost)

    def publish(self) -> None:
        """Round the masters into this rank's slice of the working copy; 8-bit codes first need their scales."""
        if not self.spec.trainable:
            return
        if self.codes is not None:
            master, tier = self.optimizer.master, self.layout.optimizer
            self._magnitudes = self.codes.magnitudes(master, self.part(tier).start)
            if self.layout.span(tier) == 1:  # whole matrices: no message follows
                self._encode(self.codes, master, tier, self._magnitudes)
        elif self._keeps_master:
            self._shard_piece(self.layout.optimizer).copy_(self.optimizer.master)

    def refresh(self, collectives: Collectives, transfer: Transfer) -> None:
        """Gather the other ranks' new parameters into the working copy."""
        if self.codes is not None and self.spec.trainable:
            largest = collectives.largest(transfer, self._magnitudes)
            self._encode(self.codes, self.optimizer.master, self.layout.optimizer, largest)
        collectives.gather(transfer, self._shard_piece, self.origin)

    def _encode(self, codes: MatrixCodes, values: Tensor, tier: int, largest: Tensor) -> None:
        codes.settle(largest)
        codes.encode(values, self.part(tier).start, self._shard_piece(tier))

    def _full_piece(self, tier: int) -> Tensor:
        return self.full[self.part(tier)]

    def _shard_piece(self, tier: int) -> Tensor:
        return self.shard[self.part_within(tier, self.layout.params)]

    def _make_optimizer(self, values: Tensor, config: OptimizerConfig, noise: Noise | None) -> None:
        layout, device, sums = self.layout, self.full.device, DTYPES[self._plan.sums]
        self.grads = torch.zeros(self.padded // layout.span(layout.grads), dtype=sums, device=device)
        self.owned = self.grads[self.part_within(layout.optimizer, layout.grads)]
        if self._keeps_master:
            master = values.to(device=device, dtype=DTYPES[self._plan.master])
        else:
            master = self._shard_piece(layout.optimizer)
        self.optimizer = make_optimizer(
            master,
            self.owned,
            self.part(layout.optimizer).start,
            self.spec.orthogonal,
            sum(spec.numel for spec in self.spec.params if spec.decays),
            config,
            self._values,
            Storage(sums, self._plan.optimizer_states, noise),
        )
        if self._plan.outer.has_islands:
            origin = Origin(self.name, device, self._meter)
            self.outer_states = [OuterState(self._plan.outer, master, self.owned, origin)]
        self._meter.add("grads", self.grads.nbytes)
        self._meter.add("optimizer", self.optimizer.nbytes + (master.nbytes if self._keeps_master else 0))
        if self._in_place:
            self.gradients.open(self.grads)

    def _make_parameters(self) -> list[nn.Parameter]:
        parameters = []
        for spec, start, _ in self.extents:
            view = torch.empty(0, dtype=self.codes.dtype if self.codes else self.full.dtype, device=self.full.device)
            stride = torch.empty(spec.shape, device="meta").stride()
            # `set_` gives each view its own version counter; see the module's docstring.
            view.set_(self.full.untyped_storage(), start, spec.shape, stride)
            parameters.append(nn.Parameter(view, requires_grad=spec.trainable))
        return parameters

    def _zeros(self, tier: int) -> Tensor:
        size = self.padded // self.layout.span(tier)
        return torch.zeros(size, dtype=self.full.dtype, device=self.full.device)
