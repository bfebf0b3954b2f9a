"""`terrace report`: one or several runs, finished or not, as an HTML page; --watch serves it while they run."""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from terrace.base.errors import ConfigError
from terrace.base.words import quantity
from terrace.cli.files import check_page, check_writable, write_file
from terrace.cli.lines import COMPARED_NAME, PORT, REPORT_NAME

if TYPE_CHECKING:
    from terrace.report.run_view import RunView

_PORTS = 1 << 16


class _Page(NamedTuple):
    """A page, with the status lines and missing parts to print, and the compared runs if there are several."""

    text: str
    status: Sequence[str]
    missing: Sequence[str]
    runs: Sequence["RunView"] = ()


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    _check(options)
    if options.watch:
        return _watch(options)
    # Before the runs are read: a page that cannot be written is refused at once.
    path = _path(options)
    page = _page_of(options.folders)
    write_file("--out", path, page.text)
    for line in page.status:
        print(line)
    if page.runs:
        _show_tables(page.runs)
    for words in page.missing:
        print(f"missing: {words}")
    print(f"wrote {path}: {quantity(len(page.text.encode()), 'B')}; any browser opens it")
    return 0


def _check(options: argparse.Namespace) -> None:
    # Imported here: every command's module is loaded for `--help`, which must be quick.
    from terrace.report.overlay import MOST_RUNS
    from terrace.report.record import command_of_folder, is_run_folder

    folders: list[Path] = options.folders
    for folder in folders:
        if not is_run_folder(folder):
            raise ConfigError(f"{folder} is not a run folder: it has neither config.toml nor metrics.jsonl")
    if len(folders) > MOST_RUNS:
        raise ConfigError(f"{len(folders)} runs, but a page shows at most {MOST_RUNS}: name fewer")
    seen: dict[Path, Path] = {}
    for folder in folders:
        same = seen.setdefault(folder.resolve(), folder)
        if same is not folder:
            raise ConfigError(f"{folder} and {same} are the same run: name each once")
    commands = {command_of_folder(folder): folder for folder in folders}
    if len(commands) > 1:
        (one, of_one), (other, of_other) = sorted(commands.items())[:2]
        raise ConfigError(
            f"{of_one} is a run of terrace {one} and {of_other} one of terrace {other}, which have no curves in "
            "common: compare runs of one kind"
        )
    if options.watch:
        for name, given in (("--out", options.out is not None), ("--force", options.force)):
            if given:
                raise ConfigError(f"{name} has no effect with --watch, which writes no file: leave one out")
        if options.port is not None and not 0 <= options.port < _PORTS:
            raise ConfigError(f"--port {options.port} must be from 1 to {_PORTS - 1}, or 0 for any free one")


def _page_of(folders: Sequence[Path]) -> _Page:
    from terrace.report.overlay import legend_lines, missing_of, names_of, overlay_page
    from terrace.report.page import page_html
    from terrace.report.run_view import run_page, run_view

    if len(folders) == 1:
        view = run_view(folders[0])
        return _Page(page_html(run_page(view)), [view.status], view.missing)
    names = zip(names_of(folders), folders, strict=True)
    runs = [replace(run_view(folder, draws=False), name=name) for name, folder in names]
    return _Page(page_html(overlay_page(runs)), legend_lines(runs), missing_of(runs), runs)


def _show_tables(runs: Sequence["RunView"]) -> None:
    from terrace.cli.terminal import Terminal
    from terrace.report.overlay import overlay_tables

    console = Terminal()
    print()
    for table in overlay_tables(runs):
        console.print(table)


def _watch(options: argparse.Namespace) -> int:
    from terrace.report.served import ADDRESS, LivePage, served

    folders, port = options.folders, PORT if options.port is None else options.port
    page = LivePage(folders, lambda: _page_of(folders).text)
    with ExitStack() as stack:
        try:
            server = stack.enter_context(served(page, port))
        except OSError as error:
            raise ConfigError(
                f"--port {port} is not available ({error.strerror}): name another with --port N, or 0 for any free one"
            ) from error
        try:
            # Rendered before the address is printed, so that an error shows here and the first request is fast.
            page.current()
            own = server.server_address[1]
            print(
                f"{server.address} shows the page and updates it; Ctrl-C ends this\n"
                "only this address shows it: keep it from others who use this machine\n"
                f"from another machine: ssh -L {own}:{ADDRESS}:{own} and the name of this one",
                flush=True,
            )
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended")
    return 0


def _path(options: argparse.Namespace) -> Path:
    if options.out is None:
        own: Path = options.folders[0] / (REPORT_NAME if len(options.folders) == 1 else COMPARED_NAME)
        check_writable("--out", own)
        return own
    out: Path = options.out
    check_writable("--out", out)
    if out.exists() and not options.force:
        raise ConfigError(f"--out {out} is there already: name a new file, or add --force to replace it")
    check_page("--out", out)
    return out
