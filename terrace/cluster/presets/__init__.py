"""Cluster presets, one TOML file each, and the loader for presets, user files and overrides.

To add a machine, add a file to this folder.
"""

import math
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from terrace.base.errors import ClusterError, ConfigError, did_you_mean
from terrace.base.schema import load, merge, read_table
from terrace.cluster.cluster import Cluster

UNNAMED = "(none named)"  # shown instead of a name if a command has its own default
_RESTATED = ("bandwidth_bytes_per_s", "shared", "shared_by")  # a tier is not rescaled if an override sets one of these


def preset_names() -> list[str]:
    files = resources.files(__package__).iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def cluster_table(name_or_path: str) -> dict[str, Any]:
    """The table of a preset, or of a TOML file if the name ends in `.toml` or is an existing path."""
    if name_or_path in preset_names():
        return read_table(Path(str(resources.files(__package__) / f"{name_or_path}.toml")))
    path = Path(name_or_path)
    if path.suffix == ".toml" or os.path.exists(name_or_path):  # unlike Path, bears any string
        return read_table(path)
    raise ClusterError(f"no cluster preset or file {name_or_path!r}{did_you_mean(name_or_path, preset_names())}")


def parse_cluster(table: dict[str, Any]) -> Cluster:
    """Build a `Cluster` from its table. Raises `ConfigError` or `ClusterError`."""
    tiers = table.get("tiers")
    if not isinstance(tiers, list):
        raise ConfigError("cluster.tiers must be a list of tiers, innermost first: write [[tiers]] for each")
    return load(Cluster, {**table, "tiers": [_with_devices(tier) for tier in tiers]}, "cluster")


def _with_devices(tier: Any) -> Any:
    # Members may name the device of a preset or file. Anything that is no table is refused where it is read.
    members = tier.get("members") if isinstance(tier, Mapping) else None
    if not isinstance(members, list):
        return tier
    named = [isinstance(each, Mapping) and isinstance(each.get("device"), str) for each in members]
    pairs = zip(members, named, strict=True)
    found = [{**each, "device": cluster_table(each["device"])["device"]} if name else each for each, name in pairs]
    return {**tier, "members": found}


def load_cluster(name_or_path: str) -> Cluster:
    return parse_cluster(cluster_table(name_or_path))


def lay_over(table: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`merge` tables with a section `cluster`, and rescale the bandwidth of shared links.

    If an override changes the number of devices that share a link, the link keeps its total bandwidth and each device's
    share changes.
    """
    merged = merge(table, overrides)
    cluster, own = table.get("cluster"), overrides.get("cluster")
    if not isinstance(cluster, Mapping) or not isinstance(own, Mapping):
        return merged
    before, after, given = cluster.get("tiers"), merged["cluster"].get("tiers"), own.get("tiers")
    # Anything else is refused where the table is read.
    if not isinstance(given, Mapping) or not isinstance(before, list):
        return merged
    if not all(isinstance(tier, Mapping) for tier in before):
        return merged
    merged["cluster"] = merged["cluster"] | {"tiers": _shared_anew(before, after, given)}
    return merged


def _shared_anew(before: Sequence[Any], after: Sequence[Any], given: Mapping[str, Any]) -> list[Any]:
    found = []
    for index, tier in enumerate(after):
        restated = any(key in given.get(tier.get("name"), {}) for key in _RESTATED)
        old, new = _num_devices(before, index), _num_devices(after, index)
        rate = None if restated else tier.get("bandwidth_bytes_per_s")
        if isinstance(rate, (int, float)) and tier.get("shared") is True and old != new and min(old, new) > 0:
            tier = {**tier, "bandwidth_bytes_per_s": rate * old / new}
        found.append(tier)
    return found


def _num_devices(tiers: Sequence[Any], index: int) -> int:
    """Number of devices that share a link of a tier; 0 for invalid sizes or names, which are reported elsewhere."""
    names = [tier.get("name") for tier in tiers]
    owner = tiers[index].get("shared_by") or (names[index - 1] if index else None)
    if owner not in names[:index]:
        return 0
    sizes = [tier.get("size") for tier in tiers[: names.index(owner) + 1]]
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else 0


def sizes_for(num_ranks: int, sizes: Sequence[int]) -> list[int]:
    """Tier sizes, innermost first, whose product is `num_ranks`; `sizes` are those of a cluster.

    From the innermost tier outward, each gets the largest divisor of the remaining ranks up to its size; the outermost
    gets the rest.
    """
    found, left = list[int](), num_ranks
    for size in sizes[:-1]:
        here = max(part for part in range(1, max(1, min(size, left)) + 1) if left % part == 0)
        found.append(here)
        left //= here
    return [*found, left]
