"""`terrace rehearse run|check|clean`: an emulated cluster on this machine, and programs run inside it.

The rehearsal's own messages go to stderr; stdout belongs to the program.
"""

import argparse
import json
import math
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from terrace.base.errors import ConfigError
from terrace.base.extras import needs
from terrace.base.own_path import safe_flags
from terrace.base.words import counted, quantity, seconds
from terrace.cli.files import check_writable, write_file
from terrace.cli.output import Terminated, sigterm_raises
from terrace.cli.overrides import read_cluster
from terrace.cli.terminal import Terminal
from terrace.cluster.cluster import Cluster
from terrace.lab.rehearse import Wiring, wire
from terrace.lab.rehearse.counters import Counts
from terrace.lab.rehearse.launch import run_paced, run_ranks
from terrace.lab.rehearse.measure import Figure, Way, experiments, figures
from terrace.lab.rehearse.names import existing, leftovers
from terrace.lab.rehearse.network import network, remove
from terrace.lab.rehearse.tools import capabilities, check_machine, check_rights
from terrace.lab.rehearse.wiring import SHORTEST_DELAY_S
from terrace.report.table import Table

EXIT_FAILED = 1


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    command = _checked_command(options.command_words)
    if options.fault or options.islands is not None:
        from terrace.lab.commands.faults import run_with_faults

        with _ended_by_signals():
            return run_with_faults(options, rest)
    if options.folder is not None:
        raise ConfigError("--folder is of a rehearsal with faults: give --fault or --islands, or leave it out")
    if options.paced:
        return _run_paced(options, rest, command)
    wiring = wire(_cluster(options.cluster, rest), options.scale)
    if options.counters is not None:
        check_writable("--counters", options.counters)
    check_machine(wiring)
    _mention_leftovers()
    with _ended_by_signals(), network(wiring) as net:
        for line in lost_delays(wiring, net.lost_delays):
            _say(line)
        # Building the network already sends some frames, so counts are differences.
        before, begin_s = net.counts(), time.monotonic()
        ended = run_ranks(net, command)
        taken_s, carried = time.monotonic() - begin_s, net.counts() - before
    # stdout belongs to the program.
    Terminal(stderr=True).print(counts_table(wiring, carried))
    if options.counters is not None:
        document = {
            "cluster": wiring.cluster.name,
            "scale": wiring.scale,
            "world_size": wiring.cluster.world_size,
            "seconds": taken_s,
            "exit_code": ended.code,
            "tiers": carried.table(),
        }
        write_file("--counters", options.counters, json.dumps(document, indent=1) + "\n")
    if ended.rank is not None:
        _say(ended.words)
    return ended.code


def check(options: argparse.Namespace, rest: Sequence[str]) -> int:
    _refuse_command(options)
    wiring = wire(_cluster(options.cluster, rest), options.scale)
    if find_spec("torch") is None:
        raise ConfigError(f"rehearse check {needs('torch')}")
    check_machine(wiring)
    _mention_leftovers()
    begin_s = time.monotonic()
    with _ended_by_signals(), TemporaryDirectory() as folder, network(wiring) as net:
        built_s = time.monotonic() - begin_s
        # Ranks are separate processes in namespaces of their own: experiments and results travel as files.
        tasks, results = Path(folder, "experiments.json"), Path(folder, "seconds.json")
        tasks.write_text(json.dumps([experiment.table() for experiment in experiments(net.wiring)]), encoding="utf-8")
        ended = run_ranks(
            net, [sys.executable, *safe_flags(), "-m", "terrace.lab.rehearse.probe", str(tasks), str(results)]
        )
        if ended.rank is not None:
            _say(ended.words)
            return EXIT_FAILED
        found = figures(net.wiring, json.loads(results.read_text(encoding="utf-8")))
        lost = lost_delays(wiring, net.lost_delays)
    print(
        f"{counted(wiring.cluster.world_size, 'rank')}, each in a namespace of its own, built in {seconds(built_s)}\n"
    )
    Terminal().print(figures_table(wiring, found))
    print("".join(f"{line}\n" for line in lost), end="")
    return 0


def clean(options: argparse.Namespace, rest: Sequence[str]) -> int:
    _refuse_command(options)
    if rest:
        raise ConfigError(f"unknown argument {rest[0]!r}; see terrace rehearse clean --help")
    # Only names of dead rehearsals are removed, but removing any needs rights.
    check_rights(capabilities())
    found = leftovers(existing())
    remove([name for names in found.values() for name in names])
    for owner, names in sorted(found.items()):
        print(f"removed {len(names)} namespaces of rehearsal {owner.pid}, which is no longer alive")
    if not found:
        print("nothing to remove: no rehearsal left anything behind")
    return 0


def _run_paced(options: argparse.Namespace, rest: Sequence[str], command: Sequence[str]) -> int:
    # The command emulates its own cluster and builds no network, so options that describe one have no effect. No option
    # is ignored silently.
    given = [f"--{name}" for name in ("cluster", "counters") if getattr(options, name) is not None] + list(rest[:1])
    if given:
        raise ConfigError(
            f"--paced has no network of its own, and the command names its cluster: leave out {' and '.join(given)}, "
            "or give it after --"
        )
    if options.command_words[0] != "terrace":
        raise ConfigError(
            f"--paced needs a command that begins with terrace, not {options.command_words[0]!r}: another program "
            "would not keep the pace; leave out --paced to limit the network itself"
        )
    if not (math.isfinite(options.scale) and options.scale > 0):
        raise ConfigError(f"--scale {options.scale} must be a number above 0: 0.1 makes every link ten times slower")
    return run_paced(command, options.scale)


def _cluster(name: str | None, rest: Sequence[str]) -> Cluster:
    if name is None:
        raise ConfigError("a rehearsal needs --cluster NAME|FILE: name the machine to emulate, for example lab")
    return read_cluster(name, rest, "put the program's own options after --")


def _checked_command(words: Sequence[str]) -> list[str]:
    # `terrace` means this very installation, whatever PATH has under that name.
    if not words:
        raise ConfigError(
            "no command given: write it after --, as in terrace rehearse run --cluster lab -- terrace train"
        )
    if words[0] == "terrace":
        return [sys.executable, *safe_flags(), "-m", "terrace", *words[1:]]
    if shutil.which(words[0]) is None:
        raise ConfigError(f"no program {words[0]!r} to run: check its name, or give its path")
    return list(words)


def _refuse_command(options: argparse.Namespace) -> None:
    if options.command_words:
        raise ConfigError(f"rehearse {options.action} runs no command: leave out everything from -- on")


def _mention_leftovers() -> None:
    found = leftovers(existing())
    if found:
        pids = ", ".join(str(owner.pid) for owner in sorted(found))
        _say(f"rehearsal {pids} was killed and left namespaces behind: terrace rehearse clean removes them")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    # SIGTERM and the end of the terminal leave the block by an exception, so that the network is removed.
    def end(*_: object) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        raise Terminated

    # SIGHUP arrives when the terminal closes.
    before = signal.getsignal(signal.SIGHUP)
    if before != signal.SIG_IGN:  # ignored under nohup: keep it so
        signal.signal(signal.SIGHUP, end)
    try:
        with sigterm_raises():
            yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _say(line: str) -> None:
    print(f"terrace: {line}", file=sys.stderr, flush=True)


_WAYS = {
    Way.LATENCY: "small message, one way",
    Way.PAIR: "one pair alone",
    Way.UPLINK: "one group's uplink, all its ranks sending",
    Way.ALL_REDUCE: "a rank's share, all-reduce everywhere",
}


def counts_table(wiring: Wiring, carried: Counts) -> Table:
    """Bytes sent over each tier: in total, per rank, and over shared uplinks."""
    title = f"bytes sent on cluster {wiring.cluster.name} at scale {wiring.scale:g}, headers included"
    headings = ("tier", "all ranks", "mean of a rank", "most of a rank", "uplinks")
    table = Table(title=title, headings=headings, left=("tier", "uplinks"))
    for tier in carried.tiers:
        sent = [rank.sent_bytes for rank in tier.ranks]
        links = [f"{_ranks(ranks)}: {quantity(link.sent_bytes, 'B')}" for ranks, link in tier.uplinks]
        figures = (tier.sent_bytes, sum(sent) / len(sent), max(sent))
        table.add_row(tier.name, *(quantity(round(figure), "B") for figure in figures), ", ".join(links))
    return table


def figures_table(wiring: Wiring, found: list[Figure]) -> Table:
    title = f"cluster {wiring.cluster.name} at scale {wiring.scale:g}: configured and measured"
    headings = ("tier", "measured is", "configured", "measured", "deviation")
    table = Table(title=title, headings=headings, left=("tier", "measured is"))
    for figure in found:
        show = seconds if figure.way == Way.LATENCY else partial(quantity, unit="B/s")
        none = "the kernel's own" if figure.way == Way.LATENCY else "not limited"
        configured = none if figure.configured is None else show(figure.configured)
        deviation = "" if figure.deviation is None else f"{100 * figure.deviation:+.1f} %"
        # Latency is a tier's first row: a rule separates tiers.
        if figure.way == Way.LATENCY and table.rows:
            table.add_section()
        table.add_row(figure.tier, _WAYS[figure.way], configured, show(figure.measured), deviation)
    return table


def lost_delays(wiring: Wiring, lost: tuple[str, ...]) -> list[str]:
    """One line for each tier whose latency is not emulated, with the reason."""
    lines = []
    for net in wiring.nets:
        wanted = seconds(net.tier.latency_s)
        if net.tier.name in lost:
            lines.append(f"the latency of tier {net.tier.name}, {wanted}, is not added: this kernel has no netem")
        elif 0 < net.tier.latency_s < SHORTEST_DELAY_S:
            lines.append(
                f"the latency of tier {net.tier.name}, {wanted}, is the kernel's own: below "
                f"{seconds(SHORTEST_DELAY_S)} none is added"
            )
    return lines


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
