"""`terrace report`: a run folder as one HTML page, finished or not."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError
from terrace.cli.files import check_page, check_writable, write_file
from terrace.report.tables import quantity

_NAME = "report.html"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        description="Write a run folder as one self-contained HTML page. The run may be unfinished, or killed.",
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="run folder of terrace train or terrace rl")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"page to write (default: {_NAME} in the run folder)")
    parser.add_argument("--force", action="store_true", help="replace the --out file if it is there")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Write the page; returns 0."""
    if rest:
        raise ConfigError(f"unknown argument {rest[0]!r}; see terrace report --help")
    # Imported here: every command's module is loaded for `--help`, which must be quick.
    from terrace.report.rl_folder import is_rl_folder, rl_view
    from terrace.report.rl_page import rl_page
    from terrace.report.run_folder import is_run_folder, run_view
    from terrace.report.run_page import run_page

    folder: Path = options.folder
    if not is_run_folder(folder):
        raise ConfigError(f"{folder} is not a run folder: it has neither config.toml nor metrics.jsonl")
    # Before the run is read: a page that cannot be written is refused at once.
    path = _path(options)
    if is_rl_folder(folder):
        of_rl = rl_view(folder)
        page, status, missing = rl_page(of_rl), of_rl.status, of_rl.missing
    else:
        view = run_view(folder)
        page, status, missing = run_page(view), view.status, view.missing
    write_file("--out", path, page)
    print(status)
    for words in missing:
        print(f"missing: {words}")
    print(f"wrote {path}: {quantity(len(page.encode()), 'B')}; any browser opens it")
    return 0


def _path(options: argparse.Namespace) -> Path:
    if options.out is None:
        if options.force:
            raise ConfigError("--force has no effect without --out FILE")
        own: Path = options.folder / _NAME
        check_writable("--out", own)
        return own
    out: Path = options.out
    check_writable("--out", out)
    if out.exists() and not options.force:
        raise ConfigError(f"--out {out} is there already: name a new file, or add --force to replace it")
    check_page("--out", out)
    return out
