"""Whether a prediction kept to its limit is said by one rule, and only where steps and machine allow it."""

import ast
import os
from dataclasses import replace
from pathlib import Path

import pytest

from terrace.program.report import LEAST_STEPS, StepReport, judged, why_no_verdict
from terrace.report.tables import STEP_BAND, band_words
from terrace.train.busy import STEPPING, CoreSeconds, busy_words
from terrace.train.metrics import StepRecord, Summary

BUSY = "other programs took 50 % of the cores while the machine was measured"
ROOT = Path(__file__).parents[2]


def test_a_verdict_needs_steps_and_a_quiet_machine() -> None:
    assert why_no_verdict(LEAST_STEPS) == ""
    assert why_no_verdict(9) == "9 of at least 10 timed steps"
    assert why_no_verdict(10, BUSY) == BUSY
    assert why_no_verdict(0, BUSY) == f"0 of at least 10 timed steps and {BUSY}"


@pytest.mark.parametrize(("error", "verdict"), [(0.06, "+6 %, within"), (-0.5, "-50 %, OUTSIDE")])
def test_the_words(error: float, verdict: str) -> None:
    assert judged(error, STEP_BAND) == f"{verdict} its limit of 20 %"
    said = judged(error, STEP_BAND, BUSY, " at most (stage 1)")
    assert said == f"{100 * error:+.0f} % at most (stage 1); no verdict on its limit of 20 %: {BUSY}"
    assert "within" not in said
    assert "OUTSIDE" not in said


def test_memory_is_judged_from_any_number_of_steps() -> None:
    predicted = StepReport(time_s={"forward": 1.0}, sent_bytes={}, memory_bytes={"params": 104})
    measured = replace(predicted, time_s={"forward": 2.0}, memory_bytes={"params": 100})
    assert band_words([(predicted, measured)], why_no_verdict(3)) == (
        "predicted step time -50 %; no verdict on its limit of 20 %: 3 of at least 10 timed steps; "
        "predicted model state +4 %, within its limit of 10 %"
    )


@pytest.mark.parametrize(("num_steps", "num_timed"), [(2, 2), (12, 9), (14, 11), (150, 140)])
def test_warm_up_steps_are_not_timed(num_steps: int, num_timed: int) -> None:
    summary = Summary(num_steps)
    for step in range(num_steps):
        summary.add(record(step + 1))
    assert summary.num_timed == num_timed


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step, loss=1.0, grad_norm=1.0, learning_rate=1e-3, num_tokens=1, step_s=1.0, tokens_per_s=1.0, time_s={}
    )


def ranks(place: str, all_s: float, *own_s: float) -> list[CoreSeconds | None]:
    return [CoreSeconds(place, 2, all_s, each, 1.0) for each in own_s]


def test_what_the_ranks_did_not_do_on_their_cores_was_others() -> None:
    assert busy_words(ranks("a", 2.0, *[0.24] * 8)) == "", "ranks may fill all cores themselves"
    assert busy_words(ranks("a", 2.0, 0.5, 0.5)) == BUSY
    said = "other programs took 10 % of the cores while steps were timed"
    assert busy_words(ranks("a", 1.9, 0.85, 0.845), STEPPING) == said
    assert busy_words(ranks("a", 1.88, 0.85, 0.85)) == "", "on two cores less than the limit of a step"
    quiet = ranks("b", 1.0, 0.5, 0.5)
    assert busy_words([*quiet, *ranks("a", 2.0, 0.5, 0.5)]) == BUSY, "the busiest machine counts"
    assert busy_words([*quiet, None]) == ""
    assert busy_words([None, None]) == "", "a system that does not count is not called busy"


def test_seconds_of_cores_are_read_for_the_cores_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 12})
    rows = ["cpu 9 9 9 9 9 9 9 9", "cpu1 10 20 30 999 999 999 999 40 999 999", "cpu12 100 0 0 5 5 5 5 0 0 0"]
    stat.write_text("\n".join([*rows, "cpu2 7777 0 0 0 0 0 0 0 0 0", "intr 1 2 3"]))
    ticks = os.sysconf("SC_CLK_TCK")
    before = CoreSeconds.now(stat)
    assert before is not None
    assert before.all_s == 200 / ticks
    stat.write_text(stat.read_text().replace("cpu12 100", "cpu12 150"))
    now = CoreSeconds.now(stat)
    assert now is not None
    spent = now.since(before)
    assert spent.all_s == pytest.approx(50 / ticks)
    assert 0 <= spent.own_s <= 5
    assert CoreSeconds.now(tmp_path / "none") is None
    stat.write_text("cpu1 x")
    assert CoreSeconds.now(stat) is None


def test_only_one_place_gives_verdicts() -> None:
    """A second copy of the rule would differ from it one day."""
    found = set[str]()
    for path in (ROOT / "terrace").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "OUTSIDE" in text else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "OUTSIDE" in node.value:
                found.add(path.relative_to(ROOT).as_posix())
    assert found == {"terrace/program/report.py"}
