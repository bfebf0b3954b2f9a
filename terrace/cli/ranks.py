"""`--ranks N`: the tiers of a cluster resized to N ranks."""

import argparse
from collections.abc import Mapping
from typing import Any

from terrace.base.errors import ConfigError
from terrace.base.schema import merge
from terrace.cluster.presets import parse_cluster
from terrace.cluster.sizes import sizes_for


def add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="resize the cluster's tiers to N ranks, innermost first (default: as the cluster says)",
    )


def with_ranks(ranks: int | None, overrides: dict[str, Any], cluster: Any) -> dict[str, Any]:
    """`overrides` with tier sizes that resize `cluster` (a table) to `ranks` ranks; unchanged if `ranks` is None.

    Raises `ConfigError` if the overrides already set a size.
    """
    if ranks is None:
        return overrides
    if ranks < 1:
        raise ConfigError(f"--ranks {ranks} must be at least 1")
    own = overrides.get("cluster", {})
    tiers = own.get("tiers", {}) if isinstance(own, Mapping) else own
    # Anything else is refused where the overrides are laid over the cluster.
    if not isinstance(tiers, Mapping) or not all(isinstance(tier, Mapping) for tier in tiers.values()):
        return overrides
    sized = [name for name, tier in tiers.items() if "size" in tier]
    if sized:
        raise ConfigError(
            f"--ranks {ranks} gives every tier its size, and so does --cluster.tiers.{sized[0]}.size: leave one out"
        )
    found = parse_cluster(dict(cluster)).tiers if isinstance(cluster, Mapping) else ()
    sizes = sizes_for(ranks, [tier.size for tier in found]) if found else []
    sizes_of = {tier.name: {"size": size} for tier, size in zip(found, sizes, strict=True)}
    return merge(overrides, {"cluster": {"tiers": sizes_of}})
