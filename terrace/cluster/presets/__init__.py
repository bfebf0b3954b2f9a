"""Cluster presets, one TOML file each, and the loader for them and for the user's own files.

Adding a machine is adding a file to this folder.
"""

import os
from importlib import resources
from pathlib import Path
from typing import Any

from terrace.base.errors import ClusterError, ConfigError, did_you_mean
from terrace.base.schema import load, read_table
from terrace.cluster.cluster import Cluster


def preset_names() -> list[str]:
    """Names that `load_cluster` knows."""
    files = resources.files(__package__).iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def cluster_table(name_or_path: str) -> dict[str, Any]:
    """The table of a preset, or of a TOML file if the name ends in `.toml` or is a path."""
    if name_or_path in preset_names():
        return read_table(Path(str(resources.files(__package__) / f"{name_or_path}.toml")))
    path = Path(name_or_path)
    if path.suffix == ".toml" or os.path.exists(name_or_path):  # unlike Path, bears any string
        return read_table(path)
    raise ClusterError(f"no cluster preset or file {name_or_path!r}{did_you_mean(name_or_path, preset_names())}")


def parse_cluster(table: dict[str, Any]) -> Cluster:
    """Build a `Cluster` from its table; raises `ConfigError` or `ClusterError`."""
    tiers = table.get("tiers")
    if not isinstance(tiers, list):
        raise ConfigError("cluster.tiers must be a list of tiers, innermost first: write [[tiers]] for each")
    return load(Cluster, table, "cluster")


def load_cluster(name_or_path: str) -> Cluster:
    """The preset with this name, or the cluster in this file."""
    return parse_cluster(cluster_table(name_or_path))
