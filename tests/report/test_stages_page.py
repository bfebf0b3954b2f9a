"""A pipelined step on a page, in a trace and as text: every stage is there, and all of it is the recorded step."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from terrace.model.block_operations import layer_operations
from terrace.plan.layout import Layout
from terrace.plan.plan import Plan
from terrace.plan.validate import num_micro_batches
from terrace.planner.advice import Change, changes
from terrace.planner.ranking import Cost
from terrace.program.instruction import PASSES
from terrace.report.memory import memories_svg, memory_text
from terrace.report.page import page_html
from terrace.report.sections import Page
from terrace.report.step_sections import changes_section, memory_over_time_section, time_section, timeline_section
from terrace.report.step_view import StepView
from terrace.report.svg import PLOT
from terrace.report.timeline import DrawnTimeline
from terrace.simulate.bands import band_of
from terrace.simulate.footprint import work_of
from terrace.simulate.recorded import RecordedStep, record_predicted
from terrace.simulate.rows import close_up, step_timeline
from terrace.simulate.step import Step, predict_step
from terrace.simulate.trace import steps_trace_json
from tests.support.nightly import nightly
from tests.support.planner_cases import CLUSTERS, gpt, small_task

DGX = CLUSTERS["dgx 4x2"]
EIGHT = gpt(8, 512, 4, vocab=1000, positions=512)


def step_of(schedule: str = "1f1b", batch: int = 16, name: str = DGX.name) -> Step:
    mapping = {"node": {"data": 2, "pipeline": 2}, "system": {"pipeline": 2}}
    places = dict.fromkeys(("params", "grads", "optimizer"), "node")
    plan = Plan(mapping=mapping, schedule=schedule, compute="bf16", **places)  # type: ignore[arg-type]
    cluster = replace(DGX, name=name)
    task = small_task(cluster, batch=batch, model=EIGHT)
    return Step(
        cluster=cluster,
        plan=plan,
        blocks=task.blocks,
        num_micros=num_micro_batches(plan, Layout.of(cluster, plan), batch),
        sequence=task.sequence,
        work=work_of(cluster, plan, layer_operations(EIGHT), task.sequence),
    )


def recorded_step(step: Step) -> RecordedStep:
    return record_predicted(predict_step(step))


def page_of(step: RecordedStep, candidates: list[Change], subtitle: str, advice: str) -> str:
    """A page of a step that no run has."""
    band, cluster = band_of(step.step.cluster, step.step.plan), step.step.cluster
    run = SimpleNamespace(cluster=cluster, plan=step.step.plan)
    view: Any = SimpleNamespace(run=run, recorded=step, predicted=step.prediction, is_pipelined=True, band=band)
    view.candidates = candidates
    parts = (timeline_section, memory_over_time_section, time_section, changes_section)
    sections = [section for part in parts for section in part(view)]
    return page_html(Page(title=cluster.name, subtitle=subtitle, lead=[advice], sections=sections))


def recorded(schedule: str = "1f1b", batch: int = 16) -> RecordedStep:
    return recorded_step(step_of(schedule, batch))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv", "interleaved:2"])
def test_memory_of_a_stage_comes_and_goes(schedule: str) -> None:
    step = recorded(schedule)
    for curve, report in zip(step.curves, step.prediction.reports, strict=True):
        held = curve.varying_bytes["activations"]
        assert held[0] == 0
        assert max(held) > 0
        assert [min(held), held[-1]] == pytest.approx([0, 0])
        assert list(curve.times_s) == sorted(curve.times_s)
        assert max(curve.varying_bytes["gathered"]) <= report.memory_bytes["gathered"]
        assert max(curve.varying_bytes["grads_full"]) <= report.memory_bytes["grads_full"]


def test_the_memory_picture_follows_the_curves() -> None:
    step = recorded()
    lines = memory_text(step.curves, step.end_s, 80).splitlines()
    highest = max(curve.peak[0] for curve in step.curves)
    assert lines[-1].startswith("9 stands for more than nine tenths of ")
    for line, curve in zip(lines[:-1], step.curves, strict=True):
        digits = line.split()[-1]
        assert len(line) == 80
        assert max(digits) == str(min(9, int(10 * curve.peak[0] / highest)))
        assert digits[-1] == str(min(9, int(10 * curve.total_bytes[-1] / highest)))


def test_the_trace_has_a_process_a_stage_and_ends_with_the_step() -> None:
    step = recorded("zb-h1")
    names = [f"stage {stage} of n" for stage in range(4)]
    text = steps_trace_json(step.recordings, step.curves, names, step.step_s)
    table = json.loads(text)
    events = table["traceEvents"]
    assert table["otherData"] == {"step_s": step.step_s}
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == [f"stage {stage} of n" for stage in range(4)]
    for stage, recording in enumerate(step.recordings):
        own = [event for event in events if event["pid"] == stage and event["ph"] == "X" and event["tid"] == 0]
        computed = [event for event in own if event["name"] in ("forward", "backward")]
        shown = [
            recording.done_s[at] > recording.started_s[at]
            for at, each in enumerate(recording.program.instructions)
            if each.op in PASSES
        ]
        assert len(computed) == sum(shown)
        ends = sorted((event["ts"], event["ts"] + event["dur"]) for event in own)
        assert all(after[0] >= before[1] - 1e-6 for before, after in pairwise(ends))
        assert ends[-1][1] == pytest.approx(1e6 * (recording.begin_s + recording.report.step_s))
        sends = [
            event for event in events if event["pid"] == stage and event["name"] in ("pipeline", "pipeline_backward")
        ]
        assert sends
        assert all(event["args"].get("bytes on node") or event["args"].get("bytes on system") for event in sends)
    assert {event["pid"] for event in events if event["ph"] == "C"} == set(range(4))


@pytest.mark.parametrize("batch", [16, *nightly(512)])
def test_the_page_holds_every_stage_and_needs_nothing_else(batch: int) -> None:
    step = recorded("interleaved:2", batch)
    found = changes(step.step) if batch == 16 else []
    page = page_of(step, found, "a <b>", "do & go")
    assert "a &lt;b&gt;" in page
    assert "do &amp; go" in page
    assert not re.findall(r"(?:src|href)=|url\(|@import", page)
    assert len(page.encode()) < 600_000
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page)[0])
    assert len(data["charts"]) == page.count('<svg class="chart"') == (3 if batch == 16 else 4)
    assert all(len(chart.get("bars", chart.get("memories", [0] * 4))) == 4 for chart in data["charts"])
    assert ("close up" in page) == (batch == 512)
    ends = [bar[1] for row in data["charts"][0]["bars"] for bar in row]
    assert max(ends) == pytest.approx(PLOT, abs=0.5)
    whole, near = DrawnTimeline(step_timeline(step), 2000), DrawnTimeline(close_up(step_timeline(step)), 2000)
    assert sum(map(len, whole.bars)) <= 2000
    assert (whole.least_s > 0) == (batch == 512)
    assert near.least_s == 0
    for text in (whole.svg(), near.svg(), memories_svg(step.curves, step.end_s)):
        plot = next(child for child in ElementTree.fromstring(text) if child.tag.endswith("svg"))
        width, height = float(plot.attrib["width"]), float(plot.attrib["height"])
        for shape in plot:
            for x in re.findall(r"[MH]([\d.e+-]+)", shape.attrib["d"]):
                assert -0.01 <= float(x) <= width + 0.01
            for y in re.findall(r"(?:V|M[\d.e+-]+ )([\d.e+-]+)", shape.attrib["d"]):
                assert -0.01 <= float(y) <= height + 0.01


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_bars_of_the_stages_are_as_wide_as_the_page_and_no_column_cuts_them(schedule: str) -> None:
    step = recorded(schedule)
    page = page_of(step, [], "", "")
    part = page.partition("Where the time goes</h2>")[2]
    bars, _, table = part.partition("<table>")
    rows = re.findall(r"<span>stage (\d)</span><div class=meter><div class=bar>(.*?)</div></div>", bars)
    longest = max(report.step_s for report in step.prediction.reports)
    for (stage, row), report in zip(rows, step.prediction.reports, strict=True):
        assert report is step.prediction.reports[int(stage)]
        widths = [float(width) for width in re.findall(r"width:([\d.]+)%", row)]
        spent = [seconds for seconds in report.time_s.values() if seconds > 0]
        assert sorted(widths) == pytest.approx(sorted(100 * each / longest for each in spent), abs=0.01)
    assert "class=meter" not in table.partition("</table>")[0]
    named = set(re.findall(r"</i>([^<]+)", bars))
    used = {name for report in step.prediction.reports for name, spent in report.time_s.items() if spent > 0}
    assert named == {name for name in used if not name.startswith("wait ")} | {"waits"}


def test_names_on_the_page_are_text() -> None:
    evil = "</script><img src=x>"
    step = recorded_step(step_of(name=evil))
    cost = Cost(num_micros=1, step_s=1.0, time_s={}, memory_bytes={})
    change = Change(words=evil, note=evil, cluster=DGX, plan=step.step.plan, cost=cost)
    page = page_of(step, [change], evil, evil)
    assert evil not in page
    assert "<img" not in page


def test_changes_of_a_pipeline_are_played_and_sorted() -> None:
    step = step_of()
    found = changes(step)
    assert [change.step_s for change in found] == sorted(change.step_s for change in found)
    named = {change.words: change for change in found}
    faster = named['schedule = "zb-h1"']
    assert faster.step_s == recorded_step(replace(step, plan=faster.plan)).step_s
    assert named["FLOP/s of the device x 2"].step_s < recorded_step(step).step_s
    assert {"bandwidth of tier system x 2", 'params = "device"', "prefetch = 2"} <= named.keys()


def test_the_critical_path_in_words_says_who_waits() -> None:
    view: Any = SimpleNamespace(recorded=recorded(), is_pipelined=True)
    words = StepView.__dict__["path_words"].func(view)
    assert words.startswith("On the critical path of the step: ")
    assert re.search(r"Stages wait for other stages for \d+\.\d % of the step in the mean, stage \d most", words)
