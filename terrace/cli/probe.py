"""`terrace probe`: measures this machine, or the ranks of this job, and writes the results as a cluster file.

Without a launcher the ranks are local processes, as in `terrace train`; under torchrun this process is one of them.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import tomli_w

from terrace.base.errors import ConfigError
from terrace.base.schema import dump
from terrace.base.sealed import sealed_toml
from terrace.base.words import counted, quantity, seconds
from terrace.cli.files import check_writable, write_file
from terrace.cli.overrides import read_cluster
from terrace.cli.terminal import Terminal
from terrace.cluster.presets import UNNAMED
from terrace.probe.assemble import Constant, Probed, assemble
from terrace.report.table import Table

_LONGEST_S = 86_400  # of all measurements; a longer time would be a mistake
_HEADER = """\
# Written by `terrace probe`. Figures marked "measured" or "fitted" are what {ranks} ranks reached here, all at work at
# once; those marked "preset" are the starting cluster's. Use it as --cluster {name}.
"""


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    cluster = read_cluster(options.cluster or UNNAMED, rest, "a probe takes only --cluster.key VALUE", options.ranks)
    if not (math.isfinite(options.seconds) and options.seconds > 0):
        raise ConfigError(f"--seconds {options.seconds:g} must be a number above 0: 60 is enough for most machines")
    if options.seconds > _LONGEST_S:
        raise ConfigError(
            f"--seconds {options.seconds:g} must be at most {_LONGEST_S}, a day: 60 is enough for most machines"
        )
    from terrace.cli import probing

    def check() -> None:
        check_out(options.out, options.force)

    # The file is checked inside, because under a launcher only one rank may check it.
    samples = probing.run(cluster, options.seconds, check)
    if samples is not None:  # on the one rank that writes
        probed = assemble(cluster, samples)
        header = _HEADER.format(ranks=probed.cluster.world_size, name=options.out)
        write_file("--out", options.out, sealed_toml(f"{header}{tomli_w.dumps(dump(probed.cluster))}"))
        show_constants(probed, options.out)
    return 0


def check_out(path: Path, force: bool) -> None:
    """Raises `ConfigError` if no file can be written at `path`, or one exists and `force` is not set."""
    check_writable("--out", path)
    if path.suffix != ".toml":
        raise ConfigError(f"--out {path} must end in .toml: a cluster is found by that")
    if path.exists() and not force:
        raise ConfigError(f"--out {path} is there already: name another file, or replace it with --force")


def show_constants(probed: Probed, path: Path) -> None:
    """Prints the constants found by a probe, and the file at `path` that holds them."""
    title = f"cluster {probed.cluster.name}, probed with {counted(probed.cluster.world_size, 'rank')} at once"
    table = Table(title=title, headings=("constant", "before", "now", "mark", "fit error"), left=("constant", "mark"))
    for row in probed.rows:
        error = "" if row.error is None else f"{100 * row.error:.0f} %"
        before = "-" if row.before is None else _words(row, row.before)
        table.add_row(row.name, before, _words(row, row.now), row.mark, error)
    Terminal().print(table)
    for row in probed.rows:
        # A rate fitted to these times would be infinite.
        if row.is_bound:
            print(
                f"{row.name}: at least this, since larger messages took no longer than small ones; probe again while "
                "the machine has no other work, or with more --seconds"
            )
    print(
        "fit error: mean deviation of the times measured from those that the constants give\n"
        f"optimizer steps on large shards moved {quantity(probed.optimizer_bytes_per_s, 'B/s')} a rank\n"
        f"wrote {os.fspath(path)}: use it as --cluster {os.fspath(path)}"
    )
    sys.stdout.flush()


def _words(row: Constant, value: float) -> str:
    if row.unit == "s":
        return seconds(value)
    return quantity(value, row.unit) if row.unit and row.unit != "elements" else f"{value:.3g}"
