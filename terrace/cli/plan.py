"""`terrace plan`: searches plans of a model on a cluster, shows the best with reasons, and writes it for `terrace
train`.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, NamedTuple

import tomli_w

from terrace.base.collection import no_collection
from terrace.base.errors import ConfigError, PlanError
from terrace.base.schema import dump
from terrace.base.sealed import sealed_toml
from terrace.base.words import counted, filled, quantity, seconds
from terrace.cli.files import check_count, write_file
from terrace.cli.lines import Plan as PlanLine
from terrace.cli.no_plan import axes_words, nothing_words
from terrace.cli.overrides import parse_overrides
from terrace.cli.task import as_option, check_output, check_price, read_task, software_words, task_words, with_axes
from terrace.cli.terminal import Terminal
from terrace.cluster.cluster import Cluster
from terrace.plan.plan import Plan
from terrace.plan.search_limits import FINALISTS
from terrace.plan.wire import BETWEEN_STAGES
from terrace.planner.advice import Change
from terrace.planner.bottleneck import waits_outside
from terrace.planner.by_cost import by_cost
from terrace.planner.evaluate import step_of
from terrace.planner.explain import preset_changes, reasons
from terrace.planner.formats import Allowed, Searched, of_every_class, parse_allowed
from terrace.planner.headroom import headrooms, settled
from terrace.planner.kept import KeptSearch, take_keep
from terrace.planner.loops import Loop, island_pins, island_task, least_loop, rows_of
from terrace.planner.members import Deal, best_deal, slowest
from terrace.planner.narrow_states import parse_ways
from terrace.planner.operations import parse_operations
from terrace.planner.outer_bounds import parse_outer
from terrace.planner.pins import Pins, parse_pins
from terrace.planner.products import ProductsFound, find_with, take_products
from terrace.planner.ranking import Estimate
from terrace.planner.robust import least_regret, scenarios
from terrace.planner.schedule_pins import check_schedule
from terrace.planner.space import Space
from terrace.planner.task import Task, plan_of
from terrace.planner.tensor_chunks import find_cut, take_chunks
from terrace.planner.ties import Ties
from terrace.planner.verdicts import Headroom, refusal
from terrace.program.schedules.registry import schedule_names
from terrace.report.cycles import cycle_table, cycle_words
from terrace.report.loops import chunks_words, formats_words, loop_words, products_words, stored_words
from terrace.report.members import unequal_words
from terrace.report.plans import (
    changes_table,
    figures_words,
    headrooms_table,
    hidden_words,
    plans_table,
    reserve_words,
    split_table,
)
from terrace.report.routing import alternatives_words, division_words
from terrace.report.tables import plan_table, sent_table, with_media
from terrace.report.training_cost import energy_words, parse_tokens, throughput_words, training_words
from terrace.report.uncertainty import add_regrets, doubt_words, plan_bands_words, search_words, ties_words, widest_band
from terrace.simulate.bands import Band, band_of
from terrace.simulate.fullest import Job, worst_words
from terrace.simulate.hidden import hidden_between_nodes
from terrace.simulate.step import predict_step
from terrace.train.planned import TASK, num_machines, planned_table, read_planned, torchrun

if TYPE_CHECKING:
    from terrace.cli.own_plan import OwnPlan
    from terrace.cli.taught import Taught

_OF_SEARCH = (
    "axes",
    "pin",
    "outer",
    "teacher",
    "allow",
    "allow_rounding",
    "tokens",
    "recompute",
    "robust",
    "best",
    "limit",
    "out",
)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Searches, prints and writes; or shows how a plan scales. Returns 0."""
    if options.scale:
        return _scale(options, rest)
    with no_collection():  # the process is short, and caches keep most of its objects
        return _search(options, rest)


def _search(options: argparse.Namespace, rest: Sequence[str], kept_bytes: int = 0) -> int:
    """`kept_bytes`: memory of a device that is left to the teacher."""
    for name in ("best", "limit"):
        check_count(f"--{name}", getattr(options, name))
    check_price(options.price)
    tokens = None if options.tokens is None else parse_tokens(options.tokens)
    check_output("--out", options.out, options)
    if options.out.suffix != ".toml":
        raise ConfigError(f"--out {options.out} must end in .toml: that is how commands know a plan's file")
    task = read_task(options, rest, read_planned(options.plan), also=("plan", "teacher"))
    named, axes = task.cluster, with_axes(task.cluster, options.axes)
    taught = _taught(options, rest, task)
    if taught is not None:
        task, axes = taught.student(kept_bytes), tuple(axis for axis in axes if axis != "context")
    given = replace(task, operations=parse_operations(options.recompute, task.blocks, axes))
    if options.robust and len(given.cluster.alike) > 1:
        raise ConfigError(
            f"--robust compares plans of equal shares, and members of tier {given.cluster.tiers[-1].name} differ: "
            "leave it out, or make them alike"
        )
    own = _own_plan(options, rest, given)
    # Under equal shares the slowest member decides, so plans are searched as if all were like it.
    task = whole = replace(given, cluster=slowest(given.cluster, given.compute))
    tiers = [tier.name for tier in task.cluster.tiers]
    bounds = None if options.outer is None else parse_outer(options.outer, tiers[-1])
    chunks, texts = take_chunks(options.allow, task)
    products, texts = take_products(texts, task)
    keeps, texts = take_keep(texts, task)
    ways, formats = parse_ways(texts, task)
    for each in options.allow_rounding:
        formats += of_every_class(each, task, islands=bounds is not None)
    allowed = parse_allowed(formats, task, islands=bounds is not None)
    pins, rows = parse_pins(options.pin, task.cluster, schedule_names()), rows_of(allowed, tiers)
    if bounds is not None:
        task, pins = island_task(whole, bounds, rows), island_pins(whole, pins)
    space = Space(task=task, axes=axes, pins=pins)
    check_schedule(space)

    def search(space: Space) -> ProductsFound:
        return find_with(products, space, allowed, ways, max(options.best, FINALISTS), options.limit)

    kept = KeptSearch(keeps, search)
    cut = find_cut(chunks, space, kept)
    found = cut.products
    waiting = None if bounds is None or found.searched.found.best else bounds.waiting()
    if waiting is not None:  # memory was counted with the largest loop
        bounds, space = waiting, replace(space, task=island_task(whole, waiting, rows))
        cut = find_cut(chunks, space, kept)
        found = cut.products
    searched = found.searched
    if not searched.found.best:
        beside_it = f"beside a teacher of {quantity(kept_bytes, 'B')} a rank, " if kept_bytes else ""
        raise PlanError(beside_it + nothing_words(space, searched.found, options.pin, options.limit))
    task = searched.space.task
    ties = settled(searched.space, searched.evaluator, searched.found.best, options.limit)
    rooms: Sequence[Headroom] = ()
    if options.robust:
        rooms = headrooms(searched.space, searched.evaluator, ties.best[0], options.limit)
        others = [room.best for room in rooms if room.best is not None]
        ties = least_regret(searched.evaluator, ties, others, scenarios(task.cluster))
    best, beside = ties.best[0], tuple[str, ...]()
    plan, loop = _chosen(task, best), None
    if bounds is not None:
        loop = least_loop(task, best, plan, bounds, rows)
    stored = stored_words(ways, task, best.step_s, found.wide_s)
    if taught is not None:
        if (held := taught.held_bytes(plan)) > kept_bytes:
            return _search(options, rest, held)  # plans that leave it room
        beside = (taught.words(plan),)
    used = *beside, chunks_words(cut, best.step_s), products_words(found, best.step_s), kept.words(task, best)
    deal = _deal(given, ties, loop, lambda pins: search(replace(space, pins=pins)), pins, allowed)
    said = 'balance = "cost" is not tried with islands, or with unequal shares or stages of members'
    if task.lengths and deal is None and loop is None:
        deal, said = by_cost(task, [(_chosen(task, each), each) for each in ties.best])
    used = unequal_words(given.cluster, deal), *used, said if task.lengths else ""
    answers = Answers(tokens, options.price, own, used, stored, rooms)
    _show(options, searched, ties, allowed, plan, loop, answers, deal, named)
    return 0


def _deal(
    given: Task, ties: Ties, loop: Loop | None, search: Callable[[Pins], ProductsFound], pins: Pins, allowed: Allowed
) -> Deal | None:
    """The best shares of unequal members; None if members are alike or no plan with shares is faster."""
    if len(given.cluster.alike) == 1:
        return None
    if loop is not None:
        return best_deal(given, [(loop.plan, loop.estimate)], loop.estimate.step_s)
    plans = [(_chosen(given, each), each) for each in ties.best]
    with suppress(PlanError):  # a state pinned outside
        inside = search(island_pins(given, pins)).searched  # plans whose states lie inside members can have shares
        plans += [(_chosen(inside.space.task, each), each) for each in inside.found.best]
    tier = given.cluster.tiers[-1].name
    between = ((message.value, allowed.get((message.value, tier))) for message in BETWEEN_STAGES)
    formats = {message: choice.formats for message, choice in between if choice is not None}
    return best_deal(given, plans, ties.best[0].step_s, formats)


def _scale(options: argparse.Namespace, rest: Sequence[str]) -> int:
    for name in _OF_SEARCH:
        if getattr(options, name) != vars(PlanLine)[name].default:
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect with --scale, which searches nothing: leave it out"
            )
    if options.force and options.picture is None:
        raise ConfigError("--force has no effect with --scale without --picture FILE: leave it out")
    # Imported here: a search needs none of it.
    from terrace.cli.scale import show_scaling

    show_scaling(options, rest)
    return 0


def _own_plan(options: argparse.Namespace, rest: Sequence[str], task: Task) -> "OwnPlan | None":
    keys = parse_overrides(rest, of_run=False).get("plan")
    if options.plan is None and keys is None:
        return None
    # Imported here: reading a plan as a run does needs all of a run's modules, and most calls compare nothing.
    from terrace.cli.own_plan import own_plan

    return own_plan(task, options.plan, keys)


def _taught(options: argparse.Namespace, rest: Sequence[str], task: Task) -> "Taught | None":
    keys = parse_overrides(rest, of_run=False).get("teacher")
    if options.teacher is None and keys is None:
        return None
    # Imported here: a run's modules, which a search without a teacher does not need.
    from terrace.cli.taught import taught_of

    return taught_of(options, keys, task)


class Answers(NamedTuple):
    """Answers beyond the best plan.

    `own` compares the user's own plan. `used` and `stored` are lines on whether the search used what the user allowed:
    narrow tensor messages and 8-bit products, and narrow optimizer states. `rooms`: the fastest plan for each headroom,
    where it was found before; else empty.
    """

    tokens: int | None
    price: float | None
    own: "OwnPlan | None"
    used: tuple[str, ...]
    stored: str
    rooms: Sequence[Headroom]


def _show(
    options: argparse.Namespace,
    searched: Searched,
    ties: Ties,
    allowed: Allowed,
    plan: Plan,
    loop: Loop | None,
    answers: Answers,
    deal: Deal | None,
    cluster: Cluster,
) -> None:
    # The search sees one island and the slowest member; the file and the figures are of all.
    space, best, console = searched.space, ties.best[0], Terminal()
    task, whole, shown = space.task, replace(space.task, cluster=cluster), best
    if loop is not None:
        whole, plan, shown = replace(loop.task, cluster=cluster), loop.plan, loop.estimate
    if deal is not None:
        whole, plan, shown = deal.task, deal.plan, deal.estimate
    outcome = _write(whole, plan, shown, options)  # first, so that nothing is lost where the tables are cut off
    print(f"{filled(task_words(whole))}\n")
    of = "" if loop is None else "of an island "
    first = ties.best[: options.best]
    table = plans_table(task, first, f"the best plans {of}with the {axes_words(space.axes)}")
    if whole.cluster.failures.are_known:
        # Imported here, as below: where nothing fails there is nothing to add.
        from terrace.cli.goodput import of_estimates
        from terrace.report.goodput import add_columns

        add_columns(table, of_estimates(whole.cluster, searched.evaluator, first))
    add_regrets(table, ties)
    console.print(table)
    _show_about(task, searched, ties, first)
    if answers.own is not None:
        print(f"{filled(answers.own.words(whole, shown))}\n")
    band = band_of(whole.cluster, plan)
    console.print(plan_table(whole.cluster, plan))
    if loop is None and (
        rests := hidden_words(hidden_between_nodes(searched.evaluator.predicted(step_of(task, plan))))
    ):
        print(f"{filled(rests)}\n")
    if allowed:
        words_of_formats = formats_words(allowed, plan, math.inf if deal else best.step_s, searched.plain_s)
        print("\n".join(map(filled, words_of_formats.splitlines())) + "\n")
    for words in (*answers.used, answers.stored):
        if words:
            print(f"{filled(words)}\n")
    if loop is not None:
        print(f"{filled(loop_words(loop))}\n")
        console.print(cycle_table(loop.cycle))
        print(f"{filled(cycle_words(loop.cycle, None))}\n")
    cost = (
        throughput_words(whole, shown),
        training_words(whole, shown, answers.tokens, answers.price),
        energy_words(whole, shown, answers.tokens),
    )
    print("\n".join(filled(f"{each} ({band})") for each in cost if each))
    print(f"{filled(figures_words(whole, shown, band, full=options.full_attention_flops))}\n")
    if whole.cluster.failures.are_known:
        from terrace.cli.goodput import show_ways

        show_ways(whole, plan, console)
    _show_figures(whole, plan, shown, band, console)
    rooms = answers.rooms or headrooms(space, searched.evaluator, best, options.limit)
    roomy = [plan_of(task, room.best.candidate) for room in rooms if room.best is not None]
    title = f"the fastest plan {of}for each headroom{widest_band(task.cluster, roomy)}"
    console.print(headrooms_table(task, rooms, title))
    # After the tables above, since these play further plans.
    why = "why this plan: what one change would cost" + (" an island" if loop is not None else "")
    _show_changes(reasons(space, searched.evaluator, best.candidate), best, why, console)
    if division := division_words(plan):
        lines = division, alternatives_words(predict_step(step_of(task, _chosen(task, best))))
        print(filled("\n".join(filter(None, lines))) + "\n")
    _show_changes(preset_changes(task, space.pins), best, "why no preset, each with its best numbers", console)
    if options.outer is None and waits_outside(task, plan, best):
        tier = task.cluster.tiers[-1].name
        words = (
            f'most of the step waits for tier {tier}; with --outer "every<=100" it would be synchronised more rarely'
        )
        print(filled(words))
    print(outcome)


def _show_about(task: Task, searched: Searched, ties: Ties, first: Sequence[Estimate]) -> None:
    settled = ties_words(ties, len(first)), doubt_words(ties, len(first))
    about = plan_bands_words(task, first), *settled, search_words(searched.found)
    print("\n".join(filter(None, about)) + "\n")


def _show_changes(changes: Sequence[Change], best: Estimate, title: str, console: Terminal) -> None:
    band = widest_band(changes[0].cluster, [each.plan for each in changes if each.cost]) if changes else ""
    console.print(changes_table(changes, best.step_s, ("plan", "against the best", "remark"), title + band))


def _show_figures(task: Task, plan: Plan, shown: Estimate, band: Band, console: Terminal) -> None:
    console.print(split_table(shown.time_s, f"seconds of a step, {band}", "s"))
    device = task.cluster.device
    title = f"memory of a device at its fullest moment (a category may peak at another), of {device.room_words}"
    console.print(split_table(shown.memory_bytes, title, "B", device.memory_bytes))
    print(f"{filled(reserve_words())}\n\n" if device.type == "cuda" else "", end="")
    job = Job(cluster=task.cluster, plan=plan, num_micros=shown.num_micros)
    worst = worst_words(job, task.blocks, task.sequence)
    print(f"{filled(worst)}\n" if worst else "", end="")
    sent = shown.sent_bytes
    tiers = with_media(sent, [tier.name for tier in task.cluster.tiers])
    console.print(sent_table(sent, dict.fromkeys(message for message, _ in sent), tiers))


def _write(task: Task, plan: Plan, shown: Estimate, options: argparse.Namespace) -> str:
    # The planner also prices plans that the runtime cannot train yet.
    refused = refusal(task.cluster, plan, task.blocks)
    name = " ".join(task.cluster.name.split())  # a comment ends with its line
    step = f"{seconds(shown.step_s)} {band_of(task.cluster, plan)}"
    head = (
        f"# Found by terrace plan for {counted(task.batch, 'sequence')} of {counted(task.sequence, 'token')} a step on "
        f"cluster {name}\n# with {task.cluster.tiers[-1].size} on tier {task.cluster.tiers[-1].name}; "
        f"predicted step {step}{software_words(task.cluster)}. [task] below says what it was made for.\n"
    )
    table = dump(plan)
    table[TASK] = planned_table(task.model, task.cluster, task.batch, task.sequence)
    write_file("--out", options.out, sealed_toml(head + tomli_w.dumps(table)))
    from terrace.launch.called import called  # here, as below: --help needs none of it

    look = f"to look at its step: {called()} simulate {quote(str(options.out))}{as_option(task.cluster)}"
    look += f" --lengths {quote(options.lengths)}" if options.lengths else ""
    if refused:
        said = filled(f"wrote {options.out}, to be looked at: it cannot be trained, since {refused}")
        return f"{said}\n{look}"
    return f"wrote {options.out}\n{_to_train(task.cluster, options.out)}\n{look}"


def _chosen(task: Task, best: Estimate) -> Plan:
    # Written with the stages and chunks that were priced, so that exactly these run.
    return replace(plan_of(task, best.candidate), **best.chosen)


def _to_train(cluster: Cluster, path: Path) -> str:
    from terrace.launch.called import called

    command = f"train --plan {quote(str(path))}"
    if cluster.device.type == "cpu" or cluster.world_size == 1:
        return f"to train: {called()} {command}"
    nodes = num_machines(cluster)
    if nodes == 1:
        return f"to train, on a machine with {cluster.world_size} devices: {called()} {command}"
    command += " --folder SHARED_FOLDER/run"
    each = f"to train, on each of the {nodes} machines: {torchrun(cluster, command)}"
    return f"{each}\n  or, under Slurm: srun {called()} {command}"
