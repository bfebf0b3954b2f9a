"""Reads a run folder of `terrace rl` to an `RlView`: everything readable, and a sentence on each missing part.

The run may be unfinished, killed, or damaged: no content of a file raises here. `run_folder.py` reads runs of
`terrace train`.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from terrace.base.errors import TerraceError
from terrace.base.fitting import fitting, numbers, parse_table
from terrace.base.foreign import read_lines, read_text
from terrace.base.schema import read_table
from terrace.base.words import counted, quantity, seconds
from terrace.cluster.presets import parse_cluster
from terrace.model.config import parse_model
from terrace.model.facts import family_of
from terrace.plan.presets import command_plan
from terrace.report.compared import ComparedAmounts
from terrace.report.folder_parts import checkpoint_rows, steady, text_of
from terrace.report.rl_page import RlView
from terrace.report.rl_samples import samples_of
from terrace.report.rl_timeline import recorded_step, steady_iteration
from terrace.report.run_curves import Curve
from terrace.report.tables import model_size, plan_rows, plan_title
from terrace.train.recorder import PREDICTION
from terrace.train.runs import command_of

_CALLS, _SAMPLES, _METRICS = "calls.jsonl", "samples.jsonl", "metrics.jsonl"
_LEARNING = ("actor", "critic", "cost_critic")  # folders of checkpoints
_FEW = 5  # steps at the start and the end of a run whose means a note compares

Numbers = Mapping[str, float]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Stage:
    seconds: float
    phases: list[str]


@dataclass(frozen=True, kw_only=True)
class _Prediction:
    seconds: float = 0.0  # of a step
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    sent_bytes: dict[str, float] = field(default_factory=dict)


def is_rl_folder(folder: Path) -> bool:
    """Whether a folder is from a `terrace rl` run, by its files or its settings."""
    if any((folder / name).is_file() for name in (_CALLS, _SAMPLES)):
        return True
    with suppress(TerraceError):
        return command_of(read_table(folder / "config.toml", folder)) == "rl"
    return False


def rl_view(folder: Path) -> RlView:
    missing: list[str] = []
    table: Mapping[str, Any] = {}
    try:
        table = read_table(folder / "config.toml", folder)
    except TerraceError as error:
        missing.append(f"settings: {error}")
    lines = _lines(folder / _METRICS, "curves and times", _step_numbers, missing)
    records = [found for found in lines if found.get("step", 0.0) >= 1]
    calls = _lines(folder / _CALLS, "the timeline", recorded_step, missing)
    samples = _lines(folder / _SAMPLES, "samples", samples_of, missing)
    prediction, stages = _prediction(folder, missing)
    subtitle, plan = _model_and_plan(table, missing)
    after = steady(records)
    phases = _phases(after)
    step_s = _mean(after, "time/step")
    measured = {name: sum(phases.get(phase, 0.0) for phase in stage.phases) for name, stage in stages.items() if phases}
    predicted = {name: stage.seconds for name, stage in stages.items()}
    return RlView(
        title=folder.resolve().name,
        subtitle=subtitle,
        status=_status(records, table),
        figures=_figures(records) if records else (),
        missing=missing,
        notes=_notes(records, step_s, prediction.seconds) if records else (),
        curves=rl_curves(records, table, prediction.seconds),
        iteration=steady_iteration(calls),
        phases=phases,
        step_s=step_s,
        predicted_s=prediction.seconds,
        stages=ComparedAmounts(predicted, measured),
        hand_over=_hand_over(prediction, records),
        samples=samples,
        plan=plan,
        checkpoints=_checkpoints(folder, missing),
        settings=text_of(folder, "config.toml"),
    )


def _lines(path: Path, what: str, read: Callable[[Mapping[str, Any]], T], missing: list[str]) -> list[T]:
    """Parse a file's readable lines with `read`; adds a sentence to `missing` if the file or some lines are damaged."""
    found, num_written = list[T](), 0
    try:
        for line in read_lines(path, path.parent):
            num_written += bool(line.strip())
            with suppress(ValueError):
                found.append(read(parse_table(line)))
    except OSError as error:
        missing.append(f"{what}: {path.name} cannot be read ({error.strerror})")
        return []
    if len(found) < num_written:
        missing.append(f"{what}: damaged lines in {path.name}: {num_written - len(found)}")
    if not num_written:
        missing.append(f"{what}: {path.name} is empty")
    return found


def _step_numbers(line: Mapping[str, Any]) -> Numbers:
    found = numbers(line)
    if type(line.get("step")) is not int or "step" not in found:
        raise ValueError("not the numbers of a step")
    return found


def _prediction(folder: Path, missing: list[str]) -> tuple[_Prediction, dict[str, _Stage]]:
    try:
        found = fitting(_Prediction, parse_table(read_text(folder / PREDICTION, folder)))
        return found, {name: fitting(_Stage, stage) for name, stage in found.stages.items()}
    except FileNotFoundError:
        missing.append(f"predictions: there is no {PREDICTION}, which a run writes where its step can be predicted")
    except OSError as error:
        missing.append(f"predictions: {PREDICTION} cannot be read ({error.strerror})")
    except ValueError:
        missing.append(f"predictions: {PREDICTION} is damaged")
    return _Prediction(), {}


def _model_and_plan(
    table: Mapping[str, Any], missing: list[str]
) -> tuple[str, tuple[Sequence[str], Sequence[Sequence[str]]] | None]:
    """(Subtitle, plan table) from the settings of a run."""
    sections = [table.get(name) for name in ("cluster", "plan", "model", "run", "algorithm")]
    if not table:
        return "", None
    try:
        if not all(isinstance(each, Mapping) for each in sections):
            raise TerraceError("a section is no table")
        cluster, plan, model, run, algorithm = (dict(each) for each in sections if isinstance(each, Mapping))
        here = parse_cluster(cluster)
        placed, decoder = command_plan(plan, here), parse_model(model)
        subtitle = (
            f"{algorithm.get('name')}; {family_of(decoder)} decoder of {model_size(decoder)}; a step draws "
            f"{run.get('responses')} responses to each of {run.get('prompts')} prompts, learned "
            f"{run.get('mini_batch')} at a time; {plan_title(here, placed)}"
        )
        return subtitle, plan_rows(here, placed)
    except TerraceError as error:
        missing.append(f"the plan's table: {error}")
        return "", None


def _status(records: Sequence[Numbers], table: Mapping[str, Any]) -> str:
    if not records:
        return "Not finished: no step has ended yet."
    run = table.get("run")
    steps = run.get("steps") if isinstance(run, Mapping) else None
    done = int(records[-1]["step"])
    if isinstance(steps, int) and done >= steps:
        return f"Finished after {counted(done, 'step')}."
    of = f" of {steps}" if isinstance(steps, int) else ""
    return f"Not finished: step {done}{of} is the last. It still runs, or it was killed."


def _figures(records: Sequence[Numbers]) -> list[tuple[str, str]]:
    newest, after, last = records[-_FEW:], steady(records), records[-1]["step"]
    held_out = [found for found in records if "val/reward" in found][-1:]
    figures = (
        (_mean(newest, "reward/mean"), _number, f"reward, mean of the last {counted(len(newest), 'step')}"),
        (_mean(held_out, "val/reward"), _number, "reward of held-out prompts"),
        (_mean(after, "perf/tokens_per_s"), _tokens, "prompts and responses, over all ranks"),
        (_mean(after, "time/step"), seconds, "a step"),
        (last, _number, "step" if last == 1 else "steps"),
    )
    # Leave out figures for which the run has no data.
    return [(words(value), named) for value, words, named in figures if math.isfinite(value)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:.4g}"


def _tokens(value: float) -> str:
    return quantity(value, "tokens/s")


def _notes(records: Sequence[Numbers], step_s: float, predicted_s: float) -> list[str]:
    notes = []
    few = min(_FEW, len(records) // 2)
    first, last = (_mean(part, "reward/mean") for part in (records[:few], records[len(records) - few :]))
    if math.isfinite(first) and math.isfinite(last):
        notes.append(
            f"The mean reward of drawn responses went from {first:.4g} in the first {counted(few, 'step')} to "
            f"{last:.4g} in the last {few}."
        )
    if step_s > 0 and predicted_s > 0:
        notes.append(
            f"A step takes {seconds(step_s)} in the mean; predicted were {seconds(predicted_s)} "
            f"({100 * (predicted_s / step_s - 1):+.0f} %)."
        )
    apart = [found["rollout/logprob_diff_max"] for found in records if "rollout/logprob_diff_max" in found]
    if apart:
        oldest = max(found.get("sync/version_lag_max", 0.0) for found in records)
        older = f"; responses are of weights up to {counted(int(oldest), 'step')} old" if oldest else ""
        notes.append(
            f"Log-probabilities of tokens differ by at most {max(apart):.2g} between rollout and training{older}."
        )
    return notes


def _phases(records: Sequence[Numbers]) -> dict[str, float]:
    names = dict.fromkeys(name for found in records for name in found if name.startswith("time/"))
    return {
        name.removeprefix("time/"): statistics.fmean(found.get(name, 0.0) for found in records)
        for name in names
        if name != "time/step"
    }


def _hand_over(prediction: _Prediction, records: Sequence[Numbers]) -> ComparedAmounts:
    # Ranks count bytes over all tiers. The hand-over's program gives the exact plan; the step's prediction, nearly.
    written = [found["reshard/bytes_planned"] for found in records if "reshard/bytes_planned" in found]
    planned = written[-1] if written else sum(prediction.sent_bytes.values()) or None
    sent = [found["reshard/bytes_sent"] for found in records if "reshard/bytes_sent" in found]
    name = "all tiers"
    return ComparedAmounts(
        {} if planned is None else {name: planned}, {name: statistics.median_low(sent)} if sent else {}
    )


def _checkpoints(folder: Path, missing: list[str]) -> list[tuple[str, int, str]]:
    found = []
    for role in _LEARNING:
        own = list[str]()
        rows = checkpoint_rows(folder / role, own)
        found += [(f"{role}/{name}", size, state) for name, size, state in rows]
        # Only the actor's checkpoints decide whether the run can be resumed.
        missing += own if role == _LEARNING[0] else []
    return found


def _mean(records: Sequence[Numbers], name: str) -> float:
    values = [found[name] for found in records if name in found]
    return statistics.fmean(values) if values else math.nan  # for a number that no record has


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
    ("Age of responses", "steps", {"mean": "sync/version_lag", "oldest": "sync/version_lag_max"}, True),
    ("Gradient norm before clipping", "", {"actor": "actor/grad_norm", "critic": "critic/grad_norm"}, True),
    ("Throughput", "tokens/s over all ranks", {"tokens/s": "perf/tokens_per_s"}, True),
)

_CHANGING = ("KL coefficient", "Age of responses")  # curves that are left out if they are constant


def rl_curves(records: Sequence[Numbers], table: Mapping[str, Any], predicted_s: float) -> list[Curve]:
    """Curves of a run with the settings `table`; `predicted_s` are the predicted seconds of a step, 0 if unknown."""

    def lines(named: Mapping[str, str]) -> dict[str, list[tuple[int, float]]]:
        found = {
            words: [(int(record["step"]), record[name]) for record in records if name in record]
            for words, name in named.items()
        }
        return {words: points for words, points in found.items() if points}

    rewards = {"drawn": "reward/mean", "held out, likeliest": "val/reward"}
    names = _reward_names(table)
    parts = {name: f"score/{number}/mean" for number, name in enumerate(names)}
    threshold = _section(table, "algorithm").get("cost_threshold")
    level = ("allowed", float(threshold)) if isinstance(threshold, (int, float)) else None
    curves = [
        Curve(title="Reward", lines=lines(rewards), smooth=True),
        Curve(title="Parts of the reward", lines=lines(parts), smooth=True),
        Curve(title="Cost", lines=lines({"cost": "safe/cost"}), from_zero=True, smooth=True, level=level),
    ]
    curves += [Curve(title=title, unit=unit, lines=lines(named), from_zero=low) for title, unit, named, low in _CURVES]
    pools = dict.fromkeys(name for record in records for name in record if name.startswith("sync/bubble/"))
    idle = {"all ranks": "sync/bubble"} | {name.rpartition("/")[2].replace("_", " "): name for name in pools}
    curves.append(Curve(title="Time of ranks without a call", unit="share", lines=lines(idle), from_zero=True))
    step = ("predicted", predicted_s) if predicted_s else None
    curves.append(Curve(title="Seconds of a step", lines=lines({"step": "time/step"}), from_zero=True, level=step))
    # A constant coefficient is not worth a chart, and neither are ages if all responses are new.
    return [curve for curve in curves if curve.lines and not (curve.title in _CHANGING and _is_constant(curve))]


def _reward_names(table: Mapping[str, Any]) -> list[str]:
    rewards = table.get("reward")
    found = [
        str(own.get("function") or Path(str(own.get("model"))).name)
        for own in (rewards if isinstance(rewards, list) else ())
        if isinstance(own, Mapping)
    ]
    # Numbered as in `terrace.rl.samples` if names are equal.
    return [name if found.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(found)]


def _section(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = table.get(name)
    return found if isinstance(found, Mapping) else {}


def _is_constant(curve: Curve) -> bool:
    return all(len({value for _, value in points}) == 1 for points in curve.lines.values())
