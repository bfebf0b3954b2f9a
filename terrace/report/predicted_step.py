"""Trace events of the predicted step of a run, and of the mean seconds that were measured by category."""

from collections.abc import Mapping
from typing import Any

from terrace.base.errors import TerraceError
from terrace.cluster.cluster import Cluster
from terrace.model.facts import layers_of
from terrace.report.tables import time_categories
from terrace.simulate.recording import record
from terrace.simulate.step import play_whole
from terrace.simulate.trace import passes_events, recording_events
from terrace.train.config import RunConfig
from terrace.train.prediction import step_of

_US = 1e6
_MOST_PASSES = 30_000  # of layers in a step that is simulated for its picture, which takes a millisecond each


def check_length(run: RunConfig) -> None:
    """Raises `TerraceError` for a step of too many passes: the settings may be a stranger's."""
    num_passes = run.num_micros() * layers_of(run.model)
    if num_passes > _MOST_PASSES:
        raise TerraceError(f"a step passes layers {num_passes:,} times, and at most {_MOST_PASSES:,} are drawn")


def predicted_events(run: RunConfig, cluster: Cluster | None) -> list[dict[str, Any]]:
    """Trace events of the predicted step; raises `TerraceError` where there is none, or it is too long to draw."""
    check_length(run)
    played = play_whole(step_of(run, cluster))
    if len(played.programs) == 1:
        return recording_events(record(played.programs[0], played.costs[0]), 0, "predicted")
    return passes_events(played.programs[0], played.passes[0], "predicted")


def totals(time_s: Mapping[str, float]) -> list[dict[str, Any]]:
    """Trace events of mean seconds by category, as the second process; means have no order, so they lie end to end."""
    events: list[dict[str, Any]] = []
    now_us = 0.0
    for name in time_categories(time_s):
        length_us = time_s[name] * _US
        events.append({"ph": "X", "pid": 1, "tid": 0, "name": name, "ts": now_us, "dur": length_us, "args": {}})
        now_us += length_us
    named = {"ph": "M", "pid": 1, "tid": 0, "name": "thread_name", "args": {"name": "compute"}}
    return [named, *events] if events else []
