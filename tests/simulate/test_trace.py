"""The trace: the fields of the format, and the same times and bytes as the recording."""

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings

from terrace.program.instruction import COLLECTIVES
from terrace.program.lowering import build
from terrace.program.program import Program
from terrace.program.recording import Recording
from terrace.simulate.cost import Costs
from terrace.simulate.curve import memory_curve
from terrace.simulate.recording import record
from terrace.simulate.trace import steps_trace_json
from tests.support.pages import events_of, recorded
from tests.support.strategies import settings_of_a_step


def trace_json(recording: Recording) -> str:
    return steps_trace_json([recording], [memory_curve(recording)], ["rank"], recording.report.step_s)


PRESET_NAMES = ("ddp", "zero3", "zero++", "three-level-compressed")


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_a_trace_has_a_named_thread_a_lane_and_every_span(name: str) -> None:
    recording = recorded(name)
    events = events_of(trace_json(recording))
    assert events.keys() == {"M", "X", "C"}
    threads = {event["tid"]: event["args"]["name"] for event in events["M"] if event["name"] == "thread_name"}
    assert threads == {
        number: "compute" if lane < 0 else f"lane {recording.lane_name(lane)}"
        for number, lane in enumerate(recording.lanes)
    }
    assert [event["name"] for event in events["M"]].count("process_name") == 1
    assert len(events["X"]) == len(recording.visible())
    spent: dict[str, float] = defaultdict(float)
    for event in events["X"]:
        assert event["tid"] in threads
        assert event["ts"] >= 0
        assert event["dur"] > 0
        if event["tid"] == 0:
            spent[event["name"]] += event["dur"] / 1e6
    wanted = {category: seconds for category, seconds in recording.report.time_s.items() if seconds}
    assert dict(spent) == pytest.approx(wanted)


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_messages_in_a_trace_carry_the_bytes_of_the_report(name: str) -> None:
    recording = recorded(name)
    events = events_of(trace_json(recording))
    total: dict[str, int] = defaultdict(int)
    for event in events["X"]:
        if event["cat"] == "message" and recording.program.instructions[event["args"]["position"]].op in COLLECTIVES:
            for key, value in event["args"].items():
                if key.startswith("bytes on "):
                    total[key.removeprefix("bytes on ")] += value
    sent: dict[str, int] = defaultdict(int)
    for (_, tier), size in recording.report.sent_bytes.items():
        sent[tier] += size
    # A refresh that reaches in from the step before is there beside this step's own.
    carried = {event["args"]["position"] for event in events["X"] if event["tid"] > 0 and event["ts"] == 0}
    for position in carried:
        instruction = recording.program.instructions[position]
        if instruction.op.value == "REFRESH":
            for index, num_bytes in recording.program.message(instruction).sends:
                sent[recording.program.layout.tiers[index]] += num_bytes
    assert total == sent


@settings(max_examples=40, deadline=None)
@given(settings_of_a_step())
def test_counters_of_a_trace_follow_the_memory_curve(setting: Any) -> None:
    program: Program = build(setting.cluster, setting.plan, setting.blocks, setting.num_micros)
    num = len(program.blocks)
    costs = Costs(forward_s=(1e-3,) * num, backward_s=(2e-3,) * num, update_s=(1e-4,) * num, program=program)
    recording = record(program, costs)
    curve = memory_curve(recording)
    counters = events_of(trace_json(recording))["C"]
    moments = [event["ts"] for event in counters]
    assert moments == sorted(set(moments))
    totals = {1e6 * moment_s: total for moment_s, total in zip(curve.times_s, curve.total_bytes, strict=True)}
    for event in counters:
        assert sum(event["args"].values()) == totals[event["ts"]]
