"""`terrace replay RUN` of islands: repeats all exchanges of a roster in one process, from its log."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from terrace.base.errors import ConfigError
from terrace.cli.output import sigterm_raises
from terrace.cli.terminal import Terminal
from terrace.train.config import RunConfig
from terrace.train.runs import CONFIG, read_trained

if TYPE_CHECKING:
    from terrace.train.roster_replay import Repeated

LOG = "roster.jsonl"
_MOST_ROWS = 24


def replay_roster(folder: Path, log: Path | None) -> int:
    """Prints a table of exchanges; returns 1 if a figure differs from the islands', else 0.

    Raises `ConfigError` for a folder without a log or without islands, and for a log of another run.
    """
    runs, log = islands_in(folder), log or folder / LOG
    if not log.is_file():
        raise ConfigError(
            f"{log} is not there: name a step of this run (--step N), or the log of terrace meet (--log FILE)"
        )
    from terrace.cli.checks import check_memory_here
    from terrace.cli.here import check_alone
    from terrace.data.prepared import prepare_sources
    from terrace.data.tokenizer import load_tokenizer
    from terrace.launch.start import launch_local, local_devices
    from terrace.probe.machine import memory_bytes
    from terrace.roster.place import read_log
    from terrace.train.job import RunJob
    from terrace.train.prediction import checked_programs, forget_programs, resolved_run
    from terrace.train.roster_replay import Written, check_log, on_one_rank, replay_islands

    check_alone("replay")
    entries, written = read_log(log), dict[str, Written]()
    for each, config in runs.items():
        written.setdefault(config.elastic.island, Written()).add(each)
    first, config = next(iter(runs.items()))
    config = replace(config, train=replace(config.train, compile=False))
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.bos, config.data.eos)
    sources = prepare_sources(config.data, tokenizer, config.train.sequence, lambda text: print(text, flush=True))
    job = RunJob(run=resolved_run(config), folder=first, sources=sources, tokenizer_fingerprint=tokenizer.fingerprint)
    check_log(job, entries)
    alone = on_one_rank(config)
    check_memory_here(alone, local_devices(), memory_bytes())
    checked_programs(alone)
    forget_programs()
    with sigterm_raises():
        found: list[Repeated] = launch_local(1, replay_islands, (job, entries, written))
    return _show(found)


def islands_in(folder: Path) -> dict[Path, RunConfig]:
    """The run folders of islands in `folder`, or `folder` itself, with their configurations.

    Raises `ConfigError` if there is none.
    """
    places = [folder] if (folder / CONFIG).is_file() else sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    found = {each: read_trained(each, "which is no island of a roster") for each in places}
    islands = {each: config for each, config in found.items() if config.elastic.meet}
    if not islands:
        raise ConfigError(
            f"{folder} is no run folder of an island, and has none: name a step of a run (--step N), or a folder with "
            f"the {LOG} of terrace meet and the run folders of its islands"
        )
    return islands


def _show(found: Sequence["Repeated"]) -> int:
    from terrace.report.table import Table

    shown = found[-_MOST_ROWS:]
    table = Table(
        title="Exchanges, repeated in one process",
        headings=("exchange", "islands", "steps", "tokens", "loss", "compared", "largest difference"),
        left=("islands",),
        rows=(
            (
                str(each.exchange),
                ", ".join(each.islands),
                f"{each.first} to {each.last}" if each.first else "",
                f"{each.tokens:,}",
                f"{each.loss:.6g}" if each.tokens else "",
                str(each.compared),
                f"{each.gap:.2g}" if each.compared else "",
            )
            for each in shown
        ),
    )
    Terminal().print(table)
    if len(shown) < len(found):
        print(f"These are the last {len(shown)} of {len(found)}.")
    wrong = next((each for each in found if each.wrong), None)
    if wrong is not None:
        print(f"first difference, at exchange {wrong.exchange}: {wrong.wrong}")
        return 1
    gap = max((each.gap for each in found if not math.isnan(each.gap)), default=0.0)
    print(
        f"{len(found)} exchanges are those of the run: {sum(each.compared for each in found)} figures and checkpoints "
        f"of islands differ by at most {gap:.2g}"
    )
    return 0
