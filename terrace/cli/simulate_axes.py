"""`terrace simulate` of a plan with a pipeline: it is played as orders (terrace.planner.staged).

That is the evaluation of `terrace plan`, and says its seconds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import fsum
from typing import Any

from terrace.base.errors import ConfigError, PlanError
from terrace.cli.output import Terminal
from terrace.cli.task import task_words
from terrace.cluster import Cluster
from terrace.plan import Plan
from terrace.planner import Choice, Evaluator, Task
from terrace.planner.bound import Bounds
from terrace.planner.chosen import choice_of
from terrace.planner.estimate import Estimator
from terrace.planner.explain import choice_changes, lack
from terrace.planner.staged import path_sentence, played_words, stage_steps
from terrace.planner.task import Software, num_micros
from terrace.report import plan_table, wire_words
from terrace.report.advice import advice_words
from terrace.report.plans import sent_table, split_table
from terrace.report.stages import exposed_table, stages_page, stages_table
from terrace.report.tables import quantity, seconds
from terrace.simulate.timeline_picture import memory_picture, picture
from terrace.simulate.trace import stages_trace_json
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
    return _staged(evaluator, choice, plan)


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


def _show_plan(console: Terminal, task: Task, plan: Plan, sent: Mapping[tuple[str, str], int]) -> None:
    console.print(plan_table(task.cluster, plan))
    console.print(sent_table(sent, [tier.name for tier in task.cluster.tiers]))
    print(wire_words(plan))


def has_pipeline(plan: Plan) -> bool:
    """Tell whether a plan has stages, so that the program of one rank does not stand for all."""
    return any(row.get("pipeline", 1) != 1 for row in plan.mapping.values())
