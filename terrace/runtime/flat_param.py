"""Flat parameters: parameters of a block in one storage, of which each rank keeps a shard.

The module's parameters are views of the storage. Freeing releases its memory and gathering refills the *same* storage
(terrace.runtime.pages), so tensors saved by autograd see the values. Views are made with `set_`: slices would share a
version counter, and a refill would look like an illegal in-place change.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from terrace.accelerator import HOST
from terrace.comm.collectives import DTYPES, Collectives
from terrace.comm.lane import DONE, Ticket
from terrace.comm.ledger import Meter
from terrace.comm.rounding import Origin
from terrace.model.params import ParamSpec
from terrace.plan.flats import FlatParamSpec
from terrace.plan.plan import Plan
from terrace.plan.state_bytes import keeps_master, rests_master
from terrace.program.message import Transfer
from terrace.runtime.flat_gradient import FlatGradient
from terrace.runtime.flat_slices import RankSlices
from terrace.runtime.kept.host_update import HostUpdate, Scale
from terrace.runtime.kept.offloaded import Offloaded, Resident
from terrace.runtime.kept.states import RESIDENT, Passages
from terrace.runtime.kept.whole import FrozenState
from terrace.runtime.matrix_codes import MatrixCodes
from terrace.runtime.noise import Noise
from terrace.runtime.optimizer import NoOptimizer, Optimizer, make_optimizer
from terrace.runtime.outer_state import OuterState
from terrace.runtime.pages import Pages
from terrace.runtime.pruned_blocks import NOT_PRUNED, PrunedBlocks, in_parts, penalty_gradient
from terrace.runtime.scaling import Scaling
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.stored import opened
from terrace.runtime.whole_matrices import ShardedMatrices

Initial = Callable[[ParamSpec], Tensor]


class FlatParam(RankSlices):
    """One flat buffer of a block on one rank: its parameters, their gradient and optimizer state.

    `full` is the padded buffer of all elements (no memory while freed), `shard` this rank's slice on the params tier,
    `secondary` its slice on the params_backward tier, if any; a slice of everything is `full` itself. Matrices come
    first: they take weight decay. If parameters are kept below the device, `shard` has memory on the device only from
    an update until it is written, and `resting` holds the one object that moves it.
    """

    # Of frozen matrices held in codes (terrace.runtime.coded_param): constants, and whether this rank stores them.
    constants: Sequence[Tensor] = ()
    holds_first = False

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
        super().__init__(spec, rank, is_copy=is_copy)
        layout = self.layout
        self.name, self._meter = name, meter
        self.origin = Origin(name, device, meter)
        self._plan = plan
        # A master copy that is kept below is rounded into the working copy as it is updated (terrace.runtime.kept).
        self._rests_master = rests_master(plan, spec)
        self._keeps_master = keeps_master(plan, layout, coded=spec.is_coded) and not self._rests_master
        self._pages = pages or Pages()
        self.full = self._make_full(DTYPES[spec.dtype(plan)], device)
        self._values = DTYPES[plan.compute] if spec.is_coded else self.full.dtype  # of gradients and gathered matrices
        self.codes: MatrixCodes | None = None
        if spec.is_coded:
            assert scaling is not None, "codes are those of products"
            self.codes = MatrixCodes([each[1:] for each in spec.extents], scaling.values, self._values, device)
        self._magnitudes = torch.empty(0)
        self.parameters = self._make_parameters()  # before the storage is emptied: `set_` would grow it again
        self.gradient = FlatGradient(self, self.parameters, self._values, device, self._pages, meter, self.origin)
        # The full storage stays empty until gathered.
        if layout.frees:
            self._pages.give(self.full)
        if layout.params_below:
            self.shard = self._pages.make(self.padded // layout.span(layout.params), self.full.dtype, device)
        else:
            self.shard = self._zeros(layout.params) if layout.gathers else self.full
        self.resting: list[Offloaded] = []
        self._on_host: list[HostUpdate] = []  # the one that updates this slice, if the host's cores do
        self.secondary: Tensor | None = None
        if layout.has_secondary:
            self.secondary = self._zeros(layout.params_backward) if layout.frees else self.full
        self.outer_states: list[OuterState] = []  # of the slice that the optimizer owns, where there are islands
        self._whole: Tensor | None = None  # gathered, from ORTHOGONALISE to UPDATE
        self.pruned: PrunedBlocks = NOT_PRUNED
        self.optimizer: Optimizer = NoOptimizer()

    def initialise(
        self, initial: Initial, config: OptimizerConfig, noise: Noise | None = None, below: Passages = RESIDENT
    ) -> None:
        """Set the parameters from `initial`; allocate gradient and optimizer state if trainable.

        `noise` rounds bf16 states, `below` are those kept below. Temporarily holds the whole buffer on the CPU.
        """
        self.resting = [
            Offloaded(self.shard, self.shard, each, self._pages, self._meter, "params") for each in below.params
        ]
        for resting in self.resting:
            resting.free_initial()
        # In fp32 at least, so that the master copy is not rounded through the compute dtype.
        values = torch.zeros(self.padded, dtype=torch.float64 if self._values == torch.float64 else torch.float32)
        for spec, start, stop in self.spec.extents:
            values[start:stop] = initial(spec).reshape(-1)
        with self.working.on_device(loads=False):
            if self.codes is not None:
                own = values[self.part(self.layout.params)].to(self.full.device)
                self._encode(self.codes, own, self.layout.params, self.codes.magnitudes(values, 0))
            else:
                self.shard.copy_(values[self.part(self.layout.params)])
            if self.spec.trainable:
                values = values[self.part(self.layout.optimizer)].clone()
                self._make_optimizer(values, config, noise, below)
            elif below.params:
                self.optimizer = NoOptimizer(FrozenState(below.params[0], self.shard))
        self._meter.add("params", 0 if below.params else self.shard.nbytes)
        self._meter.add("secondary", self.secondary.nbytes if self.secondary is not None else 0)
        self._meter.add("outer", sum(each.nbytes for each in self.outer_states))

    def stored_start(self, tier: int) -> int:
        """Where this rank's slice on `tier` begins in the buffer as it is stored."""
        return int(self.part(tier).start)

    def windows(self) -> Iterator[AbstractContextManager[None]]:
        """Contexts in which a checkpoint sets the states, a part of them at a time."""
        yield opened(self.optimizer.states)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters by name. They have values only while gathered."""
        for spec, parameter in zip(self.spec.params, self.parameters, strict=True):
            yield spec.name, parameter

    @property
    def working(self) -> Resident:
        """This rank's slice of the working copy, wherever it rests."""
        return next(iter(self.resting), Resident(self.shard))

    def fetch(self) -> Ticket:
        """Materialise the full parameters, and begin to read this rank's slice into them if it is kept below.

        Called before `gather`.
        """
        for each in self.resting:
            self.materialise()
            return each.whole.read(self._full_piece(self.layout.params))
        return DONE

    def gather(self, collectives: Collectives, transfer: Transfer, secondary: bool) -> None:
        """Materialise the full parameters from the primary or the secondary copy, or from what `fetch` has read."""
        layout = self.layout
        # Where another buffer of the block has a secondary copy and this one has none, both copies are one slice.
        copy = self.secondary if secondary and self.secondary is not None else self.shard
        source = layout.params_backward if secondary else layout.params
        if not self.resting:
            if layout.frees:
                self.materialise()
            self._full_piece(source).copy_(copy)
        collectives.gather(transfer, self._full_piece, self.origin)
        # The first gather of a step refreshes the secondary copy for the later ones.
        if self.secondary is not None and self.secondary is not self.full and not secondary:
            self.secondary.copy_(self._full_piece(layout.params_backward))
        self.pruned.zero_(self.full, self.optimizer.num_steps)

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

    def prepare_whole(self, scale: Tensor) -> None:
        """Prepare the gradient of matrices that are updated as wholes, and allocate the buffer that gathers it."""
        optimizer = self.optimizer
        if not isinstance(optimizer, ShardedMatrices):
            return
        self.gradient.owned.mul_(scale.to(self.gradient.owned.dtype))
        optimizer.prepare()
        # A slice that is the whole buffer needs no gather.
        if numel := self.spec.gathered_numel:
            self._whole = torch.empty(numel, dtype=self._values, device=self.full.device)
            self._meter.add("buffers", self._whole.nbytes)
            # The other ranks' slices arrive by the gather.
            own = self._whole[self.gathered_part(self.layout.outermost)]
            own[self.part(self.layout.optimizer)] = self.gradient.owned

    def gather_whole(self, collectives: Collectives, transfer: Transfer) -> None:
        """Gather the prepared gradient of whole matrices over the ranks of the optimizer tier, or of those that cut."""
        whole = self._whole
        if whole is None:
            return
        if transfer.ranks.joined == self.layout.joined:
            own = whole[self.gathered_part(self.layout.outermost)]
            collectives.gather(transfer, lambda tier: own[self.part(tier)], self.origin)
        else:
            collectives.gather(transfer, lambda tier: whole[self.gathered_part(tier)], self.origin)

    def update(self, scale: Tensor, lr: float) -> None:
        """Scale the gradient and step the optimizer. The working copy is stale until refreshed."""
        # The gradient of matrices that are updated as wholes was scaled before ORTHOGONALISE.
        if not self.spec.num_orthogonal:
            self.gradient.owned.mul_(scale.to(self.gradient.owned.dtype))
        self.optimizer.update(lr, self._whole)
        # The gathered gradient is scratch memory of this update only.
        if self._whole is not None:
            self._meter.add("buffers", -self._whole.nbytes)
            self._whole = None
        self.gradient.begin()  # of the next step

    def update_on_host(self, scale: Scale, lr: float) -> Ticket:
        """As `update`, on the host's cores; done when the working copy has this rank's new parameters."""
        (host,) = self._on_host
        optimizer, target = self.optimizer, self._shard_piece(self.layout.optimizer)
        # No backward adds to the gradient before it has waited for the update.
        self.gradient.begin()
        return host.submit(lambda: optimizer.update(lr), scale, target)

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

    def refreshed(self) -> None:
        """After REFRESH: set blocks of parameters that are not gathered to zero."""
        if not self.layout.gathers:
            self.pruned.zero_(self.full, self.optimizer.num_steps)

    @property
    def penalises(self) -> bool:
        """Whether backwards add the gradient of the penalty on blocks."""
        return self.pruned.penalises(self.optimizer.num_steps)

    @torch.no_grad()
    def add_penalty(self, scale: Tensor) -> None:
        """Add `scale` times the gradient of the penalty on blocks to the open gradient, while parameters are there."""
        for index, start, stop, shape in self.pruned.matrices:
            matrix, settings = self.full[start:stop].view(shape), self.pruned.settings
            view, is_new = self.gradient.views.gradient_of(self.parameters[index])
            for part in in_parts(matrix, settings.blocks):
                found = penalty_gradient(matrix[part], settings).mul_(scale)
                (view[part].copy_ if is_new else view[part].add_)(found)

    def _encode(self, codes: MatrixCodes, values: Tensor, tier: int, largest: Tensor) -> None:
        codes.settle(largest)
        codes.encode(values, self.part(tier).start, self._shard_piece(tier))

    def _full_piece(self, tier: int) -> Tensor:
        return self.full[self.part(tier)]

    def _shard_piece(self, tier: int) -> Tensor:
        return self.shard[self.part_within(tier, self.layout.params)]

    def _make_optimizer(self, values: Tensor, config: OptimizerConfig, noise: Noise | None, below: Passages) -> None:
        layout, device, sums = self.layout, self.full.device, DTYPES[self._plan.sums]

        def rounds(part: slice, values: Tensor) -> None:
            if any(each.takes(part, values) for each in self._on_host):
                return
            with self.working.on_device():
                self._shard_piece(layout.optimizer)[part].copy_(values)

        self.gradient.allocate(sums, below.grads)
        start, working = self.part(layout.optimizer).start, self._shard_piece(layout.optimizer)
        is_apart = self._keeps_master or self._rests_master
        self._on_host = [make(self.gradient.owned) for make in below.on_host]
        where = HOST if self._on_host else device
        master = values.to(device=where, dtype=DTYPES[self._plan.master]) if is_apart else working
        self.optimizer = make_optimizer(
            master,
            next((each.gradient for each in self._on_host), self.gradient.owned),
            start,
            [each._replace(name=f"{self.name}.{each.name}") for each in self.matrices()],
            sum(spec.numel for spec in self.spec.params if spec.decays),
            config,
            self._values,
            below.storage(sums, self._plan.optimizer_states, noise, rounds, start),
        )
        for resting in self.gradient.resting:
            resting.free_initial()
        if self._plan.outer.has_islands:
            origin = Origin(self.name, device, self._meter)
            self.outer_states = [OuterState(self._plan.outer, master, self.gradient.owned, origin)]
        self._meter.add("optimizer", self.optimizer.nbytes + (master.nbytes if self._keeps_master else 0))

    def _make_full(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        make = self._pages.make if self.layout.frees else torch.empty
        return make(self.padded, dtype=dtype, device=device)

    def _make_parameters(self) -> list[nn.Parameter]:
        parameters = []
        for spec, start, _ in self.spec.extents:
            view = torch.empty(0, dtype=self.codes.dtype if self.codes else self.full.dtype, device=self.full.device)
            stride = torch.empty(spec.shape, device="meta").stride()
            # `set_` gives each view its own version counter; see the module's docstring.
            view.set_(self.full.untyped_storage(), start, spec.shape, stride)
            parameters.append(nn.Parameter(view, requires_grad=spec.trainable))
        return parameters

    def _zeros(self, tier: int) -> Tensor:
        size = self.padded // self.layout.span(tier)
        return torch.zeros(size, dtype=self.full.dtype, device=self.full.device)
