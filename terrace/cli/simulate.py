"""`terrace simulate`: simulates the programs that would run and shows a step from several sides; nothing runs."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from terrace.base.errors import ConfigError
from terrace.base.words import filled, quantity
from terrace.cli.files import check_count, check_not_read, check_page, check_writable, write_file
from terrace.cli.options import check_task, resolve_run
from terrace.cli.overrides import take_word
from terrace.cli.sections import print_sections
from terrace.cli.task import software_words
from terrace.cli.views import VIEWS, draws, step_page, step_trace, step_view, write_csv
from terrace.cluster.named_software import run_by, software_named
from terrace.plan.as_software import run_as
from terrace.plan.gaps import gaps_words
from terrace.train.config import RunConfig
from terrace.train.prediction import check_passes, resolved_run

_SECTIONS = ("model", "cluster", "plan")  # options that may name a file
_FILES = ("page", "trace", "csv")  # options that name a file to write
_WITH_PROGRAM = ("program", "all")  # views that print a program


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the view and writes the files; returns 0."""
    plan, rest = take_word(rest)
    if plan is not None:
        if options.plan is not None:
            raise ConfigError(f"two plans are given, {plan!r} and --plan {options.plan!r}: leave one out")
        options.plan = plan
    check_count("--lines", options.lines)
    # An option without effect is an error, so that a mistyped view does not pass unnoticed.
    if options.view not in _WITH_PROGRAM:
        for name, default in (("lines", None), ("stage", 0)):
            if getattr(options, name) != default:
                raise ConfigError(f"--{name} has no effect on --view {options.view}: add --view program")
    # All outputs are checked before anything is computed.
    outputs = _outputs(options)
    check_task(options, rest)
    run = _as_software(resolve_run(options, rest), options.software)
    view = step_view(resolved_run(run), options)
    # Before anything is printed.
    if outputs or draws(view, options.view):
        check_passes(view.run, "drawn (without a pipeline, --view program draws nothing)")
    written = []  # before anything is printed, so that a file that cannot be written is all there is to read
    if "csv" in outputs:
        written.append(write_csv(view, outputs["csv"]))
    if "page" in outputs:
        written.append(_write("page", outputs["page"], step_page(view)))
    if "trace" in outputs:
        written.append(_write("trace", outputs["trace"], step_trace(view)))
    print(f"{filled(view.subtitle + software_words(run.cluster))}\n")
    if said := gaps_words(run.plan, view.run.plan):
        print(f"{filled(said)}\n")
    print_sections(section for part in VIEWS[options.view] for section in part(view))
    if written:
        print("\n".join(written))
    return 0


def _as_software(run: RunConfig, name: str) -> RunConfig:
    cluster = run_by(run.cluster, software_named(name))
    return replace(run, cluster=cluster, plan=run_as(cluster, run.plan))


def _outputs(options: argparse.Namespace) -> dict[str, Path]:
    outputs = {name: Path(getattr(options, name)) for name in _FILES if getattr(options, name) is not None}
    for name, path in outputs.items():
        if os.path.isdir(path):
            raise ConfigError(f"--{name} {str(path)!r} is a folder: name a file")
        check_writable(f"--{name}", path)
        if path.exists() and not options.force:
            raise ConfigError(f"--{name} {path} is there already: name a new file, or add --force to replace it")
        # With --force an output could otherwise overwrite the command's own input.
        check_not_read(f"--{name}", path, {each: getattr(options, each) for each in ("config", *_SECTIONS)})
    names = list(outputs)
    for index, name in enumerate(names):
        for other in names[:index]:
            # Resolved, since two paths may name one file.
            if outputs[name].resolve() == outputs[other].resolve():
                raise ConfigError(f"--{other} and --{name} both name {outputs[other]}: name two files")
    if "page" in outputs:
        check_page("--page", outputs["page"])
    return outputs


def _write(name: str, path: Path, content: str) -> str:
    write_file(f"--{name}", path, content)
    return f"wrote {path}: {quantity(len(content.encode()), 'B')}"
