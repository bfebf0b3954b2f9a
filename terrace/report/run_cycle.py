"""The predicted step of a run as trace events, and the section on its cycle of islands: predicted, and measured if
whole cycles have ended.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from terrace.base.errors import TerraceError
from terrace.cluster.cluster import Cluster
from terrace.model.facts import layers_of
from terrace.report.cycle_chart import cycle_section
from terrace.report.cycles import cycle_words
from terrace.report.markup import ChartedSection
from terrace.report.tables import time_categories
from terrace.simulate.cycle_timeline import cycle_timeline
from terrace.simulate.recording import record
from terrace.simulate.step import play_whole
from terrace.simulate.trace import passes_events, recording_events
from terrace.train.config import RunConfig
from terrace.train.metrics import StepRecord
from terrace.train.prediction import predict, step_of


def run_cycle(run: RunConfig, cluster: Cluster | None, records: Sequence[StepRecord]) -> ChartedSection | None:
    """The section on a run's cycle, None without islands; `records` are rank 0's steady steps.

    Raises `TerraceError` for a run that cannot be predicted.
    """
    cycle = predict(run, cluster or run.cluster).cycle
    if cycle is None:
        return None
    measured = mean_steps(records, cycle.outer.every)
    words = cycle_words(cycle, None)
    if not measured:
        words += "\nno whole cycle has been measured"
    return cycle_section(cycle_timeline(cycle, stage=0), words, measured)


def mean_steps(records: Sequence[StepRecord], every: int) -> list[Mapping[str, float]]:
    """Mean seconds by category of each step of a cycle, over all whole cycles among `records`; [] without one."""
    cycles = defaultdict[int, dict[int, StepRecord]](dict)
    for each in records:
        number, place = divmod(each.step - 1, every)
        cycles[number][place] = each
    whole = [steps for steps in cycles.values() if len(steps) == every]
    found = list[Mapping[str, float]]()
    for place in range(every) if whole else ():
        times = [steps[place].time_s for steps in whole]
        names = dict.fromkeys(name for each in times for name in each)
        found.append({name: statistics.fmean(each.get(name, 0.0) for each in times) for name in names})
    return found


_US = 1e6
_MOST_PASSES = 30_000  # layer passes in a step that is simulated for a chart, at about a millisecond each


def check_length(run: RunConfig) -> None:
    """Raise `TerraceError` for a step of too many passes, since the settings may be untrusted."""
    num_passes = run.num_micros() * layers_of(run.model)
    if num_passes > _MOST_PASSES:
        raise TerraceError(f"a step passes layers {num_passes:,} times, and at most {_MOST_PASSES:,} are drawn")


def predicted_events(run: RunConfig, cluster: Cluster | None) -> list[dict[str, Any]]:
    """Trace events of the predicted step; raises `TerraceError` if it cannot be predicted or is too long to draw."""
    check_length(run)
    played = play_whole(step_of(run, cluster))
    if len(played.programs) == 1:
        return recording_events(record(played.programs[0], played.costs[0]), 0, "predicted")
    return passes_events(played.programs[0], played.passes[0], "predicted")


def totals(time_s: Mapping[str, float]) -> list[dict[str, Any]]:
    """Trace events of mean seconds by category, as process 1, end to end since means have no order."""
    events: list[dict[str, Any]] = []
    now_us = 0.0
    for name in time_categories(time_s):
        length_us = time_s[name] * _US
        events.append({"ph": "X", "pid": 1, "tid": 0, "name": name, "ts": now_us, "dur": length_us, "args": {}})
        now_us += length_us
    named = {"ph": "M", "pid": 1, "tid": 0, "name": "thread_name", "args": {"name": "compute"}}
    return [named, *events] if events else []
