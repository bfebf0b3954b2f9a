"""`terrace rl`: learning from feedback. Everything is checked before the first process starts.

This process is the controller. Roles run in local processes, in this process if the cluster has one rank, or on the
machines of a Ray cluster.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError
from terrace.cli.here import check_alone, cluster_here
from terrace.cli.lines import AUTO
from terrace.cli.options import flags, resumed
from terrace.cli.overrides import parse_overrides, with_ranks
from terrace.rl.calls.ray_address import check_address
from terrace.train.runs import CONFIG, table_to_resume


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    _check_explain(options)
    resume, going_on = resumed(options)
    if not options.explain:
        check_alone("rl", "other machines take part with --ray ADDRESS (docs/rl.md)")
    # Torch is imported here: the parser works without it.
    from terrace.rl.commands.explain import explain, placed
    from terrace.rl.commands.run import run as learn
    from terrace.rl.config_layers import resolve_table
    from terrace.rl.resolve import resolve
    from terrace.rl.rules import check_vocabulary

    given: dict[str, Any] = dict(flags(options, "model", "cluster", "plan"))
    given["cluster"], overrides = cluster_here(given["cluster"]), parse_overrides(rest, of_run=False)
    if resume is not None and given["model"] is not None:
        # The model is the run's own; only its weights are read again.
        overrides["weights"] = given.pop("model")
    file = _file(options, resume)
    if options.ranks is not None:
        overrides = with_ranks(options.ranks, overrides, resolve_table(options.task, file, given, overrides)["cluster"])
    is_placed = options.place is None or options.explain
    config = resolve(
        options.task,
        file,
        given,
        overrides,
        is_placed=is_placed,
        is_resumed=resume is not None,
        has_timeouts=options.ray is not None,
    )
    if options.explain:
        explain(config, search=options.place is not None)
        return 0
    check_vocabulary(config.run, config.model)
    if options.place is not None:
        config = placed(config)
    learn(config, options.folder, resume, options.ray or "", going_on=going_on, verbose=options.verbose)
    return 0


def _check_explain(options: argparse.Namespace) -> None:
    for name in ("folder", "ray", "verbose"):
        if options.explain and getattr(options, name):
            raise ConfigError(f"--explain starts nothing: leave out --{name}")
    if options.explain and options.resume == AUTO:
        raise ConfigError(f"--explain starts nothing: leave out --resume {AUTO}")
    if options.ray is not None:
        check_address(options.ray)
    if options.place is not None and options.resume is not None:
        raise ConfigError(
            f"--place {options.place}: a resumed run keeps the placement of its config.toml: leave --place out"
        )


def _file(options: argparse.Namespace, resume: Path | None) -> str | None:
    if resume is None:
        config: str | None = options.config
        return config
    # A resumed run keeps its own task and data.
    named = [f"--{name}" for name in ("task", "config", "folder") if getattr(options, name) is not None]
    if named:
        raise ConfigError(f"--resume takes these from the run folder: leave out {', '.join(named)}")
    table_to_resume(resume, "rl")
    return str(resume / CONFIG)
