"""`terrace simulate`: play a step of the program that would run, and look at it."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError
from terrace.base.files import write_atomic
from terrace.cli.files import check_not_read, check_writable
from terrace.cli.options import OVERRIDES_HELP, add_run_options, check_task, run_table, take_word
from terrace.cli.output import Terminal
from terrace.cli.simulate_axes import has_pipeline, play_axes
from terrace.cluster.presets import parse_cluster
from terrace.model.config import num_params
from terrace.plan import parse_plan
from terrace.program import Program, build, verify
from terrace.report import ASSIGNED, bytes_table, memory_table, plan_table, time_table, wire_words
from terrace.report.advice import advice_words, timeline_text
from terrace.report.page import page_html
from terrace.report.stages import exposed_table
from terrace.report.tables import quantity, seconds
from terrace.simulate import (
    Costs,
    Recording,
    changes,
    critical_path,
    critical_words,
    exposed_by_axis,
    memory_curve,
    record,
    step_costs,
)
from terrace.simulate.activations import activations_by_block
from terrace.simulate.footprint import work_of
from terrace.simulate.trace import trace_json
from terrace.train.config import RunConfig, parse_run

_SECTIONS = ("model", "cluster", "plan")  # options that may name a file


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "simulate",
        usage="terrace simulate [PLAN] [options] [--section.key VALUE ...]",
        help="play a step without running it: where its time goes, as text, a page or a trace",
        description="PLAN is a plan preset or TOML file, as for --plan.",
        epilog=OVERRIDES_HELP,
    )
    add_run_options(parser)
    parser.add_argument("--page", metavar="FILE", help="write a self-contained HTML page of the step")
    parser.add_argument("--trace", metavar="FILE", help="write a trace for Perfetto or chrome://tracing")
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print and write what was asked for; return 0."""
    plan, rest = take_word(rest)
    if plan is not None:
        if options.plan is not None:
            raise ConfigError(f"two plans are given, {plan!r} and --plan {options.plan!r}: leave one out")
        options.plan = plan
    outputs = _outputs(options)
    check_task(options, rest)
    table = run_table(options, rest)
    cluster = parse_cluster(dict(table["cluster"]))
    whole = parse_plan(table["plan"], cluster)
    if has_pipeline(whole):
        played = play_axes(table, cluster, whole)
        written = [_write(path, getattr(played, name)) for name, path in outputs.items()]
        print(f"{played.words}\n")
        played.show()
        if written:
            print("\n".join(["", *written]))
        return 0
    return _run_program(parse_run(table), outputs)


def _run_program(config: RunConfig, outputs: Mapping[str, Path]) -> int:
    """Play the program that `terrace train` would run."""
    program = build(config.cluster, config.plan, config.blocks(), config.num_micros(), config.train.sequence)
    verify(program)

    price = _price(config)
    recording = record(program, price(program))
    curve, path = memory_curve(recording, *_activations(config, program)), critical_path(recording)
    candidates = changes(program, price)
    advice = advice_words(candidates, recording.report.step_s)
    written = []  # before anything is printed, so that a file that cannot be written is all there is to read
    if "page" in outputs:
        page = page_html(recording, curve, path, candidates, subtitle=_subtitle(config), advice=advice)
        written.append(_write(outputs["page"], page))
    if "trace" in outputs:
        written.append(_write(outputs["trace"], trace_json(recording, curve)))
    print(f"{_subtitle(config)}\n")
    _show(recording)
    print(f"{critical_words(path)}\n{advice}\n")
    size, moment_s = curve.peak
    print(
        f"over the step, memory is highest at {seconds(moment_s)}: {quantity(size, 'B')} with activations, without the "
        "device's context and what its allocator loses, which terrace plan adds"
    )
    if written:
        print("\n".join(written))
    return 0


def _price(config: RunConfig) -> Callable[[Program], Costs]:
    """Return what prices the program of any plan for this model and sequence, on the program's own cluster."""

    def price(program: Program) -> Costs:
        return step_costs(program, work_of(program.cluster, program.plan, config.model, config.train.sequence))

    return price


def _activations(config: RunConfig, program: Program) -> tuple[list[int], list[int]]:
    """Return the bytes of every block that one micro-batch keeps, and those that its backward takes on top."""
    cluster, plan = program.cluster, program.plan
    work = work_of(cluster, plan, config.model, config.train.sequence)
    kept, working = zip(*activations_by_block(work, plan, program.blocks, cluster.device.backend), strict=True)
    return list(kept), list(working)


def _show(recording: Recording) -> None:
    console, program, report = Terminal(), recording.program, recording.report
    console.print(plan_table(program.cluster, program.plan))
    console.print(bytes_table(report.sent_bytes, program.layout.tiers))
    print(wire_words(program.plan))
    if program.plan.balance == "cost":
        print(f"{ASSIGNED}\n")
    console.print(memory_table(report.memory_bytes, program.cluster.device.memory_bytes))
    console.print(time_table(report))
    exposed = exposed_by_axis([recording])
    if exposed:
        title = "messages that nothing hides (no pipeline, so no bubble)"
        console.print(exposed_table(exposed, program.layout.tiers, report.step_s, title))
    console.print("a steady step of one rank", style="bold")
    print(f"{timeline_text(recording)}\n")


def _outputs(options: argparse.Namespace) -> dict[str, Path]:
    """Return the files to write; refuses those that are there before anything is computed."""
    outputs = {name: Path(getattr(options, name)) for name in ("page", "trace") if getattr(options, name) is not None}
    for name, path in outputs.items():
        if os.path.isdir(path):
            raise ConfigError(f"--{name} {str(path)!r} is a folder: name a file")
        check_writable(f"--{name}", path)
        if path.exists() and not options.force:
            raise ConfigError(f"--{name} {path} is there already: name a new file, or add --force to replace it")
        check_not_read(f"--{name}", path, {each: getattr(options, each) for each in ("config", *_SECTIONS)})
    if len({path.resolve() for path in outputs.values()}) < len(outputs):
        raise ConfigError(f"--page and --trace both name {outputs['page']}: name two files")
    if options.force and not outputs:
        raise ConfigError("--force has no effect without --page FILE or --trace FILE")
    return outputs


def _write(path: Path, content: str) -> str:
    try:
        write_atomic(path, content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return f"wrote {path}: {quantity(len(content.encode()), 'B')}"


def _subtitle(config: RunConfig) -> str:
    return (
        f"{config.model.family} decoder, {quantity(num_params(config.model), ' parameters')}; a step of "
        f"{config.train.batch} sequences x {config.train.sequence} tokens, {config.num_micros()} "
        f"micro-batch{'es' if config.num_micros() > 1 else ''} of {config.plan.micro_batch} per rank"
    )
