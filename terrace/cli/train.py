"""`terrace train`: check everything, show the plan, start the ranks, show predicted beside measured.

Without a launcher the ranks are local processes; under torchrun (srun, mpirun) this process is one rank.
What can be checked is checked before the first process starts, and before torch is loaded.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from terrace.base.errors import CheckpointError, ConfigError
from terrace.base.schema import merge, read_table
from terrace.cli.options import OVERRIDES_HELP, add_run_options, parse_overrides, resolve_run
from terrace.train.config import RunConfig, parse_run, section


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "train",
        help="train a model",
        description="Train a model, in processes of this machine or as one rank of torchrun, srun or mpirun.",
        epilog=OVERRIDES_HELP,
    )
    add_run_options(parser)
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="run folder to make (default: runs/TIME)")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="go on with this run folder from its newest checkpoint, under its own or another --cluster and --plan",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Train; returns 0, or raises what went wrong."""
    config = _configuration(options, rest)
    try:
        from terrace.cli import worker
    except ModuleNotFoundError as error:
        raise ConfigError(f"training needs the package {error.name!r}: pip install 'terrace[train]'") from error
    worker.run(config, folder=options.folder, resume=options.resume)
    return 0


def _configuration(options: argparse.Namespace, rest: Sequence[str]) -> RunConfig:
    if options.resume is None:
        return resolve_run(options, rest)
    given = [f"--{name}" for name in ("config", "model", "data") if getattr(options, name) is not None]
    given += ["--folder"] if options.folder is not None else []
    if given:
        raise ConfigError(f"--resume takes these from the run it goes on with: leave out {', '.join(given)}")
    overrides = parse_overrides(rest)
    if "weights" in overrides.get("train", {}):
        raise ConfigError("--resume goes on with the weights of a checkpoint: leave out --train.weights")
    path = options.resume / "config.toml"
    if not path.is_file():
        raise CheckpointError(f"{options.resume} is not a run folder: it has no config.toml")
    table = dict(read_table(path))
    for name in ("cluster", "plan"):
        if getattr(options, name) is not None:
            table[name] = section(name, getattr(options, name))
    plan = overrides.get("plan")
    if isinstance(plan, dict) and "preset" in plan:
        table["plan"] = {}  # the run's file holds every key of its plan, which would hide those of a preset
    return parse_run(merge(table, overrides))
