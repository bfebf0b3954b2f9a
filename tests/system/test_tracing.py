"""A traced step: every instruction in its place and time, one trace with the predicted step, nothing when off."""

import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.program.instruction import COLLECTIVES, PASSES, Op
from terrace.program.recording import COMPUTE, Recording
from terrace.runtime.tracing import Tracer
from terrace.simulate.cost import step_costs
from terrace.simulate.curve import memory_curve
from terrace.simulate.recording import record
from terrace.simulate.stages import simulate_stages
from terrace.simulate.trace import compared_trace_json
from tests.support.nightly import nightly
from tests.support.pages import events_of
from tests.support.parity import ADAMW, Case, data_rows, engine_of
from tests.support.pipelines import Place, pipelined
from tests.support.toys import cluster_of

MODEL = "llama tied"


def traced(
    world: World, cluster: Cluster, plan: Plan, model: str = MODEL
) -> tuple[list[Recording], list[float], dict[str, float]]:
    """Three steps on this rank, the last two traced: their recordings, all losses, the seconds of the last."""
    case = Case(plan, num_micros=2, model=model)
    engine = engine_of(world, cluster, case)
    tracer, losses, time_s = Tracer(engine), [], {}
    for step in range(3):
        batches = data_rows(engine, case, step)
        if step:
            with tracer.step():
                result = engine.step(batches, ADAMW.lr)
        else:
            result = engine.step(batches, ADAMW.lr)
        losses.append(result.loss)
        time_s = result.time_s
    engine.drain()
    found = tracer.recordings()
    engine.check_bytes()
    engine.close()
    return found, losses, time_s


def calls_of_steps(world: World, cluster: Cluster, plan: Plan) -> list[Counter[str]]:
    """The functions called, by name, in a step before a traced one, in that one, and in one after it."""
    case = Case(plan, num_micros=2, model=MODEL)
    engine = engine_of(world, cluster, case)
    tracer, found = Tracer(engine), []
    for step in range(5):
        batches, calls = data_rows(engine, case, step), Counter[str]()

        def note(frame: Any, event: str, argument: Any, calls: Counter[str] = calls) -> None:
            name = frame.f_globals.get("__name__") or ""
            if event == "call" and name.startswith("terrace."):  # a lock's own calls depend on who comes first
                calls[f"{name}.{frame.f_code.co_qualname}"] += 1

        sys.setprofile(note)
        try:
            if step == 3:
                with tracer.step():
                    engine.step(batches, ADAMW.lr)
            else:
                engine.step(batches, ADAMW.lr)
        finally:
            sys.setprofile(None)
        found.append(calls)
    engine.drain()
    engine.close()
    return found[2:]


def exact(name: str, cluster: Cluster) -> Plan:
    return replace(preset(name, cluster), compute="fp64", master="fp64", wire={})


@pytest.mark.parametrize("name", ["three-level", *nightly("zero3", "ddp")])
def test_a_traced_step_has_every_instruction_in_its_place(pool: LocalPool, name: str) -> None:
    cluster = cluster_of(2, 2)
    plan = exact(name, cluster)
    for rank, (recordings, _, time_s) in enumerate(pool.run(4, traced, cluster, plan)):
        assert len(recordings) == 2
        for recording in recordings:
            _check(recording)
        last = recordings[-1]
        assert sum(last.report.time_s.values()) == pytest.approx(sum(time_s.values()), rel=0.2, abs=5e-3)
        assert last.report.time_s.keys() == {name for name, seconds in time_s.items() if seconds}
        events = events_of(_compared(last, rank))
        assert events.keys() == {"M", "X", "C"}
        names = {event["pid"]: event["args"]["name"] for event in events["M"] if event["name"] == "process_name"}
        assert names[0].startswith("predicted: plan")
        assert names[1] == f"measured: step 3 of rank {rank}"
        lanes = [{event["tid"] for event in events["X"] if event["pid"] == pid} for pid in (0, 1)]
        assert lanes[0] <= lanes[1], "what is predicted on a lane is measured on it"
        assert all(event["dur"] > 0 and event["ts"] >= 0 for event in events["X"])
        _check_memory(recordings[-1], events["C"])


def _check_memory(recording: Recording, counters: list[dict[str, Any]]) -> None:
    """Measured states are those predicted for the whole step, and never more of what comes and goes."""
    predicted = {name: size for name, size in recording.program.state_bytes.items() if size}
    assert len(recording.memory) > 4
    for sample in recording.memory:
        held = {name: size for name, size in sample.states_bytes.items() if size}
        assert held.keys() <= predicted.keys()
        assert all(size <= predicted[name] for name, size in held.items())
        assert held["optimizer"] == predicted["optimizer"]
        assert sample.in_use_bytes > sum(held.values())
    both = [[event for event in counters if event["pid"] == pid] for pid in (0, 1)]
    for name in ("params", "grads", "optimizer"):
        assert both[0][0]["args"][name] == predicted[name]
    shown = [event["args"]["in use"] for event in both[1] if event["name"].startswith("all memory")]
    assert shown == [sample.in_use_bytes for sample in recording.memory]


def _compared(measured: Recording, rank: int) -> str:
    program = measured.program
    costs = step_costs(program, [1e6] * len(program.blocks))
    predicted = record(program, costs)
    return compared_trace_json(predicted, measured, step=3, rank=rank, memory=memory_curve(predicted))


def _check(recording: Recording) -> None:
    """Spans of the compute stream follow one another and fill the step; messages are where the program has them."""
    program = recording.program
    own = recording.spans[recording.first :]
    stream = [span for span in own if span.lane == COMPUTE]
    assert stream[0].start_s == 0
    assert all(one.end_s == other.start_s for one, other in pairwise(stream))
    assert stream[-1].end_s == pytest.approx(recording.report.step_s)
    wanted = [at for at, each in enumerate(program.instructions) if each.op in PASSES]
    passes = [span.position for span in stream if span.category in ("forward", "backward")]
    assert sorted(set(passes)) == wanted
    assert [span.position for span in stream] == sorted(span.position for span in stream)
    # A message without peers is on no lane.
    told = [at for at, each in enumerate(program.instructions) if each.op in COLLECTIVES]
    sent = {at for at in told if program.message(program.instructions[at]).sends}
    messages = [span for span in own if span.lane != COMPUTE and program.instructions[span.position].op in COLLECTIVES]
    assert sent == {span.position for span in messages} | sent & set(_without_gradient(recording))
    for span in messages:
        assert span.lane == max(0, program.message(program.instructions[span.position]).lane)
        assert span.end_s >= span.start_s
    for span in stream:
        if span.category.startswith("wait ") and span.after >= 0:
            awaited = recording.spans[span.after]
            assert awaited.end_s <= span.end_s + 1e-3
            # Messages between stages are waited for alike, whichever way they go.
            assert span.category == f"wait {awaited.category}".replace("pipeline_backward", "pipeline")


def _without_gradient(recording: Recording) -> list[int]:
    """REDUCE of a block that has no gradient to send submits nothing."""
    seen = {span.position for span in recording.spans[recording.first :]}
    program = recording.program
    return [at for at, each in enumerate(program.instructions) if each.op is Op.REDUCE and at not in seen]


def test_stages_are_traced_with_what_they_send(pool: LocalPool) -> None:
    place = Place((2, 2), {"node": {"pipeline": 2}}, 2)
    cluster, plan = cluster_of(*place.sizes), pipelined("zero1", place)
    found = pool.run(4, traced, cluster, plan)
    programs = [found[0][0][-1].program, found[-1][0][-1].program]
    step = simulate_stages(programs, [step_costs(each, [1e6] * len(each.blocks)) for each in programs])
    for rank in (0, 3):
        last = found[rank][0][-1]
        _check(last)
        between = (span for span in last.spans if span.category.startswith("pipeline"))
        kinds = {last.program.instructions[span.position].op for span in between}
        assert Op.SEND in kinds
        assert any(span.category == "wait pipeline" for span in last.spans)
        events = events_of(compared_trace_json(step.passes[rank // 2], last, step=3, rank=rank))
        predicted = [event for event in events["X"] if event["pid"] == 0]
        assert len(predicted) == len(step.passes[rank // 2])


@pytest.mark.parametrize("chunks", [2, *nightly(1)])
def test_messages_of_experts_are_on_their_lanes(pool: LocalPool, chunks: int) -> None:
    """As many of each class in each pass as are predicted, on the same lanes; a wait names the message it was for."""
    cluster = cluster_of(2, 2)
    table = {"package": {"rows": 2}, "node": {"expert": 2}}
    plan = replace(exact("zero3", cluster), experts=table, expert_chunks={"forward": chunks, "backward": chunks})
    for rank, (recordings, _, _) in enumerate(pool.run(4, traced, cluster, plan, "experts")):
        last = recordings[-1]
        _check(last)
        predicted = record(last.program, step_costs(last.program, [1e6] * len(last.program.blocks)))
        found, wanted = (_inside(each) for each in (last, predicted))
        assert found == wanted
        assert {category for _, category, _ in found} == {"route", "dispatch", "combine"}
        assert {lane for _, _, lane in found} == {0, 1}
        waits = [span for span in last.spans[last.first :] if span.category in ("wait dispatch", "wait combine")]
        assert waits
        assert all(last.spans[span.after].category == span.category.removeprefix("wait ") for span in waits)
        drawn = [event for event in events_of(_compared(last, rank))["X"] if event["name"] == "dispatch"]
        assert {event["pid"] for event in drawn} == {0, 1}
        assert "COUNT" in {last.program.instructions[span.position].op.name for span in last.spans if span.lane >= 0}


def _inside(recording: Recording) -> Counter[tuple[int, str, int]]:
    """(Position, class, lane) of the messages inside passes."""
    own, program = recording.spans[recording.first :], recording.program
    inside = (span for span in own if span.lane != COMPUTE and program.instructions[span.position].op in PASSES)
    return Counter((span.position, span.category, span.lane) for span in inside)


def test_steps_that_are_not_traced_call_what_they_always_did(pool: LocalPool) -> None:
    cluster = cluster_of(2)
    for before, during, after in pool.run(2, calls_of_steps, cluster, exact("zero3", cluster)):
        assert before == after
        tracing = {name for name in during if name.startswith("terrace.runtime.tracing")}
        assert any("marked" in name for name in tracing)
        assert not [name for name in before if name.startswith("terrace.runtime.tracing")]
