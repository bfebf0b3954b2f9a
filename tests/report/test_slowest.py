"""The slowest rank of a run: found among all, and shown with its own seconds beside those of rank 0."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from terrace.cli.screen import slowest_words
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.program.report import StepReport, plain
from terrace.report import predicted_run
from terrace.report.page import page_html
from terrace.report.run_view import run_page, run_view
from terrace.train.config import run_toml
from terrace.train.job import RunJob
from terrace.train.loop import compare_ranks
from terrace.train.metrics import Outcome, Silent, SlowestRank
from terrace.train.recorder import recorded
from terrace.train.resolve import resolve
from tests.support.records import step_record, write_metrics
from tests.support.toys import cluster_of

CLUSTER = cluster_of(2, 2)
PIPELINE = Plan(mapping={"node": {"pipeline": 2}}, params="device", grads="device", optimizer="device")
ALONE = Plan(params="device", grads="device", optimizer="device")


def report(forward_s: float, wait_s: float) -> StepReport:
    return StepReport(time_s={"forward": forward_s, "wait sync": wait_s}, sent_bytes={}, memory_bytes={})


def engine_of(plan: Plan, told: list[Any]) -> Any:
    """The engine of rank 0, where the ranks exchange the reports `told`."""

    def exchange(own: object) -> list[Any]:
        assert own == told[0]
        return told

    mesh = Mesh.of(CLUSTER, plan)
    return SimpleNamespace(program=SimpleNamespace(mesh=mesh, cluster=CLUSTER), comm=SimpleNamespace(exchange=exchange))


def test_the_slowest_rank_is_that_with_most_own_work() -> None:
    # Rank 2 waits longest and rank 3 works longest: every step takes all ranks as long.
    measured = [report(0.3, 0.4), report(0.4, 0.3), report(0.1, 0.7), report(0.5, 0.2)]
    predicted = [report(1.0, 0.0), report(2.0, 0.0)]
    stages, slowest = compare_ranks(engine_of(PIPELINE, list(map(plain, measured))), predicted, measured[0])
    assert slowest == SlowestRank(
        rank=3, stage=1, predicted_s=predicted[1].time_s, measured_s={"forward": 0.5, "wait sync": 0.2}
    )
    assert stages == ((predicted[0], measured[0]), (predicted[1], measured[2]))
    times = [{"time_s": dict(each.time_s)} for each in measured]
    stages, slowest = compare_ranks(engine_of(ALONE, times), predicted[:1], measured[0])
    assert stages == ()
    assert slowest is not None
    assert (slowest.rank, slowest.stage, slowest.predicted_s) == (3, 0, predicted[0].time_s)


def test_the_screen_says_who_is_waited_for() -> None:
    slowest = SlowestRank(rank=3, stage=1, predicted_s={}, measured_s={"forward": 0.5, "wait sync": 0.2})
    told = slowest_words(slowest, {"forward": 0.3, "wait sync": 0.4}, num_stages=2)
    assert told == (
        "rank 3 (stage 1) has most work of its own, 500.0 ms of a step; rank 0 has 300.0 ms, and waits longer"
    )
    assert "stage" not in slowest_words(slowest, {"forward": 0.3}, num_stages=0)
    assert slowest_words(replace(slowest, rank=0), slowest.measured_s, 2).startswith("rank 0 has most work of its own")


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A run of 30 steps on a pipeline; its records name the slowest rank from step 20 on, its last event, too."""
    mapping = {"node": {"pipeline": 2}}
    run = resolve(
        None, {}, {"plan": {"preset": "ddp", "mapping": mapping}, "cluster": {"tiers": {"node": {"size": 2}}}}
    )
    (tmp_path / "config.toml").write_text(run_toml(run))
    times = {"forward": 0.3, "wait sync": 0.4}
    found = [{"rank": 3, "own_s": 0.5} if step >= 20 else {} for step in range(1, 31)]
    write_metrics(tmp_path, [step_record(n, step_s=0.7, time_s=times, slowest=each) for n, each in enumerate(found, 1)])
    job = RunJob(run=run, folder=tmp_path, sources=(), tokenizer_fingerprint="")
    one = report(0.3, 0.4)
    with recorded(Silent(), job) as observer:
        observer.started(one, run.cluster, 0)
        slowest = SlowestRank(
            rank=3, stage=1, predicted_s={"forward": 0.625}, measured_s={"forward": 0.5, "wait sync": 0.2}
        )
        observer.finished(
            Outcome(
                final_loss=2.0,
                num_steps=30,
                checkpoint=tmp_path,
                predicted=one,
                measured=one,
                sample=None,
                slowest=slowest,
            )
        )
    return tmp_path


def test_the_page_shows_the_slowest_rank_beside_rank_0(finished: Path) -> None:
    view = run_view(finished)
    page = page_html(run_page(view))
    mesh = Mesh.of(resolve(str(finished / "config.toml"), {}, {}).cluster, PIPELINE)
    rank = f"rank 3 of stage {mesh.stage(3)}"
    title = f"Where it goes on {rank}, which has most work of its own"
    assert title in page
    table = page.partition(title)[2]
    assert re.search(r"forward</td><td>625.0 ms</td><td>500.0 ms</td><td>\+25 %", table)
    assert re.search(r"wait sync</td><td>-</td><td>200.0 ms</td>", table)
    assert f"In the last steps {rank} has most work of its own, 500.0 ms of a step; rank 0 has 300.0 ms in the" in page
    curves = {curve.title: curve.lines for curve in view.curves}
    assert curves["Seconds of a step"]["own work of the slowest rank"] == [(step, 0.5) for step in range(20, 31)]


def test_a_comparison_of_runs_plays_no_step(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_view(finished)

    def play(*_: object) -> None:
        raise AssertionError("a step was played")

    monkeypatch.setattr(predicted_run, "play_whole", play)
    with pytest.raises(AssertionError, match="a step was played"):
        run_view(finished)
    view = run_view(finished, draws=False)
    assert (view.curves, view.figures) == (whole.curves, whole.figures)
    assert [bool(any(section.charts for section in each.sections)) for each in (whole, view)] == [True, False]


@pytest.mark.parametrize(
    "change",
    [
        {"slowest_rank": 0},  # the page has it already
        {"slowest_rank": "3"},
        {"slowest_s": {"measured": [1]}},
        {"slowest_s": {}},
        {"slowest_rank": None},
    ],
)
def test_a_run_whose_slowest_rank_is_rank_0_or_lost_has_one_table(finished: Path, change: dict[str, Any]) -> None:
    events = finished / "events.jsonl"
    *before, last = events.read_text().splitlines()
    line = json.loads(last)
    line.pop("crc32")
    events.write_text("\n".join([*before, json.dumps(line | change)]) + "\n")
    assert "which has most work of its own" not in page_html(run_page(run_view(finished)))


def test_a_run_that_goes_on_after_its_end_has_no_old_table(finished: Path) -> None:
    with (finished / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 5.0, "event": "started", "first_step": 30}) + "\n")
    assert "which has most work of its own" not in page_html(run_page(run_view(finished)))


def test_a_rank_beyond_the_settings_is_named_by_its_number(finished: Path) -> None:
    (finished / "config.toml").write_text("[plan]\nbroken = 1\n")
    titles = [section.title for section in run_view(finished).sections]
    assert "Where it goes on rank 3, which has most work of its own" in titles
