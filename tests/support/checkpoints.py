"""Engines that save and load, and the contents of their checkpoints."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from terrace.checkpoint.parts import COUNTS
from terrace.checkpoint.reading import Checkpoint
from terrace.launch.start import World
from terrace.model.balance import BalanceConfig
from terrace.plan.presets import preset
from terrace.runtime.batch import Batch, places_of
from terrace.runtime.engine import Engine
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.setup import Blocks, RankSetup, Training, Workload
from tests.support.toys import MODELS, SEQUENCE, cluster_of, make_batch

ADAMW = OptimizerConfig(lr=1e-2)
BATCH = 24  # divides by every world size here


def make(
    world: World,
    tiers: tuple[int, ...],
    plan: str,
    compute: str = "fp64",
    scale: float = 1.0,
    model: str = "toy",
    balance: BalanceConfig | None = None,
    optimizer: OptimizerConfig = ADAMW,
    wire: Mapping[str, Mapping[str, str]] | None = None,
    stored: Mapping[str, Any] | None = None,
    keep_folder: Path | None = None,
) -> Engine:
    """An engine of a model; the toy is tied, one matrix frozen. `scale` makes one that needs its checkpoint. `stored`
    has further keys of the plan.
    """
    cluster = cluster_of(*tiers)
    changes: Any = {"compute": compute, "master": "fp64" if compute == "fp64" else "fp32"}
    changes |= ({} if wire is None else {"wire": wire}) | dict(stored or {})
    blocks = MODELS[model].blocks(torch.float64)
    for block in blocks:
        for parameter in block.parameters():
            parameter.data.mul_(scale)
    return Engine(
        Blocks(blocks, declared=MODELS[model].declared),
        Workload(
            cluster=cluster,
            plan=replace(preset(plan, cluster), update=optimizer.update, **changes),
            num_micros=1,
            sequence=SEQUENCE,
        ),
        MODELS[model].objective,
        Training(optimizer=optimizer, balance=balance or BalanceConfig()),
        RankSetup(rank=world.rank, keep_folder=keep_folder),
    )


def train(engine: Engine, first: int, last: int) -> list[float]:
    each = BATCH // engine.program.cluster.world_size
    rows = slice(engine.rank * each, (engine.rank + 1) * each)
    results = []
    for step in range(first, last):
        tokens, labels = make_batch(step, BATCH)
        places = places_of(torch.arange(step * BATCH, (step + 1) * BATCH), labels)
        results.append(engine.step([Batch(tokens[rows], labels[rows], places=places[rows])], 1e-2).loss)
    engine.check_bytes()
    return results


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    both = one.keys() & other.keys()
    return [name for name in one.keys() | other.keys() if name not in both or not torch.equal(one[name], other[name])]


def contents(folder: Path) -> dict[str, Tensor]:
    """Every parameter of a checkpoint, whole, in all its kinds; and the tokens of each expert in the last step."""
    checkpoint = Checkpoint(folder)
    checkpoint.verify()
    held = [tensor for name in checkpoint.files for tensor in load_file(folder / name).items()]
    return {name: counts for name, counts in held if name.endswith(f"/{COUNTS}")} | {
        f"{block}.{name}/{kind}": value
        for block in checkpoint.layout
        for name, values in checkpoint.read(block).items()
        for kind, value in values.items()
    }
