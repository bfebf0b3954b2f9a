"""`terrace plan`: search the plans of a model on a cluster, show the best with reasons, and write it for `terrace
train`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import tomli_w

from terrace.base.errors import ConfigError, PlanError
from terrace.base.schema import dump
from terrace.base.sealed import sealed_toml
from terrace.base.words import counted
from terrace.cli.files import write_file
from terrace.cli.launching import num_machines, torchrun
from terrace.cli.task import TASK_EPILOG, add_task_options, check_output, read_task, task_words
from terrace.cli.terminal import Terminal
from terrace.cluster.cluster import Cluster
from terrace.plan.layout import Layout
from terrace.plan.plan import AXES, Plan
from terrace.planner.evaluate import step_of
from terrace.planner.expert_tiers import alternatives
from terrace.planner.explain import preset_verdicts, reasons
from terrace.planner.pins import Pins, parse_axes, parse_pins
from terrace.planner.ranking import TIE, Estimate
from terrace.planner.search import Found, find, runs_today
from terrace.planner.space import Space, divisors
from terrace.planner.task import MOST_SEQUENCES, Task, plan_of
from terrace.planner.unsatisfied import unsatisfied
from terrace.planner.verdicts import lack
from terrace.program.schedules.registry import schedule_names
from terrace.report.experts import alternatives_words, experts_words
from terrace.report.plans import figures_words, plan_words, plans_table, split_table, verdicts_table
from terrace.report.tables import plan_table, quantity, seconds, sent_table
from terrace.simulate.advice import Advice, Job, advice, worst_words
from terrace.simulate.step import predict_step
from terrace.train.planned import TASK, planned_table


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("plan", epilog=TASK_EPILOG)
    add_task_options(parser)
    parser.add_argument(
        "--axes", metavar="LIST", default="all", help="axes to search, e.g. data,tensor, or all (default: all)"
    )
    parser.add_argument(
        "--pin", action="append", default=[], metavar="PIN", help="fix a choice: tensor=1, pipeline<=4, params=node"
    )
    parser.add_argument("--best", type=int, default=5, metavar="N", help="plans to show (default: 5)")
    parser.add_argument("--limit", type=int, default=400, metavar="N", help="plans to simulate at most (default: 400)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("plan.toml"),
        metavar="FILE",
        help="plan to write (default: plan.toml)",
    )
    parser.add_argument("--force", action="store_true", help="replace the file if it is there")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Search, print, write; returns 0."""
    for name in ("best", "limit"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} {getattr(options, name)} must be at least 1")
    check_output(options.output, options)
    if options.output.suffix != ".toml":
        raise ConfigError(f"--output {options.output} must end in .toml: that is how commands know a plan's file")
    task = read_task(options, rest)
    pins = parse_pins(options.pin, task.cluster, schedule_names())
    axes = parse_axes(options.axes)
    space = Space(task=task, axes=axes, pins=pins)
    found, evaluator = find(space, count=options.best, limit=options.limit)
    if not found.best:
        raise PlanError(_nothing(task, found, pins, axes, options.pin))
    best, console = found.best[0], Terminal()
    outcome = _write(task, best, options)  # first, so that nothing is lost where the tables are cut off
    print(f"{task_words(task)}\n")
    console.print(plans_table(task, found.best, f"the best plans with the {_axes(axes)}"))
    print(f"{_how(found)}\n")
    plan = _chosen(task, best)
    console.print(plan_table(task.cluster, plan))
    print(f"{figures_words(task, best)}\n")
    console.print(split_table(best.time_s, "seconds of a step", "s"))
    capacity = task.cluster.device.memory_bytes
    title = (
        f"memory of a device at its fullest moment (a category may peak at another), of its {quantity(capacity, 'B')}"
    )
    console.print(split_table(best.memory_bytes, title, "B", capacity))
    job = Job(cluster=task.cluster, plan=plan, num_micros=best.num_micros)
    worst = worst_words(job, task.blocks, task.sequence)
    print(f"{worst}\n" if worst else "", end="")
    sent, tiers = best.sent_bytes, [tier.name for tier in task.cluster.tiers]
    console.print(sent_table(sent, dict.fromkeys(message for message, _ in sent), tiers))
    # After the tables above, since the verdicts simulate further plans.
    near = reasons(space, evaluator, best.candidate)
    console.print(verdicts_table(task, near, best, "why this plan: what one change would cost"))
    if plan.experts:
        step = step_of(task, plan)
        lines = experts_words(plan), alternatives_words(predict_step(step), alternatives(step))
        print("\n".join(filter(None, lines)) + "\n")
    console.print(verdicts_table(task, preset_verdicts(task, pins), best, "why no preset, each with its best numbers"))
    print(outcome)
    return 0


def _nothing(task: Task, found: Found, pins: Pins, axes: Sequence[str], pinned: Sequence[str]) -> str:
    ranks = task.cluster.world_size
    # On the data axis alone the error can name numbers that work.
    if found.nearest is None and tuple(axes) == ("data",) and task.batch % ranks:
        below = task.batch // ranks * ranks
        near = " or ".join(str(each) for each in (below, below + ranks) if 0 < each <= MOST_SEQUENCES)
        return (
            f"--batch {task.batch} does not divide over the {ranks} ranks of the data axis: use "
            f"{f'--batch {near}, ' if near else ''}{_sizes_that_divide(task)}or --axes all"
        )
    if found.nearest is None:
        return _no_shape(task, pins, axes, pinned)
    nearest = found.nearest
    # The advice is for the plan that lacks the least memory.
    tips = advice(
        task.cluster,
        plan_of(task, nearest.candidate),
        task.blocks,
        task.sequence,
        nearest.num_micros,
    )
    more = "" if set(axes) == set(AXES) else ", and --axes all shows what other axes would give"
    return (
        f"no plan fits; the nearest ({plan_words(task, nearest.candidate)}) {lack(task, nearest)}; "
        f"{_remedy(task, tips)}; a shorter --seq needs less{more}"
    )


def _remedy(task: Task, tips: Advice) -> str:
    # The sentence of the advice begins with the missing memory, which the error has already stated.
    words = tips.sentence.split("; ", 1)[-1]
    if tips.job is None:
        return words
    layout = Layout.of(tips.job.cluster, tips.job.plan)
    batch = layout.span(layout.outermost) * tips.job.plan.micro_batch * tips.job.num_micros
    return words if batch == task.batch else f"{words} at --batch {batch}"


def _no_shape(task: Task, pins: Pins, axes: Sequence[str], pinned: Sequence[str]) -> str:
    if not pinned:
        return (
            f"{counted(task.batch, 'sequence')} of {counted(task.sequence, 'token')} and "
            f"{counted(task.model.num_layers, 'layer')} do not divide over "
            f"{counted(task.cluster.world_size, 'rank')} by the {_axes(axes)}: use another --batch or another --nodes"
        )
    words = f"no plan with the {_axes(axes)} satisfies {' and '.join(pinned)} with {counted(task.batch, 'sequence')}"
    for name in AXES:
        # A pin on an axis that is not searched contradicts --axes; say so instead of blaming the batch.
        if name not in axes and pins.ranges.get(name, (1, 1))[0] > 1:
            return f"{words}: the {name} axis is pinned above 1 but not searched; add --axes {','.join(axes)},{name}"
    words += f": {unsatisfied(Space(task=task, axes=tuple(axes), pins=pins)) or 'drop a pin'}"
    return words if set(axes) == set(AXES) else f"{words}, or search more axes, as with --axes all"


def _sizes_that_divide(task: Task) -> str:
    size = task.cluster.tiers[-1].size
    inner = task.cluster.world_size // size
    # With that many ranks each gets a whole number of sequences.
    fitting = divisors(task.batch // inner) if task.batch % inner == 0 else ()
    near = [*[each for each in fitting if each < size][-1:], *[each for each in fitting if each > size][:1]]
    return f"--nodes {' or '.join(str(each) for each in near)}, " if near else ""


def _how(found: Found) -> str:
    words = f"{counted(found.num_evaluated, 'plan')} simulated of {found.num_roots} shapes and micro-batches"
    if found.proved:
        return f"{words}; no other of the space ranks above these (less than {TIE:.1%} apart is equally fast)"
    return f"{words}; stopped at --limit, and no other plan can be faster than {seconds(found.least_s)}"


def _write(task: Task, best: Estimate, options: argparse.Namespace) -> str:
    # The planner also prices plans that the runtime cannot train yet.
    refused = runs_today(task, best.candidate)
    name = " ".join(task.cluster.name.split())  # a comment ends with its line
    head = (
        f"# Found by terrace plan for {counted(task.batch, 'sequence')} of {counted(task.sequence, 'token')} a step on "
        f"cluster {name}\n# with {task.cluster.tiers[-1].size} on tier {task.cluster.tiers[-1].name}; "
        f"predicted step {seconds(best.step_s)}. [task] below says what it was made for.\n"
    )
    table = dump(_chosen(task, best))
    table[TASK] = planned_table(task.model, task.cluster, task.batch, task.sequence)
    write_file("--output", options.output, sealed_toml(head + tomli_w.dumps(table)))
    look = f"to look at its step: terrace simulate {quote(str(options.output))}"
    if refused is not None:
        return f"wrote {options.output}, to be looked at: it cannot be trained, since {refused}\n{look}"
    return f"wrote {options.output}\n{_to_train(task.cluster, options.output)}\n{look}"


def _chosen(task: Task, best: Estimate) -> Plan:
    # With the stages and the chunks of experts that were priced, so that they run.
    return replace(plan_of(task, best.candidate), stages=best.stages, expert_chunks=best.expert_chunks)


def _to_train(cluster: Cluster, path: Path) -> str:
    command = f"train --plan {quote(str(path))}"
    if cluster.device.backend == "cpu" or cluster.world_size == 1:
        return f"to train: terrace {command}"
    nodes = num_machines(cluster)
    if nodes == 1:
        return f"to train, on a machine with {cluster.world_size} devices: terrace {command}"
    command += " --folder SHARED_FOLDER/run"
    each = f"to train, on each of the {nodes} machines: {torchrun(cluster, command)}"
    return f"{each}\n  or, under Slurm: srun terrace {command}"


def _axes(names: Sequence[str]) -> str:
    return f"{', '.join(names)} {'axis' if len(names) == 1 else 'axes'}"
