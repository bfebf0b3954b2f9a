"""`terrace simulate` of a plan with a context or pipeline axis.

A plan with a pipeline is played as orders (terrace.planner.staged). One without is the program of the data ranks of one
tensor and context coordinate, with the messages of the other axes inside its blocks. Both are the evaluation of
`terrace plan`, and say its seconds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import fsum
from typing import Any

from terrace.base.errors import ConfigError, PlanError
from terrace.cli.output import Terminal
from terrace.cli.task import task_words
from terrace.cluster import Cluster
from terrace.plan import Plan
from terrace.planner import Choice, Evaluator, Task, runnable_axes
from terrace.planner.bound import Bounds
from terrace.planner.chosen import choice_of
from terrace.planner.estimate import Estimator, Part
from terrace.planner.explain import choice_changes, lack
from terrace.planner.staged import inner_seconds, inner_words, message_places, path_sentence, played_words, stage_steps
from terrace.planner.stages import SERIAL
from terrace.planner.task import Software, num_micros
from terrace.report import plan_table, time_table, wire_words
from terrace.report.advice import advice_words, timeline_text
from terrace.report.page import page_html
from terrace.report.plans import sent_table, split_table
from terrace.report.stages import exposed_table, stages_page, stages_table
from terrace.report.tables import quantity, seconds
from terrace.simulate import CriticalPath, Recording, critical_path, critical_words, memory_curve, record
from terrace.simulate.timeline_picture import memory_picture, picture
from terrace.simulate.trace import stages_trace_json, trace_json
from terrace.train.config import parse_sections


@dataclass(frozen=True, kw_only=True)
class Played:
    """What was played: `show` prints it, `page` and `trace` are whole files."""

    page: str
    trace: str
    words: str  # the task in a line
    show: Callable[[], None]


def play_axes(table: Mapping[str, Any], cluster: Cluster, plan: Plan) -> Played:
    """Return the played step of a plan, from the table of its run; raises `PlanError` for one that cannot be."""
    run = parse_sections(table)  # every key, also of sections that a step does not depend on
    train = run.train
    if train.freeze:
        raise ConfigError(f"train.freeze = {list(train.freeze)}: plans with other axes than data are priced without it")
    if train.error_budget:
        raise ConfigError(
            f"train.error_budget.{next(iter(train.error_budget))}: plans with other axes than data are priced without "
            "a budget; leave it out"
        )
    task = Task(
        model=run.model,
        cluster=cluster,
        batch=train.batch,
        sequence=train.sequence,
        compute=plan.compute,
        master=plan.master,
        wire=plan.wire,
        software=Software(sequence_parallel=plan.sequence_parallel),
    )
    choice = choice_of(task, plan)
    evaluator = Evaluator(Bounds(Estimator(task)))
    estimate = evaluator.evaluate(choice)
    evaluator.check_shares(choice, plan)
    if estimate.needed_bytes > cluster.device.memory_bytes:
        raise PlanError(
            f"plan {plan.name!r} {lack(task, estimate)}: take a smaller micro_batch or shard states further"
        )
    return _serial(evaluator, choice, plan) if choice.schedule == SERIAL else _staged(evaluator, choice, plan)


def _subtitle(task: Task, choice: Choice) -> str:
    """Return model, batch and cluster in a line."""
    words = task_words(task).replace("\n", "; ")
    micros = num_micros(task, choice)
    return f"{words}; {micros} micro-batch{'es' if micros > 1 else ''} of {choice.micro_batch}"


def _staged(evaluator: Evaluator, choice: Choice, plan: Plan) -> Played:
    step, task = stage_steps(evaluator, choice), evaluator.task
    candidates, sent = choice_changes(evaluator, choice), evaluator.sent_bytes(choice)
    advice = advice_words(candidates, step.step_s)
    curves = [stage.curve for stage in step.stages]
    tails, words = [stage.tail for stage in step.stages], _subtitle(task, choice)

    def show() -> None:
        console, tiers = Terminal(), [tier.name for tier in task.cluster.tiers]
        _show_plan(console, task, plan, sent)
        console.print(stages_table(step))
        title = f"messages that nothing hides, stage {step.slowest} (the one that idles least)"
        console.print(exposed_table(step.exposed_s, tiers, step.step_s, title))
        capacity = task.cluster.device.memory_bytes
        title = f"memory of stage {step.fullest}, which needs most, of a device's {quantity(capacity, 'B')}"
        console.print(split_table(step.stages[step.fullest].memory_bytes, title, "B", capacity))
        console.print("a step: stages down, time across", style="bold")
        ends_s = [fsum(spent for _, spent in tail) for tail in tails]
        print(f"{picture(step.timeline, 110, stretch=step.stretch, tails_s=ends_s)}\n")
        highest = quantity(max(curve.peak[0] for curve in curves), "B")
        console.print(f"memory meanwhile, 9 standing for more than nine tenths of {highest}", style="bold")
        print(f"{memory_picture(curves, step.step_s, 110)}\n")
        print(
            f"step {seconds(step.step_s)}, as terrace plan says; bubble {100 * step.bubble:.1f} % of the stages' time"
        )
        print(f"{path_sentence(step)}\n{advice}\n")
        print("\n".join(played_words(step)))

    name = f"stages of plan {plan.name} on {task.cluster.name}"
    return Played(
        words=words,
        page=stages_page(step, sent, candidates, subtitle=words, advice=advice),
        trace=stages_trace_json(step.timeline, step.stretch, tails, curves, name=name, step_s=step.step_s),
        show=show,
    )


def _serial(evaluator: Evaluator, choice: Choice, plan: Plan) -> Played:
    task = evaluator.task
    part = Part(True, (task.model.num_layers,), True)
    recording = record(*evaluator.program(part, choice, num_micros(task, choice)))
    inner = inner_seconds(evaluator, choice, part)
    places = message_places(evaluator, choice)
    path = _with_inner(critical_path(recording), recording, inner, places)
    recording = replace(recording, report=replace(recording.report, time_s=_split(recording.report.time_s, inner)))
    kept_bytes = evaluator.estimator.kept_bytes
    kept = [kept_bytes(kind, choice.rows, choice.micro_batch, choice.recompute) for kind in part.kinds]
    curve = memory_curve(recording, kept)
    candidates, sent = choice_changes(evaluator, choice), evaluator.sent_bytes(choice)
    step_s, tiers = recording.report.step_s, [tier.name for tier in task.cluster.tiers]
    advice = advice_words(candidates, step_s)
    exposed: dict[tuple[str, str], float] = {}
    for category, spent in recording.report.time_s.items():
        if category in places:
            exposed[places[category]] = exposed.get(places[category], 0.0) + spent
    note = (
        f"Played is the program of the data ranks of one {' and '.join(inner)} coordinate, with the messages of "
        f"{' and '.join(inner)} ranks inside its blocks. {' '.join(inner_words(choice))} This version runs the "
        f"{' and '.join(runnable_axes())} axes only, so this step cannot be trained yet."
    )

    def show() -> None:
        console = Terminal()
        _show_plan(console, task, plan, sent)
        console.print(time_table(recording.report))
        console.print(exposed_table(exposed, tiers, step_s, "messages that nothing hides"))
        memory = evaluator.evaluate(choice).memory_bytes
        capacity = task.cluster.device.memory_bytes
        title = f"memory of a device at its peak, of its {quantity(capacity, 'B')}"
        console.print(split_table(memory, title, "B", capacity))
        console.print("a steady step of one rank", style="bold")
        print(f"{timeline_text(recording)}\n\nstep {seconds(step_s)}, as terrace plan says")
        print(f"{critical_words(path)}\n{advice}\n\n{note}")

    whole = (task.cluster, plan)
    words = _subtitle(task, choice)
    page = page_html(
        recording, curve, path, candidates, subtitle=words, advice=advice, whole=whole, sent=sent, note=note
    )
    return Played(
        words=words,
        page=page,
        trace=trace_json(recording, curve),
        show=show,
    )


def _show_plan(console: Terminal, task: Task, plan: Plan, sent: Mapping[tuple[str, str], int]) -> None:
    console.print(plan_table(task.cluster, plan))
    console.print(sent_table(sent, [tier.name for tier in task.cluster.tiers]))
    print(wire_words(plan))


def _split(time_s: Mapping[str, float], inner: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Take the messages of tensor and context ranks out of the forward and the backward."""
    found = dict(time_s)
    for index, name in enumerate(("forward", "backward")):
        found[name] -= fsum(each[index] for each in inner.values())
    return found | {name: fsum(each) for name, each in inner.items()}


def _with_inner(
    path: CriticalPath,
    recording: Recording,
    inner: Mapping[str, tuple[float, float]],
    places: Mapping[str, tuple[str, str]],
) -> CriticalPath:
    """Split what computes on a path in the same way: all of it is alike."""
    found = dict(path.seconds)
    for index, name in enumerate(("forward", "backward")):
        whole_s, passed_s = recording.report.time_s[name], found.get(("", name), 0.0)
        for axis, each in inner.items():
            share_s = passed_s * each[index] / whole_s
            found["", name] -= share_s
            key = (places[axis][1], axis)
            found[key] = found.get(key, 0.0) + share_s
    return replace(path, seconds=found)


def other_axes(plan: Plan) -> bool:
    """Tell whether a plan has an axis for which the program of one rank does not stand for all."""
    return any(row.get(axis, 1) != 1 for row in plan.mapping.values() for axis in ("context", "pipeline"))
