"""A run that goes on by itself, on as many ranks as there are.

The cluster of the command is fitted to the ranks that were started: from the outermost tier inward, the first tier
that can take a size so that all ranks are used gets it, and the tiers outside it get size 1. The plan is read anew
for that cluster. The batch stays; where the ranks' share of it is no multiple of plan.micro_batch, that becomes the
largest number below that fits.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from terrace.base.errors import ConfigError, PlanError
from terrace.base.schema import dump
from terrace.cluster import Cluster
from terrace.plan import Layout
from terrace.train.config import RunConfig, parse_run, parse_sections


def fitted_cluster(cluster: Cluster, num_ranks: int) -> Cluster:
    """Return the cluster with the sizes of its tiers fitted to a number of ranks."""
    sizes = [tier.size for tier in cluster.tiers]
    for index in reversed(range(len(sizes))):
        inside = math.prod(sizes[:index])
        if num_ranks % inside == 0:
            sizes[index:] = [num_ranks // inside] + [1] * (len(sizes) - index - 1)
            break
    tiers = tuple(replace(tier, size=size) for tier, size in zip(cluster.tiers, sizes, strict=True))
    return replace(cluster, tiers=tiers)


def fitted_run(table: Mapping[str, Any], num_ranks: int) -> tuple[RunConfig, str]:
    """Return the run of a table on `num_ranks` ranks, and in words what was changed; nothing where they suit it.

    Raises `PlanError` when its plan does not fit them.
    """
    run = parse_run(table)
    if run.cluster.world_size == num_ranks:
        return run, ""
    cluster = fitted_cluster(run.cluster, num_ranks)
    words = [
        f"{new.name} {old.size} -> {new.size}"
        for old, new in zip(run.cluster.tiers, cluster.tiers, strict=True)
        if old.size != new.size
    ]
    try:
        sections = {**table, "cluster": dump(cluster)}
        sections["plan"] = {**table["plan"], "micro_batch": _micro_batch(parse_sections(sections))}
        fitted = parse_run(sections)
    except (PlanError, ConfigError) as error:
        raise PlanError(
            f"{num_ranks} ranks were started where cluster {run.cluster.name!r} has {run.cluster.world_size}; with "
            f"{', '.join(words)} the plan does not fit: {error}"
        ) from error
    if fitted.plan.micro_batch != run.plan.micro_batch:
        words.append(f"plan.micro_batch {run.plan.micro_batch} -> {fitted.plan.micro_batch}")
    return fitted, f"{num_ranks} ranks in place of {run.cluster.world_size}: {', '.join(words)}"


def _micro_batch(run: RunConfig) -> int:
    """Return the largest micro-batch up to the plan's that divides what each data rank has of the batch."""
    share, rest = divmod(run.train.batch, Layout.of(run.cluster, run.plan).data_degree)
    if rest:
        return run.plan.micro_batch  # no size fits: the check of the plan says so
    return max(size for size in range(1, run.plan.micro_batch + 1) if share % size == 0)
