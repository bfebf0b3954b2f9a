"""`terrace explain`: the plan, what it costs, and its program, without running anything."""

import argparse
from collections.abc import Sequence
from typing import Any

from terrace.base.errors import ConfigError
from terrace.cli.options import OVERRIDES_HELP, add_run_options, check_task, resolve_run
from terrace.cli.output import Terminal
from terrace.program import build, program_text, verify
from terrace.report import bytes_table, inside_table, memory_table, plan_table, time_table, wire_words
from terrace.simulate import simulate, step_costs
from terrace.simulate.footprint import work_of


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "explain",
        help="print a plan, its cost and its program",
        description="Print where a plan puts every state, what a step costs, and its program. Nothing is run.",
        epilog=OVERRIDES_HELP,
    )
    add_run_options(parser)
    parser.add_argument("--lines", type=int, metavar="N", help="lines of the program to print at most (default: all)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print and return 0."""
    if options.lines is not None and options.lines < 1:
        raise ConfigError(f"--lines {options.lines} must be at least 1")
    check_task(options, rest)
    config = resolve_run(options, rest)
    console = Terminal()
    blocks, num_micros = config.blocks(), config.num_micros()
    program = build(config.cluster, config.plan, blocks, num_micros, config.train.sequence)
    verify(program)  # first: a step that does not fit is all there is to read
    work = work_of(config.cluster, config.plan, config.model, config.train.sequence)
    report = simulate(program, step_costs(program, work))
    console.print(plan_table(config.cluster, config.plan))
    console.print(memory_table(report.memory_bytes, config.cluster.device.memory_bytes))
    console.print(bytes_table(report.sent_bytes, program.layout.tiers))
    print(wire_words(config.plan))
    if program.tensor.degree > 1:
        console.print(inside_table(program))
    console.print(time_table(report))
    plural = "es" if num_micros > 1 else ""
    console.print(f"program of every rank, {num_micros} micro-batch{plural}:", style="bold")
    print(program_text(program, max_lines=options.lines))
    print(f"\nverified: {len(program.instructions)} instructions keep every rule of the instruction set")
    return 0
