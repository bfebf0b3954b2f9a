"""`terrace rehearse run --fault ...`: faults on islands, or on the ranks of a run without islands."""

import argparse
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from terrace.base.errors import ConfigError
from terrace.base.own_path import safe_flags
from terrace.cli.terminal import Terminal
from terrace.lab.faults.findings import MARGIN_S, Findings, findings
from terrace.lab.faults.grammar import Fault, check_faults, parse_fault
from terrace.lab.faults.islands import Process, Rehearsal, Seen, Start
from terrace.lab.faults.picture import picture
from terrace.lab.faults.restarts import Restarts
from terrace.lab.rehearse.launch import guarded, start_whole
from terrace.report.table import Table

EXIT_FAILED = 1
_OURS = ("--meet", "--island", "--elastic.meet", "--elastic.island", "--folder", "--resume")
_MOST_ISLANDS = 16  # each is a process that imports torch


def run_with_faults(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Rehearses; returns 0 if all promises were kept. Its lines go to stdout, those of its processes to files."""
    words, faults = _checked(options, rest)
    folder: Path = options.folder or Path("runs", time.strftime("rehearsal-%Y%m%d-%H%M%S"))
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--folder {folder} cannot be made ({error.strerror}): name one that is not there") from error
    folder = folder.resolve()
    _say(f"rehearsal in {folder}")
    with _starting() as start:
        if not options.islands:
            return _restarts(words, faults, folder, start)
        seen = Rehearsal(words, options.islands, faults, folder, start, _say).run()
    return _shown(seen, *_sizes(folder))


def _checked(options: argparse.Namespace, rest: Sequence[str]) -> tuple[list[str], list[Fault]]:
    given = [f"--{name}" for name in ("cluster", "counters") if getattr(options, name) is not None] + list(rest[:1])
    given += ["--paced"] * options.paced + ["--scale"] * (options.scale != 1.0)
    if given:
        raise ConfigError(
            f"faults are rehearsed on the machine's own network, with the command's own cluster: leave out "
            f"{' and '.join(given)}, or give it after --"
        )
    if options.islands is not None and not 1 <= options.islands <= _MOST_ISLANDS:
        raise ConfigError(
            f"--islands {options.islands}: islands are processes of this machine; use 1 to {_MOST_ISLANDS}"
        )
    faults = [parse_fault(text) for text in options.fault or ()]
    check_faults(faults, options.islands or 0)
    words = list(options.command_words)
    if words[:2] != ["terrace", "train"]:
        raise ConfigError(
            f"faults are for a training run: write terrace train ... after --, not {' '.join(words[:2]) or 'nothing'!r}"
        )
    for word in words:
        if word.partition("=")[0] in _OURS:
            raise ConfigError(f"{word} is given by the rehearsal: leave it out after --")
    return words[1:], faults


@contextmanager
def _starting() -> Iterator[Start]:
    """Starts processes of terrace that die with this one, however it ends."""
    with guarded() as control:

        def start(words: Sequence[str], output: Path, orders: str) -> Process:
            process = start_whole([sys.executable, *safe_flags(), "-m", "terrace", *words], output, orders)
            control.write(f"{process.pid}\n")
            control.flush()
            return process

        yield start


def _sizes(folder: Path) -> tuple[int, int]:
    """Sequences of a step and of a micro-batch, from the first run folder that was made."""
    for path in sorted(folder.glob("*/config.toml")):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        return int(table["train"]["batch"]), int(table["plan"]["micro_batch"])
    return 1, 1


def _shown(seen: Seen, batch: int, micro_batch: int) -> int:
    found = findings(seen, batch, micro_batch)
    print()
    print("\n".join(picture(seen)))
    print()
    Terminal().print(table_of(found))
    print("\n".join(lines_of(found)))
    for line in found.wrong:
        print(f"NOT KEPT: {line}")
    return EXIT_FAILED if found.wrong else 0


def table_of(found: Findings) -> Table:
    limit = f"others waited, at most {found.patience_s + MARGIN_S:g} s"
    table = Table(title="faults", headings=("fault", "after", "lost", limit), left=("fault", "lost"))
    for each in found.found:
        after = "never" if each.at_s is None else f"{each.at_s:.1f} s"
        table.add_row(each.fault.text, after, each.lost, "" if each.waited_s is None else f"{each.waited_s:.1f} s")
    return table


def lines_of(found: Findings) -> list[str]:
    lines = [f"steps lost by the other islands: {found.num_steps_lost}; processes left running: {found.num_left}"]
    if found.healing:
        ratios = ", ".join(f"{each:.2f}" for each in found.healing)
        lines.append(f"bytes that healed, over anchor and momentum: {ratios}")
    if found.slower:
        lines.append(f"an exchange that heals takes {100 * found.slower:+.1f} % of a window more than another one")
    return lines


def _restarts(words: Sequence[str], faults: Sequence[Fault], folder: Path, start: Start) -> int:
    if not faults:
        raise ConfigError("no fault is given: give --fault, or --islands N for a rehearsal without faults")
    restarts = Restarts(words, faults, folder, start, _say)
    restarts.run()
    table = Table(
        title="starts of the run",
        headings=("start", "first step", "steps again", "exit code", "ended after the fault", "left running"),
    )
    for number, life in enumerate(restarts.lives, 1):
        ended = f"{life.ending_s:.1f} s" if life.code else ""
        table.add_row(str(number), str(life.first_step), str(life.num_again), str(life.code), ended, str(life.num_left))
    Terminal().print(table)
    for line in restarts.wrong:
        print(f"NOT KEPT: {line}")
    return EXIT_FAILED if restarts.wrong else 0


def _say(line: str) -> None:
    print(line, flush=True)
