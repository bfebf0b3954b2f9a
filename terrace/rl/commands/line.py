"""The command line of `terrace rl`."""

from pathlib import Path
from typing import Any, Literal

from terrace.cli.lines import FOLDER, RANKS
from terrace.cli.option import Line, flag, option


class Rl(Line):
    run = "terrace.rl.commands.rl:run"
    description = "Train a model by feedback on what it writes, in processes of this machine."
    epilog = "Any key can be set as --section.key VALUE, e.g. --run.steps 10 --algorithm.name dapo. docs/rl.md has all."
    task: str | None = option("NAME", "a task that ships with Terrace: sort")
    config: str | None = option("FILE", "TOML file of the run")
    model: str | None = option("PATH", "Hugging Face folder, whose weights and tokenizer are taken too")
    cluster: str | None = option("NAME|FILE", "cluster preset or TOML file (default: the task's)")
    ranks: int | None = RANKS
    plan: str | None = option("NAME|FILE", "plan preset or TOML file (default: the task's)")
    folder: Path | None = FOLDER
    resume: str | None = option(
        "RUN|auto",
        "go on with this run folder from its newest whole checkpoint, whose weights may have moved to another --model; "
        "auto: go on with --folder if it holds a run, else start there",
    )
    explain: bool = flag("predict a step by role, stage and pool, with its memory; start nothing")
    place: Literal["auto"] | None = option(
        None, "find the fastest placement of the roles on the cluster, and run in it"
    )
    ray: str | None = option("ADDRESS", "run roles on the Ray cluster at ADDRESS (auto: that of this machine), on CPUs")
    verbose: bool = flag("begin with the pages of memory that keys and values of responses have")


def add_parser(commands: Any) -> None:
    Rl.add_to(commands, "rl")
