"""What a rank keeps of the parameters of one block that the same ranks hold."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from terrace.comm import Between, Collectives, Meter, Origin
from terrace.comm.collectives import DTYPES
from terrace.model.spec import ParamSpec
from terrace.plan import Layout, MessageClass, Plan
from terrace.plan.layout import DEVICE
from terrace.plan.memory import accumulates_in_place, keeps_master
from terrace.runtime.flat import Flat, Initial
from terrace.runtime.muon import ShardedMuon
from terrace.runtime.optimizer import Optimizer, make_optimizer
from terrace.runtime.settings import OptimizerConfig


class Shard:
    """Flat buffers of one block that the same ranks hold, with accumulated gradient and optimizer state.

    `grads` is the accumulated gradient, sharded on the grads tier, in the master dtype. `owned` is the
    part of it that this rank's optimizer updates. A gradient buffer in the compute dtype exists only from
    a block's backward to its reduction, unless gradients can be added up in `grads` itself.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        params: Sequence[ParamSpec],
        rank: int,
        plan: Plan,
        device: torch.device,
        meter: Meter,
        is_copy: bool = False,
        num_orthogonal: int = 0,
    ) -> None:
        self.name = name
        self.layout = layout
        self.is_copy = is_copy  # of a block that another stage owns
        self._num_orthogonal = num_orthogonal  # elements of matrices that the optimizer updates as wholes
        self._directions: Tensor | None = None  # of them, gathered from ORTHOGONALISE to UPDATE
        self._meter = meter
        self._origin = Origin(name, layout, device, meter)
        self._master_dtype = DTYPES[plan.master]
        self._keeps_master = keeps_master(plan, layout)
        self._in_place = accumulates_in_place(plan, layout)

        self.coordinates = layout.coordinates(rank)

        def flat(specs: Sequence[ParamSpec]) -> Flat | None:
            return Flat(specs, layout, self.coordinates, DTYPES[plan.compute], device, meter) if specs else None

        self.trainable = flat([param for param in params if param.trainable and param.numel])
        self.fixed = flat([param for param in params if not (param.trainable and param.numel)])
        self.flats = [part for part in (self.trainable, self.fixed) if part is not None]
        self._buffer: Tensor | None = None
        self._is_fresh = True  # nothing of this step is in `grads` yet
        self.grads = torch.empty(0)
        self.owned = torch.empty(0)
        self.optimizer: Optimizer | None = None

    def initialise(self, initial: Initial, config: OptimizerConfig) -> None:
        """Set the parameters and make the gradient and the optimizer state."""
        if self.fixed is not None:
            self.fixed.fill(initial)
        if self.trainable is not None:
            self._make_optimizer(self.trainable, self.trainable.fill(initial), config)
        for flat in self.flats:
            self._meter.add("params", flat.shard.nbytes)
            self._meter.add("secondary", flat.secondary.nbytes if flat.secondary is not None else 0)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters this block owns; their values are there only while gathered."""
        for flat in self.flats:
            for spec, parameter in zip(flat.specs, flat.parameters, strict=True):
                yield spec.name, parameter

    def gather(self, collectives: Collectives, message: MessageClass, secondary: bool) -> None:
        """Materialise the full parameters from the primary or the secondary copy."""
        layout = self.layout
        source = layout.params_backward if secondary else layout.params
        for flat in self.flats:
            flat.materialise()
            # Where another shard of the block has a secondary copy and this one has not, both are one slice.
            copy = flat.secondary if secondary and flat.secondary is not None else flat.shard
            flat.full[flat.part(source)].copy_(copy)

            def piece(tier: int, flat: Flat = flat) -> Tensor:
                return flat.full[flat.part(tier)]

            collectives.gather(message, piece, source, DEVICE, self._origin)
            if flat.secondary is not None and not secondary:
                flat.secondary.copy_(piece(layout.params_backward))

    def free(self) -> None:
        """Drop the full parameters."""
        for flat in self.flats:
            flat.free()

    @property
    def counts(self) -> bool:
        """Whether this rank is the first of those with the same gradient, so that its norm is to be counted."""
        return not self.is_copy and not any(self.coordinates[self.layout.optimizer + 1 :])

    @property
    def needs_buffer(self) -> bool:
        """Whether a backward through this block's parameters needs a gradient buffer that is not there."""
        return self.trainable is not None and not self._in_place and self._buffer is None

    def open_gradient(self) -> None:
        """Make a gradient buffer in which the backwards to come add up."""
        assert self.trainable is not None, f"block {self.name} has nothing to train"
        self._buffer = torch.empty_like(self.trainable.full, memory_format=torch.contiguous_format)
        self._meter.add("grads_full", self._buffer.nbytes)
        self.trainable.collect_gradients_in(self._buffer)

    def take_gradient(self) -> Tensor | None:
        """Hand over the gradient buffer for `reduce` and then `release`; None when it was added up in place."""
        buffer, self._buffer = self._buffer, None
        if self.trainable is not None:
            if buffer is not None:
                self.trainable.drop_gradients()
            else:
                self.trainable.complete_gradients()
        return buffer

    def reduce(self, collectives: Collectives, buffer: Tensor) -> None:
        """Reduce one micro-batch's gradient to the grads tier and add it up."""
        result = collectives.reduce(MessageClass.REDUCE, buffer, DEVICE, self.layout.grads, self._origin)
        if self._is_fresh:
            self.grads.copy_(result)
        else:
            self.grads.add_(result)
        self._is_fresh = False

    def tie(self, between: Between, stage: int) -> None:
        """Add the accumulated gradient of the same slice on another stage. The same bits on both."""
        theirs = torch.empty_like(self.grads)
        self._meter.add("buffers", theirs.nbytes)
        tickets = between.send(MessageClass.TIE, self.grads, stage), between.receive(theirs, stage)
        for ticket in tickets:
            ticket.wait()
        self.grads.add_(theirs)
        self._meter.add("buffers", -theirs.nbytes)

    def release(self, buffer: Tensor) -> None:
        """Count a reduced gradient buffer as gone; the caller drops it."""
        self._meter.add("grads_full", -buffer.nbytes)

    def sync(self, collectives: Collectives) -> None:
        """Finish the accumulated gradient: `owned` becomes the sum over all ranks."""
        flat, layout = self.trainable, self.layout
        assert flat is not None, f"block {self.name} has nothing to train"

        def piece(tier: int) -> Tensor:
            return self.grads[flat.part_within(tier, layout.grads)]

        total = collectives.reduce(MessageClass.SYNC, self.grads, layout.grads, layout.outermost, self._origin)
        if total is not self.grads:
            piece(layout.outermost).copy_(total)
        collectives.gather(MessageClass.SYNC, piece, layout.outermost, layout.optimizer, self._origin)

    def prepare_directions(self, scale: Tensor) -> None:
        """Scale the gradient and put in its place what Muon orthogonalises; make room for whole matrices."""
        flat, optimizer = self.trainable, self.optimizer
        if flat is None or not isinstance(optimizer, ShardedMuon):
            return
        self.owned.mul_(scale.to(self.owned.dtype))
        optimizer.prepare()
        if self.layout.span(self.layout.optimizer) > 1:
            self._directions = torch.empty_like(flat.full, memory_format=torch.contiguous_format)
            self._meter.add("buffers", self._directions.nbytes)
            self._directions[flat.part(self.layout.optimizer)] = self.owned

    def gather_directions(self, collectives: Collectives) -> None:
        """Bring what the other ranks have prepared."""
        flat, directions = self.trainable, self._directions
        if flat is None or directions is None:
            return

        def piece(tier: int) -> Tensor:
            return directions[flat.part(tier)]

        collectives.gather(MessageClass.ORTHOGONALISE, piece, self.layout.optimizer, DEVICE, self._origin)

    def update(self, scale: Tensor, lr: float) -> None:
        """Scale the gradient, step the optimizer, round the new parameters into the working copy."""
        flat = self.trainable
        assert flat is not None, f"block {self.name} has nothing to train"
        assert self.optimizer is not None, f"block {self.name} is not initialised"
        if not self._num_orthogonal:
            self.owned.mul_(scale.to(self.owned.dtype))
        self.optimizer.update(lr, self._directions)
        if self._directions is not None:
            self._meter.add("buffers", -self._directions.nbytes)
            self._directions = None
        if self._in_place:
            flat.collect_gradients_in(self.grads)  # the next step's
        self._is_fresh = True
        self.publish()

    def publish(self) -> None:
        """Round the master parameters into this rank's part of the working copy."""
        if self._keeps_master and self.trainable is not None and self.optimizer is not None:
            flat = self.trainable
            flat.shard[flat.part_within(self.layout.optimizer, self.layout.params)].copy_(self.optimizer.master)

    def refresh(self, collectives: Collectives) -> None:
        """Bring the new parameters of the other ranks into the working copy."""
        flat, layout = self.trainable, self.layout
        assert flat is not None, f"block {self.name} has nothing to train"

        def piece(tier: int) -> Tensor:
            return flat.shard[flat.part_within(tier, layout.params)]

        collectives.gather(MessageClass.REFRESH, piece, layout.optimizer, layout.params, self._origin)

    def _make_optimizer(self, flat: Flat, values: Tensor, config: OptimizerConfig) -> None:
        layout = self.layout
        self.grads = torch.zeros(
            flat.padded // layout.span(layout.grads), dtype=self._master_dtype, device=flat.full.device
        )
        self.owned = self.grads[flat.part_within(layout.optimizer, layout.grads)]
        if self._keeps_master:
            master = values.to(device=flat.full.device, dtype=self._master_dtype)
        else:
            master = flat.shard[flat.part_within(layout.optimizer, layout.params)]
        self.optimizer = make_optimizer(
            master,
            self.owned,
            flat.part(layout.optimizer).start,
            [extent for extent in flat.extents() if extent[2] <= self._num_orthogonal],
            flat.num_decayed,
            config,
            flat.full.dtype,
        )
        self._meter.add("grads", self.grads.nbytes)
        self._meter.add("optimizer", self.optimizer.nbytes + (master.nbytes if self._keeps_master else 0))
        if self._in_place:
            flat.collect_gradients_in(self.grads)
