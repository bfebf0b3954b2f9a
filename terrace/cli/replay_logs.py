"""`terrace replay RUN`: repeats a run in one process from its log: of a roster's islands, or of shares dealt anew."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from terrace.base.errors import ConfigError
from terrace.cli.output import sigterm_raises
from terrace.cli.terminal import Terminal
from terrace.train.config import RunConfig
from terrace.train.deals import DEALS, read_deals
from terrace.train.runs import CONFIG, read_trained

if TYPE_CHECKING:
    from terrace.train.job import RunJob
    from terrace.train.one_process import Repeated

LOG = "roster.jsonl"
_MOST_ROWS = 24


def replay_log(folder: Path, log: Path | None) -> int:
    """Prints a table of exchanges or deals; returns 1 if a figure differs from the run's, else 0.

    Raises `ConfigError` for a folder without a log or without a run, and for a log of another run.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not there: give a run folder, or a folder with the run folders of islands")
    runs = runs_in(folder)
    islands = {path: config for path, config in runs.items() if config.elastic.meet}
    if islands:
        log = log or folder / LOG
        if not log.is_file():
            raise ConfigError(
                f"{log} is not there: name a step of this run (--step N), or the log of terrace meet (--log FILE)"
            )
        return _show(_of_islands(islands, log), "Exchanges", "exchange", "islands")
    deals = [path for path in runs if (path / DEALS).is_file()]
    if log is not None or folder not in deals:
        raise ConfigError(
            f"{folder} holds neither {DEALS} nor run folders of islands: name a step of a run (--step N), or give a "
            f"folder with the {LOG} of terrace meet and the run folders of its islands"
        )
    return _show(_of_deals(folder, runs[folder]), "Deals", "deal", "shares")


def runs_in(folder: Path) -> dict[Path, RunConfig]:
    """The run of `terrace train` in `folder`, or those in its folders, with their configurations."""
    places = [folder] if (folder / CONFIG).is_file() else sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    return {each: read_trained(each, "which draws anew: replay takes runs of terrace train") for each in places}


def _of_islands(islands: dict[Path, RunConfig], log: Path) -> "list[Repeated]":
    from terrace.launch.start import launch_local
    from terrace.roster.place import read_log
    from terrace.train.roster_replay import check_log, replay_islands, written_by

    entries = read_log(log)
    written = written_by(islands, entries, log)
    job = _job(*next(iter(islands.items())))
    check_log(job, entries)
    with sigterm_raises():
        found: list[Repeated] = launch_local(1, replay_islands, (job, entries, written))
    return found


def _of_deals(folder: Path, config: RunConfig) -> "list[Repeated]":
    from terrace.launch.start import launch_local
    from terrace.train.one_process import Written, replay_deals

    dealt = read_deals(folder)
    if any(each.formats for each in dealt):
        raise ConfigError(
            f"{folder / DEALS} has formats of messages between members, and one process sends none: name a step "
            "(--step N) to repeat on the ranks of the run"
        )
    job, written = replace(_job(folder, config), deals=dealt), Written()
    written.add(folder)
    with sigterm_raises():
        found: list[Repeated] = launch_local(1, replay_deals, (job, written))
    return found


def _job(folder: Path, config: RunConfig) -> "RunJob":
    """The job of a run, checked to be one that a single process repeats."""
    from terrace.cli.checks import check_memory_here
    from terrace.cli.here import check_alone
    from terrace.data.prepared import prepare_sources
    from terrace.data.tokenizer import load_tokenizer
    from terrace.launch.start import local_devices
    from terrace.probe.machine import memory_bytes
    from terrace.train.job import RunJob
    from terrace.train.one_process import on_one_rank
    from terrace.train.prediction import checked_programs, forget_programs, resolved_run

    check_alone("replay")
    config = replace(config, train=replace(config.train, compile=False))
    alone = on_one_rank(config)
    check_memory_here(alone, local_devices(), memory_bytes())
    checked_programs(alone)
    forget_programs()
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.bos, config.data.eos)
    sources = prepare_sources(config.data, tokenizer, config.train.sequence, lambda text: print(text, flush=True))
    return RunJob(run=resolved_run(config), folder=folder, sources=sources, tokenizer_fingerprint=tokenizer.fingerprint)


def _show(found: "Sequence[Repeated]", title: str, number: str, who: str) -> int:
    from terrace.report.table import Table

    shown = found[-_MOST_ROWS:]
    table = Table(
        title=f"{title}, repeated in one process",
        headings=(number, who, "steps", "tokens", "loss", "compared", "largest difference"),
        left=(who,),
        rows=(
            (
                str(each.number),
                each.who,
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
        print(f"first difference, at {number} {wrong.number}: {wrong.wrong}")
        return 1
    print(
        f"{len(found)} {title.lower()} are those of the run: {sum(each.compared for each in found)} figures and "
        f"checkpoints differ by at most {max((each.gap for each in found), default=0.0):.2g}"
    )
    return 0
