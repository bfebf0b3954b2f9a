"""The drawn cycle of islands, on a page and as text, and the mean steps of measured cycles."""

import json
from pathlib import Path

import pytest

from terrace.cli.overrides import parse_overrides
from terrace.plan.outer import Outer
from terrace.report.cycles import cycle_section, cycle_timeline_rows
from terrace.report.page import page_html
from terrace.report.predicted_run import cycle_of_run, mean_steps
from terrace.report.run_view import run_page, run_view
from terrace.report.sections import Page
from terrace.report.timeline_text import timeline_text
from terrace.simulate.cycle_timeline import CycleTimeline, cycle_timeline
from terrace.simulate.noting import WAIT_OUTER
from terrace.simulate.step import predict_step
from terrace.train.config import RunConfig, run_toml
from terrace.train.metrics import StepRecord
from terrace.train.resolve import resolve
from tests.support.cycles import islands, step_of
from tests.support.records import step_record, write_metrics
from tests.support.tiny_runs import write_run


def drawn(outer: Outer, rate: float) -> CycleTimeline:
    cycle = predict_step(step_of(islands(rate), outer)).cycle
    assert cycle is not None
    return cycle_timeline(cycle)


@pytest.mark.parametrize("rate", [1e-4, 1e-7])
@pytest.mark.parametrize("delay", [0, 2])
def test_rows_have_all_seconds_of_the_cycle(delay: int, rate: float) -> None:
    found = drawn(Outer(tier="system", every=6, fragments=2, delay=delay), rate)
    timeline = cycle_timeline_rows(found)
    assert [row.name for row in timeline.rows] == ["steps", "fragment 0", "fragment 1"]
    steps, *fragments = [
        {
            category: sum(span.end_s - span.start_s for span in row.spans if span.category == category)
            for category in timeline.categories
        }
        for row in timeline.rows
    ]
    assert sum(steps.values()) == pytest.approx(found.cycle_s, rel=1e-9)
    waited_s = sum(end_s - start_s for start_s, end_s in found.waits)
    assert steps.get(WAIT_OUTER, 0.0) == pytest.approx(waited_s, rel=1e-6, abs=1e-12)
    for crossing, row in zip(found.crossings, fragments, strict=True):
        assert sum(row.values()) == pytest.approx(crossing.end_s - crossing.start_s, rel=1e-9)
    # Exchanges follow each other on one link, so each wait is for one of them.
    assert sum(row.get(WAIT_OUTER, 0.0) for row in fragments) == pytest.approx(waited_s, rel=0.02, abs=1e-9)
    assert (waited_s > 1e-3 * found.cycle_s) == (delay == 0 or rate == 1e-7)


def test_the_same_as_text() -> None:
    found = drawn(Outer(tier="system", every=6, fragments=2, delay=2), 1e-7)
    steps, first, second, ruler, legend = timeline_text(cycle_timeline_rows(found), 80).split("\n")
    assert {len(line) for line in (steps, first, second, ruler)} == {80}
    assert steps.startswith("steps      |")
    assert {"F", "B", "."} <= set(steps[12:])
    for line, name in ((first, "fragment 0 "), (second, "fragment 1 ")):
        assert line.startswith(name)
        assert {"o", "."} <= set(line[12:])
    assert legend.endswith("o outer, . waiting")
    hidden = timeline_text(cycle_timeline_rows(drawn(Outer(tier="system", every=6, delay=2), 1e-4)), 80)
    assert "." not in hidden.split("\n")[1]


def record(step: int, **time_s: float) -> StepRecord:
    times = {name.replace("_", " "): value for name, value in time_s.items()}
    return step_record(step, step_s=sum(time_s.values()), time_s=times)


def test_measured_steps_are_means_over_whole_cycles() -> None:
    records = [record(step, forward=1.0 * step) for step in (2, 3, 4, 5, 6, 7)]  # of cycles 1-3, 4-6, 7-9
    assert mean_steps(records, 3) == [{"forward": 4.0}, {"forward": 5.0}, {"forward": 6.0}]
    assert mean_steps(records, 2) == [{"forward": 4.0}, {"forward": 5.0}]
    assert mean_steps(records, 7) == []
    waited = [record(1, forward=1.0), record(2, forward=1.0, wait_outer=3.0)]
    assert mean_steps(waited, 2) == [{"forward": 1.0}, {"forward": 1.0, "wait outer": 3.0}]


def islands_run(folder: Path) -> RunConfig:
    path = write_run(folder, 2, 2, plan="zero2")
    words = ("--plan.grads", "package", "--plan.optimizer", "package", "--plan.outer.tier", "node")
    return resolve(str(path), {}, parse_overrides((*words, "--plan.outer.every", "4", "--train.steps", "40")))


def test_a_run_has_its_measured_cycle_beside_the_predicted_one(tmp_path: Path) -> None:
    run = islands_run(tmp_path)
    records = [record(step, forward=2.0, **({"wait_outer": 8.0} if step % 4 == 0 else {})) for step in range(1, 41)]
    found = page_html(Page(title="", sections=cycle_of_run(run, None, records)))
    assert "measured in the mean" in found
    assert "<td>16.00 s</td>" in found
    assert "<td>8.00 s</td>" in found
    assert "no whole cycle has been measured" in page_html(
        Page(title="", sections=cycle_of_run(run, None, records[:3]))
    )
    # On the page of a run folder.
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text(run_toml(run))
    write_metrics(folder, records)
    page = page_html(run_page(run_view(folder)))
    assert "The cycle of islands" in page
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert page.count('<svg class="chart"') == len(data["charts"])


def test_a_page_says_what_is_sent_when() -> None:
    found = cycle_section(drawn(Outer(tier="system", every=6, fragments=2, delay=2), 1e-7), "one line\nanother")
    words = str(found.charts[0].data["bars"])
    assert "fragment 1: sent after step 6, " in words
    assert "applied after step 2; a rank sends " in words
    assert " over system" in words
    assert found.words == ["one line", "another"]
