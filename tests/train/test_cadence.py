"""`train.checkpoint_every = "auto"`: agreed intervals, a run that saves by them, and refusals."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from terrace.base.errors import TerraceError
from terrace.planner.goodput import Job, Save
from terrace.train import saves
from terrace.train.hooks import StepDone
from terrace.train.resolve import resolve
from terrace.train.saves import FIRST, Measured, Saves
from tests.support.tiny_runs import terrace, write_run

JOB = Job(mean_s=1000.0, restart_s=60.0)
FAILING = {"cluster": {"failures": {"device_hours": 1.0, "restart_s": 60.0}}}


def done(step_s: float) -> StepDone:
    return cast(StepDone, SimpleNamespace(record=SimpleNamespace(step_s=step_s)))


def test_a_stall_is_timed_and_named_after_messages_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next step would wait for them, and a rank that hangs in one would be said to save."""
    clock, order = [0.0], list[str]()

    def lasts(name: str, seconds: float) -> Any:
        def call(*_: object) -> None:
            order.append(name)
            clock[0] += seconds

        return call

    made: Any = object.__new__(Saves)
    made._rank = SimpleNamespace(
        engine=SimpleNamespace(drain=lasts("drain", 5.0), check_bytes=lasts("check", 3.0)),
        dog=SimpleNamespace(idle=lasts("named", 0.0)),
    )
    made._saver = SimpleNamespace(is_under_way=False, start=lasts("start", 1.0), news=lambda: None)
    monkeypatch.setattr(saves, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert made._save(4, None) == 1.0
    assert order == ["drain", "named", "start", "check"]


def test_all_ranks_take_the_interval_of_the_slowest() -> None:
    """Of two ranks: this one's figures, and those of one that stalls longer but steps faster."""
    notes: list[str] = []
    cadence = Measured(JOB, lambda own: [own, (2.0, 0.5, 0.0)], notes.append)
    assert [cadence.is_due(done(1.0)) for _ in range(FIRST)] == [False] * (FIRST - 1) + [True]
    cadence.saved(9.0, 0.0)  # allocates its memory
    first = JOB.best_steps(1.0, Save(stall_s=9.0))
    assert [cadence.is_due(done(1.0)) for _ in range(first)] == [False] * (first - 1) + [True]
    cadence.saved(0.1, 0.0)
    second = JOB.best_steps(1.0, Save(stall_s=2.0))
    assert second < first
    assert [cadence.is_due(done(4.0)) for _ in range(second)] == [False] * (second - 1) + [True]
    # A save that takes an hour to count is the only one in that hour.
    cadence.saved(0.1, 3600.0)
    assert [cadence.is_due(done(4.0)) for _ in range(900)] == [False] * 899 + [True]
    assert [note.split(",")[0] for note in notes] == [
        f"saves every {first} steps",
        f"saves every {second} steps",
        "saves every 900 steps",
    ]
    assert "something fails every 0.278 h" in notes[0]


def test_a_run_saves_by_its_own_stall(tmp_path: Path) -> None:
    """Then it is resumed, and saves after its third step again."""
    write_run(tmp_path, 2, plan="zero1", steps=6, keep_checkpoints=20, checkpoint_every="auto")
    # A failure in two days and saves of milliseconds: an interval of some 40 s, far more than the run takes.
    failing = ("--cluster.failures.device_hours", "100", "--cluster.failures.restart_s", "60")
    words = ("train", "--config", "run.toml", "--folder", "run", "--resume", "auto", *failing)
    for steps, saved in ((6, [3, 6]), (10, [3, 6, 9, 10])):
        ended = terrace(*words, "--train.steps", str(steps), cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        assert sorted(int(each.name[5:]) for each in (tmp_path / "run/checkpoints").iterdir()) == saved
    notes = [event["text"] for event in _events(tmp_path) if event["event"] == "note"]
    assert sum(note.startswith("saves every ") for note in notes) == 2


def _events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run/events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "needs to know how often parts fail: give the cluster a table [failures]"),
        ({"cluster": {"failures": {"device_hours": 0.01, "restart_s": 60.0}}}, "so restarts would take longer"),
        (FAILING | {"plan": {"outer": {"tier": "package", "every": 4}}}, "islands (plan.outer) go on apart"),
        (
            FAILING | {"train": {"checkpoint_every": "often"}},
            "checkpoint_every = 'often' is not one of its values",
        ),
        (FAILING | {"train": {"checkpoint_every": -1}}, "train.checkpoint_every = -1 must be at least 0"),
    ],
)
def test_what_auto_cannot_go_by(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    path = write_run(tmp_path, 2, plan="zero1" if "plan" not in keys else "ddp", checkpoint_every="auto")
    with pytest.raises(TerraceError) as caught:
        resolve(str(path), {}, keys)
    assert said in str(caught.value)


def test_a_table_of_failures_alone_changes_nothing(tmp_path: Path) -> None:
    path = str(write_run(tmp_path, 2, plan="zero1"))
    plain, failing = resolve(path, {}, {}), resolve(path, {}, FAILING)
    assert failing.train == plain.train
    assert (failing.plan, failing.cluster.device) == (plain.plan, plain.cluster.device)
    assert failing.cluster != plain.cluster
