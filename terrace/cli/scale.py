"""`terrace scale`: the predicted curve of a plan from one member of the outermost tier to many."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError, PlanError
from terrace.base.files import write_atomic
from terrace.cli.output import Terminal
from terrace.cli.task import TASK_EPILOG, add_task_options, read_task, refuse_existing, task_words, with_formats
from terrace.plan import PRESETS, Plan, parse_plan, preset
from terrace.planner import Pins, Point, Space, Task, curve, find, plan_of
from terrace.planner.explain import lack, placement_of
from terrace.planner.scaling import Scaling, sizes_up_to
from terrace.report.plans import plan_words, scaling_svg, scaling_table
from terrace.train.config import section


def add_parser(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("scale", help="predict how a plan scales", epilog=TASK_EPILOG)
    add_task_options(parser)
    parser.add_argument(
        "--plan", metavar="NAME|FILE", help="preset or TOML file (default: the best plan at the largest size)"
    )
    parser.add_argument(
        "--price", type=float, metavar="P", help="price of a device and hour, for cost per million tokens"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write a picture of both curves, an SVG file")
    parser.add_argument("--force", action="store_true", help="replace the file if it is there")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print both curves; returns 0."""
    if options.price is not None and not 0 < options.price < 1e9:
        raise ConfigError(f"--price {options.price} must be a positive number")
    if options.output is not None:
        refuse_existing(options.output, options.force)
    task = read_task(options, rest)
    plan, words = _plan(task, options.plan)
    task = with_formats(task, plan)
    outer, console = task.cluster.tiers[-1], Terminal()
    print(f"{task_words(task)}\nplan {plan.name}: {words}\n")
    curves: dict[str, list[Point]] = {}
    kinds: tuple[tuple[Scaling, str], ...] = (
        ("weak", "weak scaling: the same sequences per device"),
        ("strong", "strong scaling: the same batch"),
    )
    for scaling, title in kinds:
        points = curve(task, plan, sizes_up_to(outer.size), scaling)
        curves[f"{scaling} scaling"] = points
        console.print(scaling_table(points, title, outer.name, options.price))
    if not any(point.estimate for points in curves.values() for point in points):
        raise PlanError(f"plan {plan.name!r} runs at no size: {curves['strong scaling'][-1].reason}")
    if options.output is not None:
        title = f"predicted scaling of plan {plan.name} on {task.cluster.name}"
        write_atomic(options.output, scaling_svg(curves, title))
        print(f"wrote {options.output}")
    return 0


def _plan(task: Task, name: str | None) -> tuple[Plan, str]:
    """Return the plan and how to call it: a file as it is; of a preset, with the numbers that are best at full size."""
    if name is not None and name not in PRESETS:
        plan = parse_plan(section("plan", name), task.cluster)
        return plan, f"params {plan.params}, grads {plan.grads}, optimizer {plan.optimizer}"
    placements, own = None, task
    if name is not None:
        base = preset(name, task.cluster)
        own = replace(task, wire=base.wire)
        placements = (placement_of(own, base),)
    found, _ = find(Space(task=own, axes=("data",), pins=Pins(), placements=placements), count=1)
    if not found.best:
        failed = f"preset {name!r} does not run" if name is not None else "no data-parallel plan runs"
        why = lack(own, found.nearest) if found.nearest else f"{task.batch} sequences do not divide over the ranks"
        raise PlanError(f"{failed} at the largest size: {why}; use more nodes or another --batch")
    choice = found.best[0].choice
    return plan_of(own, choice, name=name or "planned"), plan_words(own, choice)
