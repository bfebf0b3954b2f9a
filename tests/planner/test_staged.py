"""A pipelined step drawn out: its seconds are the evaluation's, none is lost, and a plan leads back to its choice."""

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrace.base.errors import PlanError
from terrace.model.config import parse_model
from terrace.plan import Plan
from terrace.planner import Choice, Evaluator, Placement, Space, plan_of
from terrace.planner.chosen import choice_of, parse_schedule
from terrace.planner.explain import choice_changes
from terrace.planner.search import cores_of
from terrace.planner.space import placements, shapes, units
from terrace.planner.staged import IDLE, StagedStep, path_sentence, played_words, stage_steps
from terrace.planner.stages import SERIAL, traits
from terrace.planner.task import MEGATRON, num_micros
from terrace.program import build
from terrace.report.stages import stages_page
from terrace.report.stages_svg import MAX_BARS, close_up, memories_svg, stage_bars, stages_svg
from terrace.report.svg import PLOT
from terrace.simulate import Change, simulate, step_costs
from terrace.simulate.footprint import work_of
from terrace.simulate.timeline_picture import memory_picture, picture
from terrace.simulate.trace import stages_trace_json
from tests.support.planner_cases import CLUSTERS, evaluator_of, gpt, small_task

DGX = CLUSTERS["dgx 4x2"]
EIGHT = gpt(8, 512, 4, vocab=1000, positions=512)
REPLICATED, SHARDED = Placement(-1, -1, -1), Placement(1, 1, 1)
TWO_TWO = ((2, 1, 1, 2), (1, 1, 1, 2))  # data 2, pipeline 4
MIXED = ((1, 2, 1, 2), (1, 1, 2, 1))  # tensor 2, context 2, pipeline 2


def evaluator(batch: int = 16) -> Evaluator:
    return evaluator_of(small_task(DGX, batch=batch, model=EIGHT))


def choices() -> list[Choice]:
    found = []
    for name, trait in traits().items():
        for rows, placement, again in ((TWO_TWO, SHARDED, 0), (MIXED, REPLICATED, 1)):
            found.append(Choice(again, 1, name, trait.chunks[0], 1, placement, rows))
    return found


def step_of(choice: Choice) -> StagedStep:
    return stage_steps(evaluator(), choice)


@pytest.mark.parametrize("choice", choices(), ids=lambda choice: f"{choice.schedule} {choice.placement.params}")
def test_the_step_is_the_evaluation_and_every_second_of_it_is_somewhere(choice: Choice) -> None:
    step = step_of(choice)
    assert step.step_s == evaluator().evaluate(choice).step_s
    assert step.stretch * step.timeline.makespan_s + step.tail_s == pytest.approx(step.step_s, rel=1e-12)
    assert step.stretch >= 1 - 1e-12
    for stage in step.stages:
        assert math.fsum(stage.time_s.values()) == pytest.approx(step.step_s)
        assert min(stage.time_s.values()) >= 0
        assert math.fsum(spent for _, spent in stage.tail) <= step.tail_s * (1 + 1e-9)
    assert math.fsum(step.path_s.values()) == pytest.approx(step.step_s)
    assert 0 < step.bubble < 1
    wanted = {"pipeline"} | ({"tensor", "context"} if choice.rows == MIXED else {"data"})
    assert wanted <= {axis for axis, _ in step.exposed_s}
    assert math.fsum(step.exposed_s.values()) < step.step_s


@pytest.mark.parametrize("choice", choices(), ids=lambda choice: f"{choice.schedule} {choice.placement.params}")
def test_memory_of_a_stage_comes_and_goes_and_peaks_as_evaluated(choice: Choice) -> None:
    step = step_of(choice)
    for stage in step.stages:
        held = stage.curve.varying_bytes["activations"]
        assert (held[0], held[-1], min(held)) == (0, 0, 0)
        assert list(stage.curve.times_s) == sorted(stage.curve.times_s)
        needed = sum(stage.memory_bytes.values())
        assert stage.curve.peak[0] <= needed * (1 + 1e-6)
        if not stage.part.head:  # there the evaluation counts logits for every micro-batch in flight
            assert stage.curve.peak[0] == pytest.approx(needed, rel=1e-3)
    most = max(sum(stage.memory_bytes.values()) for stage in step.stages)
    assert most == step.estimate.needed_bytes


def test_tensor_messages_are_taken_out_of_the_passes_and_named() -> None:
    choice = Choice(1, 1, "1f1b", 1, 1, REPLICATED, MIXED)
    step, own = step_of(choice), evaluator()
    played = own.stages(choice)[1][0].report(num_micros(own.task, choice))
    first = step.stages[0].time_s
    whole = first["forward"] + first["backward"] + first["tensor"] + first["context"]
    assert whole == pytest.approx(played["forward"] + played["backward"])
    assert {("node", "tensor"), ("system", "context")} <= step.path_s.keys()
    words = " ".join(played_words(step))
    assert "Played are the orders of schedule 1f1b" in words
    assert "Messages of tensor ranks hide" in words
    assert "those of a ring hide behind the round" in words
    assert path_sentence(step).startswith("On the critical path of the step: ")


@given(data=st.data())
def test_a_plan_leads_back_to_its_choice(data: st.DataObject) -> None:
    task = small_task(CLUSTERS[data.draw(st.sampled_from(sorted(CLUSTERS)))], batch=24)
    space, own = Space(task=task), evaluator_of(task)
    shape = data.draw(st.sampled_from(list(shapes(space))))
    core = data.draw(st.sampled_from(list(cores_of(space, own.bounds, shape))))
    placement = data.draw(st.sampled_from(placements(space, shape)))
    unit = data.draw(st.sampled_from(units(space, core.num_micros, placement, core.schedule != SERIAL)))
    choice = core.choice(placement, unit)
    assert choice_of(task, plan_of(task, choice)) == choice


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mapping": {"rack": {"data": 2}}}, "tier 'rack'"),
        ({"mapping": {"node": {"tensors": 4}}}, "did you mean 'tensor'"),
        ({"mapping": {"node": {"tensor": 2}}}, "multiply to 2, but tier 'node' of cluster"),
        ({"mapping": {"node": {"pipeline": 0}}}, "a degree is at least 1"),
        ({"mapping": {"node": {"pipeline": 4}}, "schedule": "2f2b"}, "no schedule '2f2b'"),
        ({"mapping": {"node": {"pipeline": 4}}, "schedule": "1f1b:3"}, "write one of '1f1b'"),
        ({"mapping": {"node": {"pipeline": 4}}, "unit": 2}, "write unit = 1"),
        ({"schedule": "1f1b"}, "has no effect without a pipeline axis"),
        ({"micro_batch": 5}, "not a multiple"),
        ({"unit": 7}, "does not divide"),
        ({"grads": "device"}, "params <= grads"),
        ({"recompute": ("head",)}, "recompute"),
    ],
)
def test_a_plan_that_is_no_choice_is_refused(changed: dict[str, Any], said: str) -> None:
    given_plan: dict[str, Any] = {"params": "node", "grads": "node", "optimizer": "node", "compute": "bf16"}
    with pytest.raises(PlanError, match=said):
        choice_of(evaluator(32).task, Plan(**(given_plan | changed)))


def test_a_tensor_degree_must_divide_the_heads() -> None:
    task = small_task(CLUSTERS["dgx 2x3"], batch=12)
    plan = Plan(params="device", grads="device", optimizer="device", mapping={"system": {"tensor": 3}})
    with pytest.raises(PlanError, match="4 heads, which tensor rows = 3 do not divide"):
        choice_of(task, plan)


def test_schedules_by_their_words() -> None:
    assert parse_schedule("1f1b") == ("1f1b", 1)
    assert parse_schedule("interleaved") == ("interleaved", 2)
    assert parse_schedule("interleaved:4") == ("interleaved", 4)


def test_changes_are_evaluated_and_sorted() -> None:
    own, choice = evaluator(), Choice(0, 1, "1f1b", 1, 1, SHARDED, TWO_TWO)
    found = choice_changes(own, choice)
    assert [change.step_s for change in found] == sorted(change.step_s for change in found)
    assert {"plan", "cluster"} == {change.kind for change in found}
    named = {change.words: change for change in found}
    other = choice._replace(schedule="interleaved", chunks=2)
    assert named['schedule = "interleaved:2"'].step_s == own.evaluate(other).step_s
    assert named['schedule = "interleaved:2"'].plan == plan_of(own.task, other)
    assert named["FLOP/s of the device x 2"].step_s < own.evaluate(choice).step_s


def test_the_picture_has_a_line_a_stage_and_shows_the_tail() -> None:
    step = step_of(choices()[0])
    tails_s = [math.fsum(spent for _, spent in stage.tail) for stage in step.stages]
    *lines, legend = picture(step.timeline, 80, stretch=step.stretch, tails_s=tails_s).splitlines()
    assert len(lines) == len(step.stages)
    assert {len(line) for line in lines} == {80}
    assert "U sums of gradients and update" in legend
    width = 80 - len("stage 0 ")
    for line, tail_s in zip(lines, tails_s, strict=True):
        assert line.count("U") == pytest.approx(width * tail_s / step.step_s, abs=1.5)


def test_the_memory_picture_follows_the_curves() -> None:
    step = step_of(Choice(0, 1, "1f1b", 1, 1, SHARDED, TWO_TWO))
    curves = [stage.curve for stage in step.stages]
    lines = memory_picture(curves, step.step_s, 80).splitlines()
    highest = max(curve.peak[0] for curve in curves)
    for line, curve in zip(lines, curves, strict=True):
        digits = line.split()[-1]
        assert len(line) == 80
        assert max(digits) == str(min(9, int(10 * curve.peak[0] / highest)))
        assert digits[-1] == str(min(9, int(10 * curve.total_bytes[-1] / highest)))


def test_the_trace_has_a_track_a_stage_and_ends_with_the_step() -> None:
    step = step_of(Choice(0, 1, "zb-h1", 1, 1, SHARDED, TWO_TWO))
    tails, curves = [stage.tail for stage in step.stages], [stage.curve for stage in step.stages]
    text = stages_trace_json(step.timeline, step.stretch, tails, curves, name="n", step_s=step.step_s)
    events = json.loads(text)["traceEvents"]
    tracks = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert tracks == [f"stage {stage}" for stage in range(4)]
    bars = [event for event in events if event["ph"] == "X"]
    assert len(bars) == sum(map(len, step.timeline.orders.tasks)) + sum(map(len, tails))
    assert max(bar["ts"] + bar["dur"] for bar in bars) == pytest.approx(1e6 * step.step_s)
    for stage in range(4):
        own = sorted((bar["ts"], bar["ts"] + bar["dur"]) for bar in bars if bar["tid"] == stage + 1)
        assert all(after[0] >= before[1] - 1e-6 for before, after in pairwise(own))
    assert {event["name"] for event in events if event["ph"] == "C"} == {
        f"memory of stage {stage} (bytes)" for stage in range(4)
    }


@pytest.mark.parametrize("batch", [16, 512])
def test_the_page_holds_every_stage_and_needs_nothing_else(batch: int) -> None:
    own, choice = evaluator(batch), Choice(0, 1, "interleaved", 2, 1, SHARDED, TWO_TWO)
    step = stage_steps(own, choice)
    page = stages_page(step, own.sent_bytes(choice), choice_changes(own, choice), subtitle="a <b>", advice="do & go")
    assert "a &lt;b&gt;" in page
    assert "do &amp; go" in page
    assert not re.findall(r"(?:src|href)=|url\(|@import", page)
    assert len(page.encode()) < 600_000
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page)[0])
    assert len(data["charts"]) == page.count('<svg class="chart"') == (3 if batch == 16 else 4)
    assert all(len(chart.get("bars", chart.get("memories", [0] * 4))) == 4 for chart in data["charts"])
    assert ("close up" in page) == (batch == 512)
    ends = [bar[1] for row in data["charts"][0]["bars"] for bar in row]
    assert max(ends) == pytest.approx(PLOT, abs=0.02)
    bars, least_s = stage_bars(step)
    assert sum(map(len, bars.values())) <= MAX_BARS
    assert (least_s > 0) == (batch == 512)
    window = close_up(step)
    near, joined_s = stage_bars(step, window)
    assert joined_s == 0
    for text in (stages_svg(step, bars), stages_svg(step, near, window), memories_svg(step)):
        plot = next(child for child in ElementTree.fromstring(text) if child.tag.endswith("svg"))
        width, height = float(plot.attrib["width"]), float(plot.attrib["height"])
        for shape in plot:
            for x in re.findall(r"[MH]([\d.e+-]+)", shape.attrib["d"]):
                assert -0.01 <= float(x) <= width + 0.01
            for y in re.findall(r"(?:V|M[\d.e+-]+ )([\d.e+-]+)", shape.attrib["d"]):
                assert -0.01 <= float(y) <= height + 0.01


@pytest.mark.parametrize(("compute", "kv_heads"), [("fp32", 2), ("fp32", 4), ("fp64", 4), ("bf16", 2)])
def test_planned_is_simulated_whatever_attention_the_decoder_takes(compute: Any, kv_heads: int) -> None:
    """Grouped heads in fp32 and all in fp64 attend with plain products on CUDA."""
    llama = {"model_type": "llama", "vocab_size": 1000, "hidden_size": 512, "num_hidden_layers": 4}
    llama |= {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "intermediate_size": 1024}
    master: Any = "fp64" if compute == "fp64" else "fp32"
    task = replace(small_task(DGX, batch=32, model=parse_model(llama)), compute=compute, master=master)
    choice = Choice(0, 1, SERIAL, 1, 1, Placement(0, 1, 1), ((4, 1, 1, 1), (2, 1, 1, 1)))
    plan = plan_of(task, choice)
    program = build(task.cluster, plan, task.blocks, num_micros(task, choice))
    report = simulate(program, step_costs(program, work_of(task.cluster, plan, task.model, task.sequence)))
    assert evaluator_of(task).evaluate(choice).step_s == pytest.approx(report.step_s, rel=1e-9)


def test_late_sums_follow_the_orders() -> None:
    task = small_task(DGX, batch=16, model=EIGHT)
    choice = Choice(0, 1, "1f1b", 1, 1, REPLICATED, TWO_TWO)
    late = evaluator_of(replace(task, software=MEGATRON))
    step = stage_steps(late, choice)
    assert step.stretch * step.timeline.makespan_s + step.tail_s == pytest.approx(late.evaluate(choice).step_s)
    assert step.stretch == pytest.approx(1.0)
    assert all("wait sync" in dict(stage.tail) for stage in step.stages)
    assert step.exposed_s["pipeline", "system"] > 0


def test_names_on_the_page_are_text() -> None:
    evil = "</script><img src=x>"
    task = small_task(replace(DGX, name=evil), batch=16, model=EIGHT)
    own, choice = evaluator_of(task), Choice(0, 1, "1f1b", 1, 1, SHARDED, TWO_TWO)
    change = Change(words=evil, kind="plan", note=evil, cluster=DGX, plan=plan_of(task, choice), step_s=1.0)
    page = stages_page(stage_steps(own, choice), own.sent_bytes(choice), [change], subtitle=evil, advice=evil)
    assert evil not in page
    assert "<img" not in page


def test_idle_is_what_the_orders_leave() -> None:
    """With nothing to wait for among data ranks, idle is the timeline's own, and the bubble that of 1F1B."""
    choice = Choice(0, 1, "1f1b", 1, 1, REPLICATED, TWO_TWO)
    step = step_of(choice)
    for stage, busy_s in zip(step.stages, step.timeline.busy_s, strict=True):
        tail_s = math.fsum(spent for _, spent in stage.tail)
        idle_s = step.stretch * step.timeline.makespan_s - busy_s + step.tail_s - tail_s
        assert stage.time_s[IDLE] == pytest.approx(idle_s, rel=0.02)
