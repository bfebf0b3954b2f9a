"""The task that a plan was made for, the `[task]` table of a plan file; and the command that starts its ranks.

    [task]
    batch = 64         # sequences a step, over all ranks
    sequence = 1024    # tokens a sequence
    [task.model]       # the model, as its config.json has it
    [task.cluster]     # the cluster, as its file has it

`terrace plan` writes the tables themselves rather than file names, so that a plan file can be moved without changing
its meaning. In a file written by hand, `model` and `cluster` may be paths relative to the plan file, and `cluster` the
name of a preset.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError, did_you_mean
from terrace.base.schema import dump, read_table
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import cluster_table, preset_names
from terrace.launch.machines import MACHINE_TIERS
from terrace.model.config import ModelConfig, to_table
from terrace.model.hf.folder import read_model_table

TASK = "task"
_NUMBERS = ("batch", "sequence")
_KEYS = (*_NUMBERS, "model", "cluster")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Sections of a run from a plan file; `train` has batch and sequence."""

    model: Mapping[str, Any]
    cluster: Mapping[str, Any]
    train: Mapping[str, int]


def planned_table(model: ModelConfig, cluster: Cluster, batch: int, sequence: int) -> dict[str, Any]:
    return {"batch": batch, "sequence": sequence, "model": dump(to_table(model)), "cluster": dump(cluster)}


def read_planned(plan: Any) -> Planned | None:
    """The `[task]` of a plan file; None if it has none, or `plan` is not a file.

    `plan` is a path or the name of a plan. Raises `ConfigError` for an incomplete table.
    """
    if not isinstance(plan, str) or Path(plan).suffix not in (".toml", ".json") or not os.path.isfile(plan):
        return None
    table = read_table(Path(plan)).get(TASK)
    if table is None:
        return None
    if not isinstance(table, Mapping):
        raise ConfigError(f"{plan}: {TASK} = {table!r} must be a table of {', '.join(_KEYS)}")
    for key in table:
        if key not in _KEYS:
            raise ConfigError(f"{plan}: unknown key {TASK}.{key}{did_you_mean(str(key), _KEYS, f'{TASK}.')}")
    for key in _KEYS:
        if key not in table:
            raise ConfigError(f"{plan}: {TASK}.{key} is missing: give it, or leave the whole [{TASK}] table out")
    for key in _NUMBERS:
        # In Python a bool is an int.
        if not isinstance(table[key], int) or isinstance(table[key], bool) or table[key] < 1:
            raise ConfigError(f"{plan}: {TASK}.{key} = {table[key]!r} must be a whole number of at least 1")
    folder = Path(plan).parent
    return Planned(
        model=_model(plan, folder, table["model"]),
        cluster=_cluster(plan, folder, table["cluster"]),
        train={key: table[key] for key in _NUMBERS},
    )


def _model(plan: str, folder: Path, value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{plan}: {TASK}.model = {value!r} must be a table or the path of a config.json")
    return read_model_table(str(folder / value))


def _cluster(plan: str, folder: Path, value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, str):
        raise ConfigError(f"{plan}: {TASK}.cluster = {value!r} must be a table, a preset or the path of a file")
    return cluster_table(value if value in preset_names() else str(folder / value))


def num_machines(cluster: Cluster) -> int:
    """Number of machines in a cluster, from the names of its tiers; without a machine tier, the size of the outermost
    tier.
    """
    sizes = [tier.size for tier in cluster.tiers]
    named = [index for index, tier in enumerate(cluster.tiers) if tier.name in MACHINE_TIERS]
    return math.prod(sizes[named[-1] + 1 :]) if named else sizes[-1]


def torchrun(cluster: Cluster, command: str) -> str:
    """The torchrun command line for a terrace `command`, to be run on each machine of the cluster."""
    nodes = num_machines(cluster)
    places = f"--nproc-per-node {cluster.world_size // nodes}"
    if nodes > 1:
        places = f"--nnodes {nodes} {places} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"torchrun {places} -m terrace {command}"
