"""A run that ends in the middle in every way, and goes on: the same numbers, on any number of ranks."""

import os
import resource
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from terrace.base.errors import CheckpointError, HangError
from terrace.checkpoint import snapshot
from terrace.checkpoint.layout import latest
from terrace.checkpoint.reading import Checkpoint
from terrace.launch.start import LocalPool, World
from terrace.launch.stop import Stop
from terrace.train import sample
from terrace.train.job import RunJob
from terrace.train.layers import resolve_table
from terrace.train.loop import train
from terrace.train.metrics import Silent, StepRecord
from terrace.train.prepare import prepare
from terrace.train.resolve import fitted_run, parse_run
from tests.support.nightly import nightly
from tests.support.tiny_runs import metrics, write_run

STEPS, MIDDLE, EVERY, RANKS = 8, 4, 2, 4
LIMIT_S = 140.0

pytestmark = pytest.mark.timeout(300)


class Struck(Silent):
    """The observer of a rank that something happens to after a step: to itself, or while it then saves."""

    def __init__(self, how: str, is_victim: bool) -> None:
        self._how, self._is_victim = how, is_victim

    def stepped(self, record: StepRecord, seconds_left: float) -> None:
        if record.step != MIDDLE - 1:
            return
        if self._how == "signal" and self._is_victim:
            os.kill(os.getpid(), signal.SIGTERM)
        if self._how == "killed" and self._is_victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._how == "all killed in a save":
            snapshot.write_all = _half_then_killed
        if self._how == "disk full in a save" and self._is_victim:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))


def _half_then_killed(file: Any, data: memoryview) -> None:
    file.write(data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def rank_of(world: World, job: RunJob, how: str) -> int | None:
    """One rank; returns after which step it was stopped, None at the end."""
    sample._SAMPLE_TOKENS = 1
    with _writing_again():
        end = train(world, job, Struck(how, is_victim=world.rank == 2))
    return end.step if isinstance(end, Stop) else None


@contextmanager
def _writing_again() -> Iterator[None]:
    """The fault stays in this process, which is used again if it survives."""
    limits, working = resource.getrlimit(resource.RLIMIT_FSIZE), snapshot.write_all
    try:
        yield
    finally:
        snapshot.write_all = working
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def table_of(folder: Path, *sizes: int, plan: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """The table of a run in fp64 of a batch that 1, 2, 3, 4 and 6 ranks share evenly, at a constant rate."""
    folder.mkdir(exist_ok=True)
    each = {"steps": STEPS, "checkpoint_every": EVERY, "batch": 12, "warmup_steps": 0, "final_lr_fraction": 1.0}
    path = write_run(folder, *sizes, **(each | keys))
    fp64 = {"compute": "fp64", "master": "fp64"}
    measured = {"device": {"marks": {"kernels.gemm": "fitted"}}}  # so that no time is spent on measuring it
    return resolve_table(str(path), {}, {"plan": (plan or {}) | fp64, "cluster": measured})


def losses_of(run: Path) -> list[tuple[Any, ...]]:
    """All figures of every step that are no times."""
    return [tuple(line[key] for key in ("step", "loss", "grad_norm", "learning_rate")) for line in metrics(run)]


def values_of(run: Path) -> dict[str, torch.Tensor]:
    """Parameters and optimizer state at the end of a run."""
    checkpoint = Checkpoint(run / "checkpoints" / f"step-{STEPS:08d}")
    return {
        f"{block}.{name}/{kind}": value
        for block in checkpoint.layout
        for name, kinds in checkpoint.read(block).items()
        for kind, value in kinds.items()
    }


@pytest.fixture(scope="module")
def whole(pool: LocalPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without a stop, whose checkpoint of the middle is kept beside its last."""
    folder = tmp_path_factory.mktemp("whole")
    job = prepare(parse_run(table_of(folder, 2, 2, keep_checkpoints=6)), folder / "run", None)
    assert pool.run(RANKS, rank_of, job, "", timeout_s=LIMIT_S) == [None] * RANKS
    assert len(losses_of(job.folder)) == STEPS
    return job.folder


@pytest.mark.parametrize(
    ("how", "goes_on_from"),
    [
        ("signal", 4),
        ("all killed in a save", 2),
        *nightly(("killed", 2), ("more steps are asked for", 4), ("disk full in a save", 2)),
    ],
)
def test_a_run_that_stops_in_any_way_goes_on_with_the_same_bits(
    pool: LocalPool, whole: Path, tmp_path: Path, how: str, goes_on_from: int
) -> None:
    table = table_of(tmp_path, 2, 2)
    steps = {"steps": MIDDLE} if how == "more steps are asked for" else {}
    job = prepare(parse_run({**table, "train": table["train"] | steps}), tmp_path / "run", None)
    if how == "more steps are asked for":
        assert pool.run(RANKS, rank_of, job, how, timeout_s=LIMIT_S) == [None] * RANKS
    elif how == "signal":
        assert pool.run(RANKS, rank_of, job, how, timeout_s=LIMIT_S) == [MIDDLE] * RANKS
    elif how == "disk full in a save":
        with pytest.raises(
            CheckpointError, match=r"cannot write a checkpoint in .*/checkpoints \(rank 2: File too large"
        ):
            pool.run(RANKS, rank_of, job, how, timeout_s=LIMIT_S)
    else:
        with pytest.raises(HangError, match=r"killed by SIGKILL|the process is gone"):
            pool.run(RANKS, rank_of, job, how, timeout_s=LIMIT_S)
    newest = latest(job.folder)
    assert newest is not None
    late = () if how in ("signal", "more steps are asked for") else (goes_on_from - EVERY,)  # on a very busy machine
    assert newest.name in [f"step-{step:08d}" for step in (goes_on_from, *late)]
    half_written = [path for path in newest.parent.iterdir() if path.name.startswith(".")]
    assert bool(half_written) == (how == "all killed in a save")
    again = prepare(parse_run(table), job.folder, None, going_on=True)
    assert again.resume == newest
    assert pool.run(RANKS, rank_of, again, "", timeout_s=LIMIT_S) == [None] * RANKS
    assert losses_of(job.folder) == losses_of(whole)
    ours, theirs = values_of(job.folder), values_of(whole)
    assert [name for name, value in theirs.items() if not torch.equal(ours[name], value)] == []
    assert sorted(os.listdir(newest.parent)) == ["step-00000006", "step-00000008"]


@pytest.mark.parametrize(
    ("num_ranks", "sizes", "plan"),
    [
        *nightly((3, (2, 2), {})),
        (6, (2, 2), {}),
        *nightly((4, (4,), {"preset": "zero1"})),
        *nightly((4, (2, 2), {"preset": "ddp", "mapping": {"node": {"pipeline": 2}}, "schedule": "1f1b"})),
    ],
    ids=["3 ranks", "6 ranks", "another placement", "a pipeline"],
)
def test_another_world_goes_on_with_the_same_numbers(
    pool: LocalPool, whole: Path, tmp_path: Path, num_ranks: int, sizes: Sequence[int], plan: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for step in range(MIDDLE + EVERY, STEPS + 1, EVERY):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    config, changed = fitted_run(table_of(tmp_path, *sizes, plan=plan), num_ranks)
    assert bool(changed) == (num_ranks != RANKS)
    config = replace(config, data=parse_run(table_of(whole.parent, 2, 2)).data)
    job = prepare(config, run, None, going_on=True)
    assert pool.run(num_ranks, rank_of, job, "", timeout_s=LIMIT_S) == [None] * num_ranks
    ours, theirs = losses_of(run), losses_of(whole)
    assert ours[:MIDDLE] == theirs[:MIDDLE]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, abs=1e-10, rel=0)
    values, others = values_of(run), values_of(whole)
    # Losses may agree to the bit by chance; all moments do not.
    assert any(not torch.equal(values[name], value) for name, value in others.items()), "another order of sums"
    for name, value in others.items():
        torch.testing.assert_close(values[name], value, atol=1e-10, rtol=0)
