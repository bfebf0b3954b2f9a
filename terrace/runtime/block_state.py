"""Everything a rank keeps of one block, and the operations on it that instructions stand for.

A block has one shard for every set of ranks that hold the same parameters: one, unless the tensor axis leaves some of
its parameters whole. A message of the block is the messages of its shards, one after the other on one lane.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from terrace.comm import Between, Collectives, Meter
from terrace.model.spec import BlockSpec, ParamSpec
from terrace.plan import MessageClass, Plan
from terrace.plan.flats import FlatSpec
from terrace.runtime.flat import Initial
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.shard import Shard

Gradient = list[tuple[Shard, Tensor]]  # gradient buffers on their way to be reduced


class BlockState:
    """One block on one rank: its module and its shards."""

    def __init__(
        self,
        spec: BlockSpec,
        module: nn.Module,
        flats: Sequence[FlatSpec],
        rank: int,
        plan: Plan,
        device: torch.device,
        meter: Meter,
        is_copy: bool = False,
    ) -> None:
        self.spec = spec
        self.module = module
        layouts = {flat.layout.axes: flat.layout for flat in flats}
        members: dict[tuple[str, ...], list[ParamSpec]] = {axes: [] for axes in layouts}
        for flat in flats:
            members[flat.layout.axes] += flat.params
        whole = {flat.layout.axes: flat.num_orthogonal for flat in flats if flat.trainable}
        self.shards = [
            Shard(spec.name, layout, members[axes], rank, plan, device, meter, is_copy, whole.get(axes, 0))
            for axes, layout in layouts.items()
        ]

    @property
    def trainable(self) -> list[Shard]:
        """The shards that have something to train."""
        return [shard for shard in self.shards if shard.trainable is not None]

    def initialise(self, initial: Initial, config: OptimizerConfig) -> None:
        """Set the parameters and make the gradient and the optimizer state."""
        for shard in self.shards:
            shard.initialise(initial, config)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters this block owns; their values are there only while gathered."""
        for shard in self.shards:
            yield from shard.named_parameters()

    def gather(self, collectives: Collectives, message: MessageClass, secondary: bool) -> None:
        """Materialise the full parameters from the primary or the secondary copy."""
        for shard in self.shards:
            shard.gather(collectives, message, secondary)

    def free(self) -> None:
        """Drop the full parameters."""
        for shard in self.shards:
            shard.free()

    @property
    def needs_buffer(self) -> bool:
        """Whether a backward through this block's parameters needs a gradient buffer that is not there."""
        return any(shard.needs_buffer for shard in self.shards)

    def open_gradient(self) -> None:
        """Make gradient buffers in which the backwards to come add up."""
        for shard in self.shards:
            if shard.needs_buffer:
                shard.open_gradient()

    def take_gradient(self) -> Gradient:
        """Hand over the gradient buffers for `reduce` and then `release`; none when autograd added up in place."""
        taken = [(shard, shard.take_gradient()) for shard in self.shards]
        return [(shard, buffer) for shard, buffer in taken if buffer is not None]

    def reduce(self, collectives: Collectives, gradient: Gradient) -> None:
        """Reduce one unit's gradient to the grads tier and add it up."""
        for shard, buffer in gradient:
            shard.reduce(collectives, buffer)

    def release(self, gradient: Gradient) -> None:
        """Count reduced gradient buffers as gone; the caller drops them."""
        for shard, buffer in gradient:
            shard.release(buffer)

    def tie(self, between: Between, stage: int) -> None:
        """Add the accumulated gradient that another stage has of this block."""
        for shard in self.trainable:
            shard.tie(between, stage)

    def sync(self, collectives: Collectives) -> None:
        """Finish the accumulated gradient: what this rank owns of it becomes the sum over all ranks."""
        for shard in self.trainable:
            shard.sync(collectives)

    def owned(self) -> Iterator[tuple[Tensor, bool]]:
        """Yield the parts of the gradient that this rank's optimizer updates, and whether their norm counts here."""
        for shard in self.trainable:
            if shard.owned.numel():
                yield shard.owned, shard.counts

    def prepare_directions(self, scale: Tensor) -> None:
        """Scale the gradient and make what the optimizer needs of whole matrices, on this rank."""
        for shard in self.trainable:
            shard.prepare_directions(scale)

    def gather_directions(self, collectives: Collectives) -> None:
        """Bring it from the ranks of the optimizer tier."""
        for shard in self.trainable:
            shard.gather_directions(collectives)

    def update(self, scale: Tensor, lr: float) -> None:
        """Scale the gradient, step the optimizer, round the new parameters into the working copy."""
        for shard in self.trainable:
            shard.update(scale, lr)

    def publish(self) -> None:
        """Round the master parameters into this rank's part of the working copy."""
        for shard in self.trainable:
            shard.publish()

    def refresh(self, collectives: Collectives) -> None:
        """Bring the new parameters of the other ranks into the working copy."""
        for shard in self.trainable:
            shard.refresh(collectives)
