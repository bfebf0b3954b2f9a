"""Options shared by several commands."""

import argparse
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError
from terrace.base.schema import check_text, merge
from terrace.cli.here import cluster_here
from terrace.cli.lines import AUTO
from terrace.cli.overrides import parse_overrides, with_ranks
from terrace.train.config import RunConfig
from terrace.train.effects import check_effects, file_layers
from terrace.train.layers import resolve_table
from terrace.train.planned import TASK, read_planned
from terrace.train.rates import check_rate
from terrace.train.resolve import parse_run


def resumed(options: argparse.Namespace) -> tuple[Path | None, bool]:
    """The run folder of --resume, and whether to continue an existing run in --folder."""
    going_on = options.resume == AUTO
    if going_on and options.folder is None:
        raise ConfigError("--resume auto needs a folder: give --folder FOLDER")
    return None if going_on or options.resume is None else Path(options.resume), going_on


def resolve_run(options: argparse.Namespace, rest: Sequence[str]) -> RunConfig:
    """Validated configuration from the options and the dotted overrides in `rest`."""
    run = parse_run(run_table(options, rest))
    check_rate(run)
    given = parse_overrides(rest)
    check_effects(run, file_layers(options.config, options.plan), given)
    if options.data is not None:
        given = merge({"data": {"path": options.data}}, given)
    if given.keys() & {"data", "train"} or (run.data.bos, run.data.eos) != ("auto", "auto"):
        # Here, since most runs are of files.
        from terrace.train.effects import check_inputs

        check_inputs(run, given)
    return run


def run_table(options: argparse.Namespace, rest: Sequence[str]) -> dict[str, Any]:
    given, overrides = flags(options, "model", "cluster", "plan", "data"), parse_overrides(rest)
    # Looked up once, since this machine may be asked.
    here = cache(partial(cluster_here, ranks=options.ranks))
    table = resolve_table(options.config, given, overrides, lambda value: _once(here, value))
    if options.ranks is None:
        return table
    sized = with_ranks(options.ranks, overrides, table.get("cluster"))
    return resolve_table(options.config, given, sized, lambda value: _once(here, value))


def _once(here: Callable[[str], Any], value: Any) -> Any:
    return here(value) if isinstance(value, str) else value


def flags(options: argparse.Namespace, *names: str) -> dict[str, str | None]:
    """Values of the options `names`. Raises `ConfigError` for a value that is not valid text."""
    found = {name: getattr(options, name) for name in names}
    for name, value in found.items():
        if value is not None:
            check_text(f"--{name}", value)
    return found


def check_task(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """Raises `ConfigError` if a plan file alone describes the run and has no task."""
    # `train` has defaults for all of these, but a report on a model that the user did not choose would mislead.
    if options.config is not None or options.plan is None or not os.path.isfile(options.plan):
        return
    given = parse_overrides(rest)
    missing = [f"--{name}" for name in ("model", "cluster") if getattr(options, name) is None and name not in given]
    # Dotted keys count as given.
    missing += [f"--train.{name}" for name in ("batch", "sequence") if name not in given.get("train", {})]
    if missing and read_planned(options.plan) is None:
        raise ConfigError(
            f"{options.plan} does not say what it was made for, since it has no [{TASK}] table as terrace plan "
            f"writes: give {', '.join(missing)}, or --config FILE"
        )
