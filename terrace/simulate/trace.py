"""Traces for Perfetto and chrome://tracing: of one stage, of all stages, or of a predicted and a measured step.

The format is the Trace Event Format's JSON object: complete events ("X") with times in microseconds, one thread per
row of a timeline, counters ("C") for memory, and metadata ("M") with names. A group of rows is a process.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from terrace.base.sealed import sealed_json
from terrace.program.recording import Recording
from terrace.program.timeline import TimelineRow
from terrace.simulate.curve import NO_MEMORY, MemoryCurve, measured_curve
from terrace.simulate.rows import passes_row, recording_rows
from terrace.simulate.stages import Passed

_US = 1e6  # microseconds in a second
_IN_USE = "all memory (bytes)"  # of the device, or on a CPU of the process


def steps_trace_json(
    recordings: Sequence[Recording], curves: Sequence[MemoryCurve], names: Sequence[str], step_s: float
) -> str:
    """Trace of a steady step: a process for the rank of every stage, with its lanes and its memory.

    Messages of the previous step that overlap this one begin at 0; messages that overlap the next one end after it.
    """
    events: list[dict[str, Any]] = []
    for stage, (recording, curve) in enumerate(zip(recordings, curves, strict=True)):
        events += _process(recording_rows(recording, names[stage], recording.begin_s), stage)
        # Constant categories are merged into one value, so that changes stand out.
        held = {"held throughout": sum(curve.constant_bytes.values())}
        events += _counters(curve, stage, recording.begin_s, held)
    return json.dumps(_table(events, {"step_s": step_s}), separators=(",", ":")) + "\n"


def compared_trace_json(
    predicted: Recording | Sequence[Passed],
    measured: Recording,
    *,
    step: int,
    rank: int,
    memory: MemoryCurve = NO_MEMORY,
    begin_s: float = 0.0,
) -> str:
    """Trace with two processes: the predicted step, and the measured step `step`; each with its memory by category.

    Both begin at 0. For a pipeline the prediction is the passes of the rank's stage, whose step begins at `begin_s`.
    The measured memory is model state, and beside it all that is in use.
    """
    program = measured.program
    where = f"predicted: plan {program.plan.name} on {program.cluster.name}"
    if isinstance(predicted, Recording):
        rows, predicted_s, what = recording_rows(predicted, where), predicted.report.step_s, "step"
    else:
        rows, what = [passes_row(program, predicted, where)], "passes"
        predicted_s = predicted[-1].end_s if predicted else 0.0
    rows += recording_rows(measured, f"measured: step {step} of rank {rank}")
    other = {"step": step, "rank": rank, "predicted": what}
    other |= {"predicted_s": predicted_s, "measured_s": measured.report.step_s}
    events = trace_events(rows) + _counters(memory, 0, begin_s, memory.constant_bytes)
    events += _counters(measured_curve(measured), 1, 0.0, {})
    for moment_s, _, in_use in measured.memory:
        events.append(_counter(_IN_USE, 1, moment_s, {"in use": in_use}))
    return sealed_json(json.dumps(_table(events, other), separators=(",", ":")))


def trace_events(rows: Iterable[TimelineRow]) -> list[dict[str, Any]]:
    """Events of rows: a process for each group, a thread for each row."""
    groups = groupby(rows, key=lambda row: row.group)
    return [event for pid, (_, own) in enumerate(groups) for event in _process(list(own), pid)]


def _table(events: list[dict[str, Any]], other: dict[str, Any]) -> dict[str, Any]:
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _process(rows: Sequence[TimelineRow], pid: int) -> list[dict[str, Any]]:
    events = [_metadata("process_name", 0, {"name": rows[0].group}, pid)]
    events.append(_metadata("process_sort_index", 0, {"sort_index": pid}, pid))
    for tid, row in enumerate(rows):
        title = row.name if row.is_main else f"lane {row.name}"
        events.append(_metadata("thread_name", tid, {"name": title}, pid))
        events.append(_metadata("thread_sort_index", tid, {"sort_index": tid}, pid))
    for tid, row in enumerate(rows):
        kind = "compute" if row.is_main else "message"
        for span in row.spans:
            events.append(
                {
                    "ph": "X",
                    "pid": pid,
                    "tid": tid,
                    "name": span.category,
                    "cat": "wait" if span.category.startswith("wait ") else kind,
                    "ts": span.start_s * _US,
                    "dur": (span.end_s - span.start_s) * _US,
                    "args": dict(span.what.facts),
                }
            )
    return events


def _metadata(name: str, tid: int, args: dict[str, Any], pid: int) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args}


def _counter(name: str, pid: int, moment_s: float, args: Mapping[str, float]) -> dict[str, Any]:
    return {"ph": "C", "pid": pid, "tid": 0, "name": name, "ts": moment_s * _US, "args": dict(args)}


def _counters(curve: MemoryCurve, pid: int, begin_s: float, held: Mapping[str, int]) -> list[dict[str, Any]]:
    events = []
    for index, moment_s in enumerate(curve.times_s):
        # A counter has one value per moment: the last change counts.
        if index + 1 < len(curve.times_s) and curve.times_s[index + 1] == moment_s:
            continue
        values = {name: parts[index] for name, parts in curve.varying_bytes.items() if any(parts)}
        events.append(_counter("memory (bytes)", pid, begin_s + moment_s, {**held, **values}))
    return events
