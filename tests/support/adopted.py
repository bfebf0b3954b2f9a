"""A module whose parameters stand in flat buffers."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from terrace.comm.collectives import DTYPES
from terrace.comm.ledger import Meter
from terrace.model.grouped import grouped_linear
from terrace.plan.flats import FlatParamSpec
from terrace.plan.layout import Layout
from terrace.plan.presets import preset
from terrace.runtime.describe import describe, replace_parameters
from terrace.runtime.flat_param import FlatParam
from terrace.runtime.linear import WeightGradients
from tests.support.toys import cluster_of


@dataclass
class Adopted:
    """A module whose parameters stand in flat buffers, as the engine has it."""

    module: nn.Module
    flats: list[FlatParam]
    weights: WeightGradients

    @staticmethod
    def of(original: nn.Module, preset_name: str = "ddp", world: int = 1) -> "Adopted":
        module = copy.deepcopy(original)
        old = dict(module.named_parameters())
        dtype = next(iter(old.values())).dtype
        cluster = cluster_of(world)
        compute = next(name for name, known in DTYPES.items() if known == dtype)
        plan = replace(preset(preset_name, cluster), compute=compute)  # type: ignore[arg-type]
        layout = Layout.of(cluster, plan)
        specs = describe([module], ["block"])[0].params
        adopted = Adopted(module, [], WeightGradients())
        for trainable in (True, False):
            chosen = tuple(spec for spec in specs if spec.trainable == trainable)
            if not chosen:
                continue
            spec = FlatParamSpec(layout, chosen, trainable)
            flat = FlatParam("block", spec, 0, plan, torch.device("cpu"), Meter())
            if world > 1:
                flat.materialise()
            for name, parameter in flat.named_parameters():
                parameter.data.copy_(old[name].data)
            adopted.flats.append(flat)
            if trainable:
                adopted.weights.own(flat.parameters, flat.gradient.views)
            others = {id(value): value for value in module.parameters()}
            replace_parameters([module], others | {id(old[name]): new for name, new in flat.named_parameters()})
        return adopted

    def gradients(
        self, backwards: list[Callable[[nn.Module], Tensor]], hold: bool, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Run the backwards and then, with `hold`, their weight gradients; return all gradients by name, in `dtype`."""
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        (flat,) = (flat for flat in self.flats if flat.parameters[0].requires_grad)
        buffer = torch.full_like(flat.full, torch.nan, dtype=dtype)
        flat.gradient.views.open(buffer)
        queues = []
        for run in backwards:
            queues.append(self.weights.queue(hold))
            with self.weights.recorded_in(queues[-1]):
                torch.autograd.backward(run(self.module))
        if self.flats[0].full.numel() != self.flats[0].shard.numel():
            for part in self.flats:
                part.free()
        for queue in queues:
            assert hold or not len(queue)
            queue.run()
        flat.gradient.views.close()
        assert not buffer.isnan().any()
        return dict(zip((names[p] for p in flat.parameters), flat.gradient.views.views(buffer), strict=True))


def as_in_a_run(block: nn.Module, hold: bool = False) -> tuple[nn.Module, AbstractContextManager[object]]:
    """The block with its parameters in flat buffers, and the context that records its weight gradients.

    With `hold` they wait.
    """
    adopted = Adopted.of(block)
    trained = next(flat for flat in adopted.flats if flat.parameters[0].requires_grad)
    trained.gradient.views.open(torch.zeros_like(trained.full))
    return adopted.module, adopted.weights.recorded_in(adopted.weights.queue(hold))


class Experts(nn.Module):
    """Two stacks one after the other, and where `mixed` one of them in another product too."""

    def __init__(self, counts: Sequence[int], inputs: int, frozen: str = "", mixed: bool = False) -> None:
        super().__init__()

        def values(*shape: int, seed: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

        self.counts, self.mixed = tuple(counts), mixed
        self.up = nn.Parameter(values(len(counts), 4, inputs, seed=1), requires_grad=frozen != "up")
        self.down = nn.Parameter(values(len(counts), inputs, 4, seed=2), requires_grad=frozen != "down")

    def forward(self, x: Tensor) -> Tensor:
        out = grouped_linear(torch.tanh(grouped_linear(x, self.up, self.counts)), self.down, self.counts)
        return out + torch.einsum("ni,eoi->no", x, self.up).sum() if self.mixed else out
