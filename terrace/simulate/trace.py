"""Traces for Perfetto and chrome://tracing: of one stage, of all stages, or of a predicted and a measured step.

The format is the Trace Event Format's JSON object: complete events ("X") with times in microseconds, one thread per
lane, counters ("C") for memory, and metadata ("M") with names.
"""

import json
from collections.abc import Sequence
from typing import Any

from terrace.base.sealed import sealed_json
from terrace.program.instruction import COLLECTIVES, Op
from terrace.program.program import Program
from terrace.program.recording import COMPUTE, Recording, Span
from terrace.simulate.curve import MemoryCurve
from terrace.simulate.stages import Passed

_PID = 0  # the one rank that stands for all
_PREDICTED, _MEASURED = 0, 1  # processes of a trace that has both
_US = 1e6  # microseconds in a second


def trace_json(recording: Recording, curve: MemoryCurve) -> str:
    """Trace file of the steady step, with the memory of its rank.

    Messages of the previous step that overlap this one begin at 0; messages that overlap the next one end after it.
    """
    program = recording.program
    name = f"a rank of {program.cluster.world_size}: plan {program.plan.name} on {program.cluster.name}"
    events = [*recording_events(recording, _PID, name), *_counters(curve)]
    table = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"step_s": recording.report.step_s}}
    return json.dumps(table, separators=(",", ":")) + "\n"


def compared_trace_json(predicted: Recording | Sequence[Passed], measured: Recording, *, step: int, rank: int) -> str:
    """Trace with two processes: the predicted step, and the measured step `step`.

    Both begin at 0. For a pipeline the prediction is the passes of the rank's stage.
    """
    program = measured.program
    where = f"plan {program.plan.name} on {program.cluster.name}"
    if isinstance(predicted, Recording):
        events = recording_events(predicted, _PREDICTED, f"predicted: {where}")
        predicted_s = predicted.report.step_s
    else:
        events = passes_events(program, predicted, f"predicted: {where}")
        predicted_s = predicted[-1].end_s if predicted else 0.0
    events += recording_events(measured, _MEASURED, f"measured: step {step} of rank {rank}")
    what = "step" if isinstance(predicted, Recording) else "passes"
    other = {"step": step, "rank": rank, "predicted": what}
    other |= {"predicted_s": predicted_s, "measured_s": measured.report.step_s}
    table = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
    return sealed_json(json.dumps(table, separators=(",", ":")))


def recording_events(recording: Recording, pid: int, name: str) -> list[dict[str, Any]]:
    """Events of a recording as process `pid`: one thread per lane, the compute stream first."""
    events = [_metadata("process_name", 0, {"name": name}, pid)]
    events.append(_metadata("process_sort_index", 0, {"sort_index": pid}, pid))
    for order, lane in enumerate(recording.lanes):
        title = "compute" if lane == COMPUTE else f"lane {recording.lane_name(lane)}"
        events.append(_metadata("thread_name", lane + 1, {"name": title}, pid))
        events.append(_metadata("thread_sort_index", lane + 1, {"sort_index": order}, pid))
    return events + [_complete(recording, span, pid) for _, span in recording.visible()]


def passes_events(program: Program, passes: Sequence[Passed], name: str) -> list[dict[str, Any]]:
    """Events of a stage's predicted passes, as the first process."""
    events = [
        _metadata("process_name", 0, {"name": name}, _PREDICTED),
        _metadata("process_sort_index", 0, {"sort_index": _PREDICTED}, _PREDICTED),
        _metadata("thread_name", COMPUTE + 1, {"name": "compute"}, _PREDICTED),
    ]
    for instruction, start_s, end_s in passes:
        category = "forward" if instruction.op is Op.FORWARD else "backward"
        args = {"instruction": str(instruction), "block": program.blocks[instruction.block].name}
        event = {"ph": "X", "pid": _PREDICTED, "tid": COMPUTE + 1, "name": category, "cat": "compute", "args": args}
        events.append({**event, "ts": start_s * _US, "dur": (end_s - start_s) * _US})
    return events


def stages_trace_json(
    recordings: Sequence[Recording], curves: Sequence[MemoryCurve], *, name: str, step_s: float
) -> str:
    """Trace of a pipelined step: one process per stage, with its lanes and its memory."""
    events: list[dict[str, Any]] = []
    for stage, (recording, curve) in enumerate(zip(recordings, curves, strict=True)):
        own = [*recording_events(recording, stage, f"stage {stage} of {name}"), *_counters(curve, stage)]
        for event in own:
            # Metadata has no time; the rest moves from the stage's clock to the first stage's.
            if "ts" in event:
                event["ts"] += recording.begin_s * _US
        events += own
    table = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"step_s": step_s}}
    return json.dumps(table, separators=(",", ":")) + "\n"


def _metadata(name: str, tid: int, args: dict[str, Any], pid: int) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args}


def _complete(recording: Recording, span: Span, pid: int) -> dict[str, Any]:
    program = recording.program
    instruction = program.instructions[span.position]
    args: dict[str, Any] = {"instruction": str(instruction), "position": span.position}
    if instruction.block >= 0:
        args["block"] = program.blocks[instruction.block].name
    if span.lane != COMPUTE and instruction.op in (*COLLECTIVES, Op.SEND, Op.TIE):
        for tier, num_bytes in program.message(instruction).sends:
            key = f"bytes on {program.layout.tiers[tier]}"
            args[key] = args.get(key, 0) + num_bytes
    # Messages of the step before are cut at the start.
    start_s = max(0.0, span.start_s)
    return {
        "ph": "X",
        "pid": pid,
        "tid": span.lane + 1,
        "name": span.category,
        "cat": "wait" if span.category.startswith("wait ") else "compute" if span.lane == COMPUTE else "message",
        "ts": start_s * _US,
        "dur": (span.end_s - start_s) * _US,
        "args": args,
    }


def _counters(curve: MemoryCurve, pid: int = _PID) -> list[dict[str, Any]]:
    # Constant categories are merged into one value, so that changes stand out.
    constant = sum(curve.constant_bytes.values())
    events = []
    for index, moment_s in enumerate(curve.times_s):
        # A counter has one value per moment: the last change counts.
        if index + 1 < len(curve.times_s) and curve.times_s[index + 1] == moment_s:
            continue
        values = {name: parts[index] for name, parts in curve.varying_bytes.items() if any(parts)}
        args = {"held throughout": constant, **values}
        events.append({"ph": "C", "pid": pid, "tid": 0, "name": "memory (bytes)", "ts": moment_s * _US, "args": args})
    return events
