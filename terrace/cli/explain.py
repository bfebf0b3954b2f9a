"""`terrace explain`: the plan, what it costs, and its program, without running anything."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError
from terrace.cli.files import check_not_read, check_writable, write_file
from terrace.cli.options import OVERRIDES_HELP, add_run_options, check_task, resolve_run
from terrace.cli.output import Terminal
from terrace.cli.programs import checked_programs, kept_activations
from terrace.plan.context import is_context_parallel
from terrace.program import Program, program_text
from terrace.program.schedules import Orders, to_csv
from terrace.program.stages import plan_orders
from terrace.report import (
    ASSIGNED,
    attention_table,
    bytes_table,
    inside_table,
    memory_table,
    plan_table,
    time_table,
    wire_words,
)
from terrace.report.stage_tables import (
    order_text,
    parts_words,
    stage_bytes_tables,
    stage_memory_table,
    stage_time_table,
    stages_table,
)
from terrace.simulate import play_whole
from terrace.simulate.timeline_picture import passes_picture
from terrace.train.config import RunConfig
from terrace.train.prediction import predict, resolved_run


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
    parser.add_argument(
        "--stage", type=int, default=0, metavar="N", help="pipeline stage whose program is printed (default: 0)"
    )
    parser.add_argument("--csv", metavar="FILE", help="write the order of a pipeline's tasks in torch's CSV form")
    parser.add_argument("--force", action="store_true", help="replace the --csv file if it is there")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print and return 0."""
    if options.lines is not None and options.lines < 1:
        raise ConfigError(f"--lines {options.lines} must be at least 1")
    check_task(options, rest)
    csv = _csv_file(options)
    config = resolved_run(resolve_run(options, rest))
    programs = checked_programs(config)  # first: a step that does not fit is all there is to read
    if not 0 <= options.stage < len(programs):
        held = (
            f"stages 0 to {len(programs) - 1}" if len(programs) > 1 else "no pipeline, so one stage: leave --stage out"
        )
        raise ConfigError(f"--stage {options.stage}: the plan has {held}")
    if len(programs) > 1:
        _print_pipeline(config, programs, options.stage, csv)
        whose = f"every rank of stage {options.stage}"
    elif csv is not None:
        raise ConfigError(f"--csv {csv}: the plan has no pipeline axis, so there is no order to write; leave --csv out")
    else:
        _print_step(config, programs[0])
        whose = "every rank"
    program, num_micros = programs[options.stage], config.num_micros()
    plural = "es" if num_micros > 1 else ""
    Terminal().print(f"program of {whose}, {num_micros} micro-batch{plural}:", style="bold")
    print(program_text(program, max_lines=options.lines))
    print(f"\nverified: {len(program.instructions)} instructions keep every rule of the instruction set")
    return 0


def _csv_file(options: argparse.Namespace) -> Path | None:
    """Return the file to write; refuses one that is there before anything is computed."""
    if options.csv is None:
        if options.force:
            raise ConfigError("--force has no effect without --csv FILE")
        return None
    path = Path(options.csv)
    check_writable("--csv", path)
    if path.exists() and not options.force:
        raise ConfigError(f"--csv {path} is there already: name a new file, or add --force to replace it")
    check_not_read("--csv", path, {name: getattr(options, name) for name in ("config", "model", "cluster", "plan")})
    return path


def _print_step(config: RunConfig, program: Program) -> None:
    """Print what a rank of a plan without a pipeline keeps, sends and takes."""
    console = Terminal()
    report = predict(config, config.cluster).reports[0]
    console.print(plan_table(config.cluster, config.plan))
    console.print(memory_table(report.memory_bytes, config.cluster.device.memory_bytes))
    console.print(bytes_table(report.sent_bytes, program.layout.tiers))
    print(wire_words(config.plan))
    _print_inside(console, program)
    console.print(time_table(report))


def _print_pipeline(config: RunConfig, programs: Sequence[Program], stage: int, csv: Path | None) -> None:
    """Print the stages and their schedule, as the programs of all stages play it; write the schedule."""
    console, device = Terminal(), config.cluster.device
    kept = [kept_activations(config, program) for program in programs]
    step = predict(config, config.cluster)
    whole = play_whole(step.step)
    orders = run_orders(config, len(programs))
    console.print(plan_table(config.cluster, config.plan))
    console.print(stages_table(programs, config.blocks()))
    print(parts_words(programs, config.blocks()))
    console.print(stage_memory_table(programs, kept, device.memory_bytes))
    for table in stage_bytes_tables([report.sent_bytes for report in step.reports], programs[0].layout.tiers):
        console.print(table)
    print(wire_words(config.plan))
    _print_inside(console, programs[stage])
    console.print(stage_time_table(step.reports))
    console.print(f"schedule {orders.schedule}: the tasks of every stage in order", style="bold")
    print("a cell: virtual stage, F forward, B backward or its halves I input and W weight, micro-batch")
    print(f"{order_text(orders, console.width)}\n")
    console.print("the same over time, as the programs play it", style="bold")
    stages = [program.stage for program in programs]
    print(f"{passes_picture(stages, whole.passes, step.step_s, console.width)}\n")
    if csv is not None:
        write_file("--csv", csv, to_csv(orders))
        print(f"wrote {csv}: the order of {orders.num_stages} stages\n")


def _print_inside(console: Terminal, program: Program) -> None:
    """Print what ranks of the tensor and of the context axis send inside the blocks."""
    if program.tensor.degree > 1:
        console.print(inside_table(program))
    if not is_context_parallel(program.mesh, program.plan):
        return
    if program.plan.balance == "cost":
        print(f"{ASSIGNED}\n")
    else:
        console.print(attention_table(program))


def run_orders(config: RunConfig, num_stages: int) -> Orders:
    """Return the orders that the stages of a run follow."""
    return plan_orders(config.plan, config.blocks(), num_stages, config.num_micros(), config.train.sequence)
