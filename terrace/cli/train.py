"""`terrace train`: checks everything, shows the plan, starts the ranks, and compares prediction with measurement.

Without a launcher the ranks are local processes; under torchrun (srun, mpirun) this process is one rank. Everything
that can be checked is checked before the first process starts and before torch is loaded.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError
from terrace.cli.here import cluster_here
from terrace.cli.lines import AUTO
from terrace.cli.options import resumed, run_table
from terrace.cli.overrides import parse_overrides, with_ranks
from terrace.cluster.presets import lay_over
from terrace.launch.fork_server import fork_server_ahead
from terrace.launch.refusals import refusals_told
from terrace.train.effects import check_effects, file_layers
from terrace.train.layers import check_one_length, section, with_one_length, with_teacher
from terrace.train.rates import check_rate
from terrace.train.resolve import fitted_run, parse_run
from terrace.train.runs import table_to_resume


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    with refusals_told():
        table = _with_roster(_table(options, rest), options)
        config = parse_run(table)
        # A resumed run keeps the keys of its own file.
        files = file_layers(options.config, options.plan) if options.resume in (None, AUTO) else {}
        check_effects(config, files, parse_overrides(rest))
        # A resumed run has its rate, unless it is given another.
        if options.resume in (None, AUTO) or "optimizer" in parse_overrides(rest):
            check_rate(config)
        resume, going_on = resumed(options)
    with fork_server_ahead("terrace.cli.worker"):
        # The first import of torch: everything above works without it.
        from terrace.cli import worker

        worker.run(
            config,
            folder=options.folder,
            resume=resume,
            going_on=going_on,
            verbose=options.verbose,
            fit=lambda num_ranks: fitted_run(table, num_ranks),
        )
    return 0


def _with_roster(table: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(options, name) for name in ("meet", "island") if getattr(options, name) is not None}
    if given.get("meet") is not None and options.resume is not None:
        raise ConfigError(
            "an island with --meet has its state from the others, or begins anew with them: leave --resume out, and "
            "begin from a checkpoint with --train.weights"
        )
    return lay_over(table, {"elastic": given}) if given else table


def _table(options: argparse.Namespace, rest: Sequence[str]) -> dict[str, Any]:
    if options.resume in (None, AUTO):
        return run_table(options, rest)
    # A resumed run keeps its own model and data; cluster and plan may change.
    given = [f"--{name}" for name in ("config", "model", "data") if getattr(options, name) is not None]
    given += ["--folder"] if options.folder is not None else []
    if given:
        raise ConfigError(f"--resume takes these from the run folder: leave out {', '.join(given)}")
    overrides = parse_overrides(rest)
    if "weights" in overrides.get("train", {}):
        raise ConfigError("--resume takes the weights from the checkpoint: leave out --train.weights")
    table = dict(table_to_resume(Path(options.resume), "train"))
    for name in ("cluster", "plan"):
        if getattr(options, name) is not None:
            table[name] = section(name, cluster_here(getattr(options, name), options.ranks))
    check_one_length(overrides)
    table = with_one_length(table, overrides)
    plan = overrides.get("plan")
    if isinstance(plan, dict) and "preset" in plan:
        # The run's file has every key of its plan, and these would override the preset.
        table["plan"] = {}
    outer = plan.get("outer") if isinstance(plan, dict) else None
    if isinstance(outer, dict) and "preset" in outer:
        table["plan"] = {key: each for key, each in table["plan"].items() if key != "outer"}
    return with_teacher(lay_over(table, with_ranks(options.ranks, overrides, table.get("cluster"))))
