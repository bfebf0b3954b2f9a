"""Memory that the allocator's model counts in a step, beside the predicted footprint."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from bench.common import decoder, engine_of, real_blocks
from terrace.launch.start import World
from terrace.model.blocks import block_specs
from terrace.plan.kinds import Kinds
from terrace.plan.presets import preset
from terrace.runtime.batch import Batch
from terrace.simulate.footprint import footprint
from tests.support.toys import cluster_of
from tests.virtual_cuda.rank import DEVICE, on_cuda, on_device
from tests.virtual_cuda.rehearsal import rehearsed

SEQUENCE = 128
_OUTSIDE = ("allocator", "context")  # of the footprint: not tensors


@dataclass(frozen=True)
class Sized:
    """A plan on as many ranks, of a decoder with these sizes."""

    ranks: int
    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    micros: int = 1
    hidden: int = 128
    layers: int = 4
    vocab: int = 512


class Measured(NamedTuple):
    """Bytes of a rank's second step: the peak of blocks and of segments; the footprint's tensors and its reserve."""

    allocated: int
    reserved: int
    predicted: int
    reserve: int


def measure(world: World, plans: Sequence[Sized]) -> list[Measured]:
    """The memory of each plan on this rank."""
    return [_measure(world, sized) for sized in plans]


def _measure(world: World, sized: Sized) -> Measured:
    cluster, config = on_cuda(cluster_of(sized.ranks)), decoder(sized.hidden, sized.layers, sized.vocab)
    plan = replace(preset(sized.name, cluster), **{"compute": "fp32", "master": "fp32", **sized.changes})
    specs = block_specs(config)
    parts = footprint(cluster, plan, Kinds.of(specs), SEQUENCE, sized.micros)
    predicted = sum(num_bytes for name, num_bytes in parts.items() if name not in _OUTSIDE)
    with rehearsed():
        options: dict[str, Any] = {"rank": world.rank, "device": DEVICE, "sequence": SEQUENCE, "declared": specs}
        engine = engine_of(real_blocks(config), cluster, plan, sized.micros, **options)
        for _ in range(2):  # the second has all states and buffers
            tokens = [torch.randint(0, sized.vocab, (plan.micro_batch, SEQUENCE)) for _ in range(sized.micros)]
            batches = on_device([Batch(each, each.roll(-1, 1)) for each in tokens], DEVICE)
            torch.cuda.reset_peak_memory_stats()
            engine.step(batches, 1e-3)
            del batches
        engine.drain()
        found = Measured(
            torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), predicted, parts["allocator"]
        )
        engine.close()
    return found


def plans() -> list[Sized]:
    """Placements, recomputation, micro-batches, states in few bits, and other sizes."""
    some = [("layers.*",), ("layers.*: attention, mlp",)]
    found = [Sized(2, name, {"recompute": again}) for name in ("zero1", "zero2", "zero3") for again in ((), *some)]
    found += [Sized(1, "ddp", {"recompute": again}) for again in ((), *some)]
    found += [Sized(2, "zero3", {"prefetch": prefetch}) for prefetch in (0, 3)]
    found += [Sized(2, name, {"unit": 2}, micros=4) for name in ("zero2", "zero3")]
    found += [Sized(1, "ddp", {"micro_batch": size}) for size in (2, 4)]
    found += [Sized(1, "ddp", micros=3), Sized(2, "zero3", micros=3), Sized(2, "zero1", {"micro_batch": 2}, micros=2)]
    found += [Sized(2, "zero3", {"optimizer_states": states}) for states in ("bf16", "int8")]
    found += [Sized(1, "ddp", vocab=4096), Sized(1, "ddp", hidden=256, layers=2), Sized(2, "zero3", layers=8)]
    found += [Sized(2, "zero2", {"recompute": some[0]}, micros=2), Sized(2, "zero3", vocab=4096)]
    found += [Sized(2, "ddp"), Sized(2, "ddp", {"recompute": some[0]}), Sized(2, "zero3", hidden=256, layers=2)]
    return found
