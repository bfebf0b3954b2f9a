"""Resolves a run from its layers or its table, choosing the numbers that its plan leaves out; fits it to other ranks.

Elastic runs: from the outermost tier inward, the first tier that can be resized to use all ranks gets the new size, and
the tiers outside it get size 1. The plan is parsed again for that cluster. The batch stays: if a rank's share of it is
no multiple of plan.micro_batch, the micro-batch becomes the largest smaller divisor. A micro-batch that the plan leaves
out is chosen anew.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from terrace.base.errors import ConfigError, PlanError
from terrace.base.schema import dump
from terrace.base.words import counted, were
from terrace.cluster.cluster import Cluster
from terrace.cluster.members import first_members
from terrace.train.config import RunConfig, parse_sections
from terrace.train.layers import resolve_table
from terrace.train.rules import checked_run, free_numbers


def resolve(config_path: str | None, flags: Mapping[str, str | None], overrides: Mapping[str, Any]) -> RunConfig:
    """The checked configuration.

    `flags` may hold model, cluster, plan and data; `overrides` is the nested table of dotted overrides. Raises the
    `TerraceError` of the first mistake.
    """
    return parse_run(resolve_table(config_path, flags, overrides))


def parse_run(table: Mapping[str, Any]) -> RunConfig:
    """Builds and checks a run from its whole table. Numbers that its plan leaves out are chosen by
    `terrace.planner.micro_and_unit`.
    """
    run, free = checked_run(table), free_numbers(table)
    if not free:
        return run
    # Imported here: a resumed run has its numbers, so reading it predicts nothing.
    from terrace.train.prediction import with_numbers

    return with_numbers(run, free)


def fitted_cluster(cluster: Cluster, num_ranks: int) -> Cluster:
    """`cluster` with its tiers resized to `num_ranks` ranks; unchanged if no tier can be resized to fit."""
    sizes = [tier.size for tier in cluster.tiers]
    # Resizing an outer tier keeps the inner ones, and so the fast groups of the plan.
    for index in reversed(range(len(sizes))):
        inside = math.prod(sizes[:index])
        if num_ranks % inside == 0:
            sizes[index:] = [num_ranks // inside] + [1] * (len(sizes) - index - 1)
            break
    tiers = tuple(
        replace(tier, size=size, members=first_members(tier.members, size))
        for tier, size in zip(cluster.tiers, sizes, strict=True)
    )
    return replace(cluster, tiers=tiers)


def fitted_run(table: Mapping[str, Any], num_ranks: int) -> tuple[RunConfig, str]:
    """The run of `table` on `num_ranks` ranks, and a description of the changes; "" if the ranks fit already.

    Raises `PlanError` if the plan does not fit them.
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
        # The micro-batch depends on the data ranks of the fitted cluster, so sections are parsed twice.
        sections = {**table, "cluster": dump(cluster)}
        if "micro_batch" in table["plan"]:
            sections["plan"] = {**table["plan"], "micro_batch": _micro_batch(parse_sections(sections))}
        fitted = parse_run(sections)
    except (PlanError, ConfigError) as error:
        raise PlanError(
            f"{were(num_ranks, 'rank')} started where cluster {run.cluster.name!r} has {run.cluster.world_size}; with "
            f"{', '.join(words)} the plan does not fit: {error}"
        ) from error
    if fitted.plan.micro_batch != run.plan.micro_batch:
        words.append(f"plan.micro_batch {run.plan.micro_batch} -> {fitted.plan.micro_batch}")
    return fitted, f"{counted(num_ranks, 'rank')} in place of {run.cluster.world_size}: {', '.join(words)}"


def _micro_batch(run: RunConfig) -> int:
    # The largest size up to the plan's that divides a data rank's share of the batch.
    share, rest = divmod(run.rows, run.layout.data_degree)
    if rest:
        # No size fits: the check of the plan says so.
        return run.plan.micro_batch
    sizes = [size for size in range(1, run.plan.micro_batch + 1) if share % size == 0]
    # Both sequences of a pair are in one micro-batch.
    return max([size for size in sizes if not (run.on_pairs and size % 2)], default=run.plan.micro_batch)
