"""What the page of a run says of a run of `terrace rl`: rewards, an iteration by pool and role, samples, phases."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from terrace.base.errors import TerraceError
from terrace.base.fitting import numbers
from terrace.base.words import counted, quantity, scaled, seconds
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import parse_cluster
from terrace.model.config import parse_model
from terrace.model.facts import family_of
from terrace.plan.plan import Plan
from terrace.plan.presets import command_plan
from terrace.report.compared import ComparedAmounts, bytes_table, time_table
from terrace.report.markup import meter
from terrace.report.record import RunRecord, mean_by_name, steady
from terrace.report.run_curves import Curve, Point, lines_of
from terrace.report.run_view import Figure, Part, beside_prediction
from terrace.report.sections import Section
from terrace.report.table import Table
from terrace.report.tables import model_size, plan_title
from terrace.report.train_part import final_mean
from terrace.rl.pages.iteration import call_colour, iteration_chart, recorded_step
from terrace.rl.pages.samples import samples_html, samples_of

_LEARNING = ("actor", "critic", "cost_critic")  # folders of checkpoints
_FEW = 5  # steps at the start and the end of a run whose means a note compares
_STEP, _REST = "step", "rest"

Numbers = Mapping[str, float]

# (title, unit, {line: metric}, whether the axis starts at 0); curves without data are left out.
_CURVES: tuple[tuple[str, str, Mapping[str, str], bool], ...] = (
    ("KL to the reference", "mean of all tokens", {"KL": "actor/kl"}, False),
    ("KL coefficient", "", {"coefficient": "actor/kl_coef"}, True),
    ("Entropy", "nats a token", {"entropy": "actor/entropy"}, True),
    ("Response length", "tokens", {"mean": "response_length/mean", "longest": "response_length/max"}, True),
    ("Responses that were cut", "share", {"cut": "response_length/clip_ratio"}, True),
    ("Clip fraction", "share of tokens", {"actor": "actor/pg_clipfrac", "critic": "critic/vf_clipfrac"}, True),
    ("Largest difference of rollout and training", "log-probability", {"difference": "rollout/logprob_diff_max"}, True),
    ("Groups of equal rewards", "share", {"all right": "group/all_right", "all wrong": "group/all_wrong"}, True),
    ("Lambda", "multiplier of the cost", {"lambda": "safe/lambda"}, True),
    ("Loss of critics", "", {"reward": "critic/vf_loss", "cost": "cost_critic/vf_loss"}, True),
    (
        "Explained variance of critics",
        "1 is all",
        {"reward": "critic/vf_explained_var", "cost": "cost_critic/vf_explained_var"},
        False,
    ),
    ("Turns of a response", "turns", {"mean": "environment/turns/mean", "most": "environment/turns/max"}, True),
    (
        "Tokens and tool calls",
        "share",
        {"tokens of environments": "environment/foreign_tokens", "calls that were valid": "environment/calls_read"},
        True,
    ),
    ("Replicas that waited for environments", "seconds of a step", {"waited": "environment/stalled_s"}, True),
    ("Age of responses", "steps", {"mean": "sync/version_lag", "oldest": "sync/version_lag_max"}, True),
    ("Gradient norm before clipping", "", {"actor": "actor/grad_norm", "critic": "critic/grad_norm"}, True),
    ("Throughput", "tokens/s over all ranks", {"tokens/s": "perf/tokens_per_s"}, True),
)
_CHANGING = ("KL coefficient", "Age of responses")  # curves that are left out if they are constant


def rl_part(record: RunRecord, draws: bool) -> Part:
    """Curves and figures by verl's names of metrics, and the sections of feedback."""
    # Damaged lines may have values that no sum or scale takes.
    figures = [numbers(each.values) for each in record.records]
    after = steady(figures)
    step_s, phases = _mean(after, "time/step"), mean_by_name([each.time_s for each in record.steady])
    subtitle, plan = _model_and_plan(record)
    curves = _curves(record)
    samples = record.lines("samples.jsonl", "samples", samples_of)
    sections = [
        Section(
            title="Timeline of one iteration",
            charts=iteration_chart(record.lines("calls.jsonl", "the timeline", recorded_step)) if draws else (),
        ),
        Section(title="Samples", body=samples_html(samples)),
        Section(title="Seconds of a step by phase", table=_phases_table(phases, step_s)),
        Section(
            title="Seconds of a step by stage, predicted and measured", table=_stages_table(record, phases, step_s)
        ),
        Section(
            title="Bytes of a hand-over, all ranks together",
            table=bytes_table(_hand_over(record, figures), "over"),
            is_half=True,
        ),
    ]
    return Part(
        subtitle=subtitle,
        steps=steps if isinstance(steps := record.section("run").get("steps"), int) else None,
        figures=_figures(figures, record.records[-1].step) if figures else (),
        notes=_notes(record, figures, step_s) if figures else (),
        curves=curves,
        sections=sections,
        plan=plan,
        saves=_LEARNING,
        final=_final(curves),
    )


def _model_and_plan(record: RunRecord) -> tuple[str, tuple[Cluster, Plan] | None]:
    """Subtitle and plan from the settings."""
    if not record.settings:
        return "", None
    try:
        names = ("cluster", "plan", "model", "run", "algorithm")
        if not all(isinstance(record.settings.get(name), Mapping) for name in names):
            raise TerraceError("a section is no table")
        cluster, plan, model, run, algorithm = (dict(record.section(name)) for name in names)
        here = parse_cluster(cluster)
        placed, decoder = command_plan(plan, here), parse_model(model)
    except TerraceError as error:
        record.missing.append(f"the plan's table: {error}")
        return "", None
    subtitle = (
        f"{algorithm.get('name')}; {family_of(decoder)} decoder of {model_size(decoder)}; a step draws "
        f"{run.get('responses')} responses to each of {run.get('prompts')} prompts, learned "
        f"{run.get('mini_batch')} at a time; {plan_title(here, placed)}"
    )
    return subtitle, (here, placed)


def _figures(steps: Sequence[Numbers], last: int) -> list[tuple[str, str]]:
    newest, after = steps[-_FEW:], steady(steps)
    held_out = [found for found in steps if "val/reward" in found][-1:]
    figures = (
        (_mean(newest, "reward/mean"), _number, f"reward, mean of the last {counted(len(newest), 'step')}"),
        (_mean(held_out, "val/reward"), _number, "reward of held-out prompts"),
        (_mean(after, "perf/tokens_per_s"), _tokens, "prompts and responses, over all ranks"),
        (_mean(after, "time/step"), seconds, "a step"),
        (float(last), _number, "step" if last == 1 else "steps"),
    )
    # Leave out figures for which the run has no data.
    return [(words(value), named) for value, words, named in figures if math.isfinite(value)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:.4g}"


def _tokens(value: float) -> str:
    return quantity(value, "tokens/s")


def _notes(record: RunRecord, steps: Sequence[Numbers], step_s: float) -> list[str]:
    notes = []
    few = min(_FEW, len(steps) // 2)
    first, last = (_mean(part, "reward/mean") for part in (steps[:few], steps[len(steps) - few :]))
    if math.isfinite(first) and math.isfinite(last):
        begin, end = ("step", "") if few == 1 else (f"{few} steps", f" {few}")
        notes.append(
            f"The mean reward of drawn responses went from {first:.4g} in the first {begin} to {last:.4g} in the "
            f"last{end}."
        )
    notes += beside_prediction(step_s, record)
    apart = [found["rollout/logprob_diff_max"] for found in steps if "rollout/logprob_diff_max" in found]
    if apart:
        oldest = max(found.get("sync/version_lag_max", 0.0) for found in steps)
        older = f"; responses are of weights up to {counted(int(oldest), 'step')} old" if oldest >= 1 else ""
        notes.append(
            f"Log-probabilities of tokens differ by at most {max(apart):.2g} between rollout and training{older}."
        )
    return notes


def _phases_table(phases: Mapping[str, float], step_s: float) -> Table | None:
    if not phases:
        return None
    # Calls of different pools overlap, so phases may add up to more than the step.
    rest_s = step_s - sum(phases.values())
    spent = dict(sorted(phases.items(), key=lambda item: -item[1])) | ({_REST: rest_s} if rest_s > 0 else {})
    longest, whole_s = max(spent.values()) or 1.0, step_s or 1.0
    rows = [
        [
            name,
            seconds(spent_s),
            f"{100 * spent_s / whole_s:.1f} %",
            meter([(f"--c-{call_colour(name)}", spent_s)], longest),
        ]
        for name, spent_s in spent.items()
    ]
    total = [_STEP, seconds(step_s), "", ""]
    return Table(headings=["phase", "seconds", "of the step", ""], rows=rows, left=["phase", ""], total=total)


def _stages_table(record: RunRecord, phases: Mapping[str, float], step_s: float) -> Table:
    measured = {name: sum(phases.get(phase, 0.0) for phase in own) for name, own in record.parts.items() if phases}
    stages = ComparedAmounts(record.predicted.get("time_s", {}), measured)
    # Stages of different pools overlap, so a step is not their sum.
    whole = ComparedAmounts(*({_STEP: side} if side > 0 else {} for side in (record.predicted_s, step_s)))
    return time_table(stages, "stage", list(stages.predicted or stages.measured), call_colour, whole)


def _hand_over(record: RunRecord, steps: Sequence[Numbers]) -> ComparedAmounts:
    # Ranks count bytes over all tiers. The hand-over's program gives the exact plan; the step's prediction, nearly.
    written = [found["reshard/bytes_planned"] for found in steps if "reshard/bytes_planned" in found]
    planned = written[-1] if written else sum(record.predicted.get("sent_bytes", {}).values()) or None
    sent = [found["reshard/bytes_sent"] for found in steps if "reshard/bytes_sent" in found]
    name = "all tiers"
    return ComparedAmounts(
        {} if planned is None else {name: planned}, {name: statistics.median_low(sent)} if sent else {}
    )


def _mean(steps: Sequence[Numbers], name: str) -> float:
    values = [found[name] for found in steps if name in found]
    return statistics.fmean(values) if values else math.nan  # for a number that no record has


def _final(curves: Sequence[Curve]) -> dict[str, Figure]:
    found = dict[str, Figure]()
    for title, points in lines_of(curves).items():
        end = final_mean(points)
        if math.isfinite(end):
            number, prefix = scaled(end)
            found[title] = Figure(end, f"{number:.4g}{f' {prefix}' * bool(prefix)}")
    return found


def _curves(record: RunRecord) -> list[Curve]:
    def lines(named: Mapping[str, str]) -> dict[str, list[Point]]:
        found = {
            words: [(each.step, each.values[name]) for each in record.records if name in each.values]
            for words, name in named.items()
        }
        return {words: points for words, points in found.items() if points}

    rewards = {"drawn": "reward/mean", "held out, likeliest": "val/reward"}
    parts = {name: f"score/{number}/mean" for number, name in enumerate(_reward_names(record.settings))}
    threshold = record.section("algorithm").get("cost_threshold")
    level = ("allowed", float(threshold)) if isinstance(threshold, (int, float)) else None
    curves = [
        Curve(title="Reward", lines=lines(rewards), smooth=True),
        Curve(title="Parts of the reward", lines=lines(parts), smooth=True),
        Curve(title="Cost", lines=lines({"cost": "safe/cost"}), from_zero=True, smooth=True, level=level),
    ]
    curves += [Curve(title=title, unit=unit, lines=lines(named), from_zero=low) for title, unit, named, low in _CURVES]
    pools = dict.fromkeys(name for each in record.records for name in each.values if name.startswith("sync/bubble/"))
    idle = {"all ranks": "sync/bubble"} | {name.rpartition("/")[2].replace("_", " "): name for name in pools}
    curves.append(Curve(title="Time of ranks without a call", unit="share", lines=lines(idle), from_zero=True))
    step = ("predicted", record.predicted_s) if record.predicted_s else None
    curves.append(Curve(title="Seconds of a step", lines=lines({"step": "time/step"}), from_zero=True, level=step))
    # A constant coefficient is not worth a chart, and neither are ages if all responses are new.
    return [curve for curve in curves if curve.lines and not (curve.title in _CHANGING and _is_constant(curve))]


def _reward_names(settings: Mapping[str, Any]) -> list[str]:
    rewards = settings.get("reward")
    found = [
        str(own.get("function") or Path(str(own.get("model"))).name)
        for own in (rewards if isinstance(rewards, list) else ())
        if isinstance(own, Mapping)
    ]
    # Numbered as in `terrace.rl.samples` if names are equal.
    return [name if found.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(found)]


def _is_constant(curve: Curve) -> bool:
    return all(len({value for _, value in points}) == 1 for points in curve.lines.values())
