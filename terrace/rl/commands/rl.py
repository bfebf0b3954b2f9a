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
from terrace.cli.options import AUTO, flags, resumed
from terrace.cli.overrides import add_ranks, parse_overrides, with_ranks
from terrace.rl.calls.ray_address import check_address
from terrace.train.runs import CONFIG, table_to_resume


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "rl",
        description="Train a model by feedback on what it writes, in processes of this machine.",
        epilog="Any key can be set as --section.key VALUE, e.g. --run.steps 10 --algorithm.name dapo. docs/rl.md has "
        "all.",
    )
    parser.add_argument("--task", metavar="NAME", help="a task that ships with Terrace: sort")
    parser.add_argument("--config", metavar="FILE", help="TOML file of the run")
    parser.add_argument(
        "--model", metavar="PATH", help="Hugging Face folder, whose weights and tokenizer are taken too"
    )
    parser.add_argument("--cluster", metavar="NAME|FILE", help="cluster preset or TOML file (default: the task's)")
    add_ranks(parser)
    parser.add_argument("--plan", metavar="NAME|FILE", help="plan preset or TOML file (default: the task's)")
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="run folder to make (default: runs/TIME)")
    parser.add_argument(
        "--resume",
        metavar="RUN|auto",
        help="go on with this run folder from its newest whole checkpoint, whose weights may have moved to another "
        "--model; auto: go on with --folder if it holds a run, else start there",
    )
    parser.add_argument(
        "--explain", action="store_true", help="predict a step by role, stage and pool, with its memory; start nothing"
    )
    parser.add_argument(
        "--place", choices=("auto",), help="find the fastest placement of the roles on the cluster, and run in it"
    )
    parser.add_argument(
        "--ray", metavar="ADDRESS", help="run roles on the Ray cluster at ADDRESS (auto: that of this machine), on CPUs"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="begin with the pages of memory that keys and values of responses have"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Learns, or explains; returns 0."""
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
    learn(config, options.folder, resume, options.ray, going_on=going_on, verbose=options.verbose)
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
