"""Simulated ranks of any plan: the part of a known whole model that each should hold, and their checkpoint."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from terrace.checkpoint.layout import Files, encode, manifest_of
from terrace.checkpoint.parts import choices_of, slices_of
from terrace.checkpoint.reading import Checkpoint
from terrace.checkpoint.snapshot import Snapshot
from terrace.comm.ledger import Meter
from terrace.model.experts.config import ExpertsConfig
from terrace.model.spec import BlockSpec
from terrace.plan.counts import experts_of
from terrace.plan.mesh import STAGE
from terrace.plan.plan import Plan
from terrace.plan.slices import rank_slices
from terrace.program.lowering import build_stages
from terrace.program.program import Program
from terrace.runtime.flat_param import FlatParam
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.states import ADAMW, FROZEN, KINDS
from tests.support.toys import TIER_NAMES, cluster_of

NUM_UPDATES = 5
Blocks = tuple[BlockSpec, ...]


@dataclass(frozen=True)
class Spread:
    """A plan: (data, rows, columns) of each tier, and the tiers of params and of optimizer, -1 for the device.

    The innermost tier is as many times larger as (ulysses, ring) say. A pipeline of `stages` has one more tier, the
    outermost. `experts` are (expert, rows) of each tier, of the second factoring.
    """

    tiers: tuple[tuple[int, int, int], ...]
    params: int = -1
    optimizer: int = -1
    stages: int = 1
    context: tuple[int, int] = (1, 1)
    experts: tuple[tuple[int, int], ...] = ()

    @property
    def world_size(self) -> int:
        return self.stages * math.prod(self.context) * math.prod(map(math.prod, self.tiers))

    def total(self, axis: int) -> int:
        return math.prod(tier[axis] for tier in self.tiers)

    def programs(self, blocks: Blocks) -> list[Program]:
        """The program of every rank."""
        sizes = [math.prod(tier) for tier in self.tiers]
        sizes[0] *= math.prod(self.context)
        cluster = cluster_of(*sizes, *([self.stages] if self.stages > 1 else []))
        mapping: dict[str, dict[str, int | Mapping[str, int]]] = {
            name: {"data": data, "tensor": {"rows": rows, "columns": columns}}
            for name, (data, rows, columns) in zip(TIER_NAMES, self.tiers, strict=False)
        }
        mapping[TIER_NAMES[0]]["context"] = dict(zip(("ulysses", "ring"), self.context, strict=True))
        if self.stages > 1:
            mapping[TIER_NAMES[len(self.tiers)]] = {"pipeline": self.stages}
        places = ("device", *(tier.name for tier in cluster.tiers))
        params, optimizer = places[self.params + 1], places[self.optimizer + 1]
        experts = {
            name: {"expert": expert, "rows": rows}
            for name, (expert, rows) in zip(TIER_NAMES, self.experts, strict=False)
        }
        plan = Plan(params=params, grads=params, optimizer=optimizer, mapping=mapping, experts=experts)
        # A scalar declares no dims, which plans with a tensor axis refuse: here all of that axis' ranks hold it.
        scalars = {param.name for block in blocks for param in block.params if not param.shape}
        stages = build_stages(
            cluster,
            plan,
            [replace(block, params=tuple(p for p in block.params if p.name not in scalars)) for block in blocks],
            num_micros=1,
            sequence=8,
        )
        whole = tuple(with_scalars(*pair, STAGE) for pair in zip(stages[0].blocks, blocks, strict=True))
        ranked = [replace(program, model=replace(program.model, blocks=whole)) for program in stages]
        return [ranked[ranked[0].mesh.stage(rank)] for rank in range(cluster.world_size)]


def with_scalars(sliced: BlockSpec, whole: BlockSpec, axes: tuple[str, ...]) -> BlockSpec:
    own = {param.name: param for param in sliced.params}
    return replace(
        whole, params=tuple(own.get(param.name) or replace(param, replicated_over=axes) for param in whole.params)
    )


class Truth:
    """Values of the whole model: every element of every kind has a number of its own, and none is zero."""

    def __init__(self, blocks: Blocks) -> None:
        self.values: dict[str, dict[str, dict[str, Tensor]]] = {}  # block -> parameter -> kind
        count = 1
        for block in blocks:
            own = self.values[block.name] = {}
            for param in block.params:
                own[param.name] = {}
                for kind in KINDS[ADAMW if param.trainable and param.numel else FROZEN]:
                    own[param.name][kind] = torch.arange(count, count + param.numel).float().view(param.shape)
                    count += param.numel

    def buffer(self, program: Program, rank: int, flat: FlatParam, kind: str) -> Tensor:
        """The content of a rank's whole flat buffer, padding included."""
        full = torch.zeros(flat.padded)
        for spec, start, stop in flat.spec.extents:
            part = self.values[flat.name][spec.name][kind][rank_slices(spec, program.mesh, rank)]
            local = torch.zeros(spec.shape)
            local[tuple(slice(size) for size in part.shape)] = part
            full[start:stop] = local.flatten()
        return full

    def of(self, program: Program, rank: int, flat: FlatParam) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (kind, tensor that a rank holds, its expected value)."""
        if flat.spec.trainable:
            (part,) = flat.optimizer.parts
            for kind in KINDS[ADAMW]:
                full = self.buffer(program, rank, flat, kind)
                yield kind, part.values[kind], full[flat.part(flat.layout.optimizer)]
        else:
            yield FROZEN, flat.shard, self.buffer(program, rank, flat, FROZEN)[flat.part(flat.layout.params)]


def flats_of(program: Program, rank: int) -> list[FlatParam]:
    """The flat parameters of a rank, made as the engine makes them, with -1 in every element."""
    flats = []
    for index in program.stage.held:
        is_copy = index in program.stage.copies
        for spec in program.model.flats[index]:
            name, device = program.blocks[index].name, torch.device("cpu")
            flat = FlatParam(name, spec, rank, program.plan, device, Meter(), is_copy=is_copy)
            flat.initialise(lambda param: -torch.ones(param.shape), OptimizerConfig())
            for part in flat.optimizer.parts:
                for kind, values in part.values.items():
                    if kind != "master":
                        values.fill_(-1)
            flats.append(flat)
    return flats


def filled(program: Program, rank: int, truth: Truth) -> list[FlatParam]:
    """The flat parameters of a rank that hold their part of the truth."""
    flats = flats_of(program, rank)
    for flat in flats:
        for _, kept, values in truth.of(program, rank, flat):
            kept.copy_(values)
    return flats


def mixtures_of(program: Program) -> Iterator[tuple[int, ExpertsConfig]]:
    """The mixtures that a rank runs, by block."""
    for block in program.stage.own:
        experts = experts_of(program.blocks[block])
        if experts is not None:
            yield block, experts


def save(folder: Path, blocks: Blocks, spread: Spread, truth: Truth) -> Checkpoint:
    """Write a checkpoint of all simulated ranks."""
    files: Files = {}
    for rank, program in enumerate(spread.programs(blocks)):
        counts = {block: torch.arange(experts.num_experts) for block, experts in mixtures_of(program)}
        beside = () if any(program.model.stage_layout.coordinates(rank)) else choices_of(program, counts)
        snapshot = Snapshot(filled(program, rank, truth), slices_of(program.mesh, rank), beside)
        snapshot.take()
        if snapshot.pieces:
            files[f"rank-{rank:05d}.safetensors"] = snapshot.write(folder / f"rank-{rank:05d}.safetensors")
    manifest = encode(manifest_of(blocks, OptimizerConfig(), NUM_UPDATES, NUM_UPDATES, {}, files))
    (folder / "manifest.json").write_text(manifest)
    return Checkpoint(folder)
