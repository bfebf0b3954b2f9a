"""A rank that dies or stops under `terrace train`: all end in time, one message names it, nothing is left over."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from terrace.base.errors import HangError
from terrace.checkpoint.layout import latest
from terrace.checkpoint.reading import Checkpoint
from terrace.checkpoint.saving import Saver
from terrace.cli.overrides import parse_overrides
from terrace.launch.start import World, launch_local
from terrace.runtime.passes import Passes
from terrace.runtime.routing.axis import ExpertAxis
from terrace.train import calibrate, loop
from terrace.train.job import RunJob
from terrace.train.metrics import Silent, read_metrics
from terrace.train.prepare import prepare
from terrace.train.resolve import resolve
from tests.support.tiny_runs import (
    all_gone,
    descendants,
    is_alive,
    one_line,
    rank_pids,
    started,
    wait_for_step,
    write_run,
)

# Longer than a busy machine keeps a rank from the processor; one that waits for a save is given five times as long.
TIMEOUT_S, SAVE_TIMEOUT_S = 6.0, 4.0
LIMIT_S = 240.0  # a run that does not end by itself
WHERE = r"step \d+, instruction \d+ `[A-Z]+[^`]*`"

EXPERTS = (
    *("--model.model_type", "mixtral", "--model.num_local_experts", "4", "--model.num_experts_per_tok", "2"),
    *("--plan.experts.node.expert", "2"),
)

pytestmark = pytest.mark.timeout(400)


def run_of(folder: Path) -> Path:
    return write_run(folder, 2, 2, steps=100_000, checkpoint_every=3, timeout_s=TIMEOUT_S, log_every=1)


def check_records(run_folder: Path, said: str, ranks: set[int]) -> None:
    """The last collectives of these ranks are kept.

    One that has not ended need not be among them: Gloo's recorder has no sends and receives, in which all others may
    wait.
    """
    assert f"; the last collectives of the ranks: {run_folder}/flight/step-*-rank-*.json" in said, said
    found = {int(path.stem[-5:]): json.loads(path.read_text()) for path in (run_folder / "flight").iterdir()}
    assert set(found) == ranks
    assert all(records["entries"][0]["profiling_name"].startswith("gloo:") for records in found.values())
    assert all(isinstance(entry["retired"], bool) for records in found.values() for entry in records["entries"])


def check_what_is_left(run_folder: Path) -> None:
    records = read_metrics(run_folder / "metrics.jsonl")
    assert [record.step for record in records] == list(range(1, len(records) + 1))
    assert len(records) >= 4
    newest = latest(run_folder)
    assert newest is not None
    Checkpoint(newest).verify()


@pytest.mark.nightly  # by day in tests/system/test_launch.py, and a stage of a pipeline
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_rank_struck_from_outside_is_named(tmp_path: Path, how: str) -> None:
    run_of(tmp_path)
    with started("train", "--config", "run.toml", "--folder", "run", cwd=tmp_path) as process:
        wait_for_step(tmp_path / "run", 4)
        family = descendants(process.pid)
        ranks = rank_pids(process.pid)
        assert len(ranks) == 4
        victim = ranks[2]
        os.kill(victim, signal.Signals[how])
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 1
        assert all_gone(family)
    said = one_line(errors)
    found = re.match(rf"terrace: error: rank (\d) stopped at (or before )?{WHERE} \(no heartbeat for ", said)
    assert found, said
    named = int(found[1])
    assert f"pid {victim}" in said
    # Others may wait for it directly or behind one that does; at least one rank is named as waiting.
    assert re.search(rf"waiting for it: ranks? [0-3, -]+ \(rank [0-3] at {WHERE}\)", said), said
    survivors = [rank for rank in range(4) if rank != named]
    assert re.search(r"\(reported by ranks? [0-3, -]+\)$", said), said
    assert str(survivors[0]) in said.rsplit("(reported by", 1)[1]
    check_what_is_left(tmp_path / "run")


class Strike:
    """Makes one rank misbehave at an instruction of step 4."""

    def __init__(self, world: World, folder: Path, victim: int, how: str) -> None:
        (folder / f"{os.getpid()}.pid").touch()
        if world.rank != victim:
            return
        if how in ("computing", "dispatching"):
            owner, name = (Passes, "forward") if how == "computing" else (ExpertAxis, "declare")
            go_on = getattr(owner, name)

            def slow(*arguments: object) -> object:
                metrics = folder / "run" / "metrics.jsonl"  # rank 0 opens it when it comes to its own first step
                if metrics.exists() and metrics.read_text().count("\n") >= 4:
                    time.sleep(1000)
                return go_on(*arguments)

            setattr(owner, name, slow)
        elif how == "measuring":
            calibrate._skew_s = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        else:
            assert how == "saving", how
            start = Saver.start

            def hang(saver: Saver, step: int, best: int = -1) -> None:
                if step:
                    time.sleep(1000)
                start(saver, step, best)

            Saver.start = hang  # type: ignore[assignment]


def struck(world: World, job: RunJob, folder: Path, victim: int, how: str) -> None:
    """One rank of a run that is about to be stopped; it measures the machine for a moment only."""
    Strike(world, folder, victim, how)
    calibrate._BUDGET_S, calibrate._REPEATS = 0.03, 4  # its process ends with the run
    loop.train(world, job, Silent())


@pytest.mark.nightly
def test_a_rank_killed_while_constants_are_measured_is_named(tmp_path: Path) -> None:
    job = prepare(resolve(str(run_of(tmp_path)), {}, {}), tmp_path / "run", None)
    with pytest.raises(HangError, match=r"^rank 2 stopped at (or before )?step 0, instruction 0 `MEASURE .*") as caught:
        launch_local(4, struck, (job, tmp_path, 2, "measuring"), grace_s=5.0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("victim", "how", "more"),
    [
        (1, "computing", ()),
        pytest.param(0, "computing", (), marks=pytest.mark.nightly),
        pytest.param(3, "saving", (), marks=pytest.mark.nightly),  # by day "frozen" of tests/system/test_stop.py
        pytest.param(
            1,
            "computing",
            ("--plan.mapping.package.tensor", "2", "--plan.mapping.node.data", "2"),
            marks=pytest.mark.nightly,
        ),
        pytest.param(2, "dispatching", EXPERTS, marks=pytest.mark.nightly),
    ],
    ids=["computing", "first rank computing", "saving", "computing, its peers inside a block", "in a dispatch"],
)
def test_a_rank_that_never_returns_is_named(tmp_path: Path, victim: int, how: str, more: tuple[str, ...]) -> None:
    timeout_s = SAVE_TIMEOUT_S if how == "saving" else TIMEOUT_S
    words = ("--train.timeout_s", str(timeout_s), *more)
    config = resolve(str(run_of(tmp_path)), {}, parse_overrides(words))
    job = prepare(config, tmp_path / "run", None)
    with pytest.raises(HangError) as caught:
        launch_local(4, struck, (job, tmp_path, victim, how), grace_s=2.0)
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith(f"rank {victim} has not moved"), said
    if how != "saving":
        assert re.search(r"from step \d+, instruction \d+ `FORWARD[^`]*` \(computing", said), said
        assert "waiting for it: rank" in said
        check_records(tmp_path / "run", said, {0, 1, 2, 3})
        check_what_is_left(tmp_path / "run")
    else:
        assert "`saving a checkpoint` (outside a step" in said
        assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1].step == 3
        newest = latest(tmp_path / "run")
        assert newest is not None
        assert newest.name == "step-00000000"
    pids = {int(path.stem) for path in tmp_path.glob("*.pid")}
    assert len(pids) == 4
    assert not [pid for pid in pids if is_alive(pid)]
