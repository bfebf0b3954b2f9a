"""Resolves a run from its layers or its table, choosing the numbers that its plan leaves out."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from terrace.train.config import RunConfig
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
    # Imported here: a resumed run has its numbers, so reading it needs no planner.
    from terrace.planner.micro_and_unit import with_best_numbers
    from terrace.train.prediction import given_step

    return replace(run, plan=with_best_numbers(given_step(run), free, multiple_of=2 if run.on_pairs else 1).plan)
