"""A run that loses a machine goes on from the memory of the others: the same bits, nothing read from disk or left."""

import errno
import os
import shutil
import signal
import time
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from terrace.base.errors import ConfigError, HangError, TrainingError
from terrace.checkpoint import peer_copies
from terrace.checkpoint.memory import ROOT, MemoryFile, memory_folder, run_id
from terrace.checkpoint.reading import Checkpoint
from terrace.launch.start import LocalPool, World
from terrace.program.report import StepReport
from terrace.train import loop, sample
from terrace.train.layers import resolve_table
from terrace.train.metrics import Outcome, Silent, StepRecord
from terrace.train.prepare import joined_job
from terrace.train.resolve import fitted_run
from tests.support.tiny_runs import metrics, write_run

STEPS, LOST_AFTER, LIMIT_S = 6, 4, 140.0
HOSTS = ("a", "a", "b", "b")

pytestmark = pytest.mark.timeout(300)


class Killed(Silent):
    """The observer of a rank that is killed after a step; keeps the notes of a run."""

    def __init__(self, after: int) -> None:
        self._after, self.notes = after, list[str]()

    def stepped(self, record: StepRecord, seconds_left: float) -> None:
        if record.step == self._after:
            os.kill(os.getpid(), signal.SIGKILL)

    def note(self, text: str) -> None:
        self.notes.append(text)


def rank_of(
    world: World, table: dict[str, Any], folder: Path, hosts: tuple[str, ...], lost: str
) -> tuple[int, list[str], StepReport, StepReport]:
    """A rank on its host as a launcher's, to the end, or until host `lost` is: (first step, lines, two reports)."""
    sample._SAMPLE_TOKENS = 1
    world = replace(world, hosts=hosts, machines=hosts)
    config, _ = fitted_run(table, world.world_size)
    said = StringIO()
    with redirect_stdout(said):
        job = joined_job(world, config, folder, None, going_on=True)
    assert job is not None
    if job.memory:
        # A disk read would be noticed: nothing is left of the parts there.
        for part in (folder / "checkpoints").glob("*/*.safetensors"):
            part.unlink(missing_ok=True)
    observer = Killed(LOST_AFTER if hosts[world.rank] == lost else 0)
    end = loop.train(world, job, observer)
    assert isinstance(end, Outcome)
    first = 0 if job.resume is None else int(job.resume.name[-8:])
    return first, [*said.getvalue().splitlines(), *observer.notes], end.predicted, end.measured


def table_of(folder: Path, plan: str, **train: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    path = write_run(folder, 2, 1, 2, steps=STEPS, batch=12, plan=plan, **train)
    measured = {"device": {"marks": {"kernels.gemm": "fitted"}}}  # so that no time is spent on measuring it
    return resolve_table(str(path), {}, {"cluster": measured})


def values_of(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(run / "checkpoints" / f"step-{STEPS:08d}")
    return {f"{block}.{name}": value for block, name, value in checkpoint.parameters()}


def run_lost(pool: LocalPool, table: dict[str, Any], run: Path, lost: str) -> dict[str, Path]:
    """A run until a host is lost, with its memory; returns the memory folders by host."""
    with pytest.raises(HangError, match=r"killed by SIGKILL|the process is gone"):
        pool.run(4, rank_of, table, run, HOSTS, lost, timeout_s=LIMIT_S)
    folders = {host: memory_folder(run_id(run), run, host) for host in "ab"}
    for folder in folders.values():
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in folder.glob("*/*")} == {0o600}
    shutil.rmtree(folders[lost])
    return folders


def left() -> list[str]:
    return sorted(path.name for path in ROOT.glob(f"terrace-{os.getuid()}-*"))


def assert_nothing_left(before: list[str]) -> None:
    # A rank's error arrives while others still clear their folder, and other runs of this user have folders for a time.
    deadline_s = time.monotonic() + LIMIT_S
    while set(left()) - set(before) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert set(left()) <= set(before)


@pytest.fixture(scope="module")
def whole(pool: LocalPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without copies, on one machine."""
    folder = tmp_path_factory.mktemp("whole")
    table = table_of(folder, "zero3")
    pool.run(4, rank_of, table, folder / "run", ("a",) * 4, "", timeout_s=LIMIT_S)
    return folder / "run"


def assert_same(run: Path, whole: Path) -> None:
    assert [line["loss"] for line in metrics(run)] == [line["loss"] for line in metrics(whole)]
    ours, theirs = values_of(run), values_of(whole)
    assert [name for name, value in theirs.items() if not torch.equal(ours[name], value)] == []


@pytest.mark.parametrize("lost", ["b", pytest.param("a", marks=pytest.mark.nightly)])
def test_a_lost_machine_costs_no_disk_read(pool: LocalPool, whole: Path, tmp_path: Path, lost: str) -> None:
    before = left()
    table = table_of(tmp_path, "zero3", peer_copies=1, peer_copies_every=1)
    run = tmp_path / "run"
    run_lost(pool, table, run, lost)
    results = pool.run(4, rank_of, table, run, HOSTS, "", timeout_s=LIMIT_S)
    # The other machine's ranks may have been stopped in the step before.
    assert {first for first, *_ in results} <= {LOST_AFTER, LOST_AFTER - 1}
    assert_same(run, whole)
    _, notes, predicted, measured = results[0]
    assert not any("0 MB went" in note for note in notes)
    assert any(f"over tier system; they take {predicted.memory_bytes['peer copies'] / 1e6:.3g} MB" in n for n in notes)
    assert predicted.sent_bytes == measured.sent_bytes
    assert predicted.memory_bytes == measured.memory_bytes
    assert_nothing_left(before)


@pytest.mark.nightly
def test_a_damaged_copy_sends_the_run_to_the_disk(pool: LocalPool, whole: Path, tmp_path: Path) -> None:
    before = left()
    table = table_of(tmp_path, "zero3", peer_copies=1, peer_copies_every=1, checkpoint_every=2)
    run = tmp_path / "run"
    folders = run_lost(pool, table, run, "b")
    for file in folders["a"].glob("*/rank-00002.safetensors"):
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 8
        file.write_bytes(raw)
    results = pool.run(4, rank_of, table, run, HOSTS, "", timeout_s=LIMIT_S)
    assert {first for first, *_ in results} == {2}
    said = "\n".join(results[0][1])
    assert "rank-00002.safetensors is damaged (its checksum differs), so this copy is not used" in said
    assert "no copy in the memory of the machines is whole: resuming from disk" in said
    assert_same(run, whole)
    assert_nothing_left(before)


@pytest.mark.nightly
def test_the_machine_that_is_left_goes_on_alone(pool: LocalPool, whole: Path, tmp_path: Path) -> None:
    """Half as many ranks, under another plan: the boxes of all are in the memory of one machine."""
    before = left()
    table = table_of(tmp_path, "zero3", peer_copies=1, peer_copies_every=1)
    run = tmp_path / "run"
    run_lost(pool, table, run, "b")
    table["plan"] |= {"preset": "zero1"}
    results = pool.run(2, rank_of, table, run, HOSTS[:2], "", timeout_s=LIMIT_S)
    assert {first for first, *_ in results} <= {LOST_AFTER, LOST_AFTER - 1}
    assert any("no copies in memory" in note for note in results[0][1])
    for mine, other in zip(metrics(run), metrics(whole), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert_nothing_left(before)


@pytest.mark.nightly
def test_copies_count_in_a_run_that_makes_no_more(pool: LocalPool, whole: Path, tmp_path: Path) -> None:
    before, run = left(), tmp_path / "run"
    table = table_of(tmp_path, "zero3", peer_copies=1, peer_copies_every=1)
    run_lost(pool, table, run, "b")
    table["train"] |= {"peer_copies": 0, "peer_copies_every": 0}
    results = pool.run(4, rank_of, table, run, HOSTS, "", timeout_s=LIMIT_S)
    # From memory: there is no other copy after so many steps.
    assert min(first for first, *_ in results) >= LOST_AFTER - 1
    assert_same(run, whole)
    assert_nothing_left(before)


@pytest.mark.nightly
def test_a_run_that_fails_in_training_gives_its_memory_back(pool: LocalPool, tmp_path: Path) -> None:
    before = left()
    table = table_of(tmp_path, "zero3", peer_copies=1, peer_copies_every=1, warmup_steps=0)
    table["optimizer"] |= {"lr": 1e6, "clip": 0.0}
    with pytest.raises(TrainingError, match="The run cannot go on"):
        pool.run(4, rank_of, table, tmp_path / "run", HOSTS, "", timeout_s=LIMIT_S)
    assert_nothing_left(before)


class _Full(MemoryFile):
    """A memory with room for two slots."""

    def __init__(self, path: Path, header: bytes, num_bytes: int) -> None:
        if path.parent.name.endswith(".2"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().__init__(path, header, num_bytes)


def rank_without_room(world: World, *arguments: Any) -> None:
    with mock.patch.object(peer_copies, "MemoryFile", _Full):
        rank_of(world, *arguments)


@pytest.mark.nightly
def test_a_run_starts_only_where_a_restart_has_room(pool: LocalPool, tmp_path: Path) -> None:
    """A restart keeps the copy that it came from, and needs two slots more."""
    before = left()
    table = table_of(tmp_path, "zero3", peer_copies=1, peer_copies_every=1)
    with pytest.raises(ConfigError, match=r"a third for a restart included; make room there, or set train.peer_copies"):
        pool.run(4, rank_without_room, table, tmp_path / "run", HOSTS, "", timeout_s=LIMIT_S)
    assert_nothing_left(before)


@pytest.mark.nightly
def test_residuals_of_error_feedback_come_back_from_memory(pool: LocalPool, tmp_path: Path) -> None:
    plan = {"preset": "zero3", "wire": {"reduce": {"system": "int8:16+feedback"}}}
    alone = table_of(tmp_path / "alone", "zero3") | {"plan": plan}
    pool.run(4, rank_of, alone, tmp_path / "alone" / "run", ("a",) * 4, "", timeout_s=LIMIT_S)
    table = table_of(tmp_path / "lost", "zero3", peer_copies=1, peer_copies_every=1) | {"plan": plan}
    run = tmp_path / "lost" / "run"
    run_lost(pool, table, run, "b")
    _, notes, predicted, measured = pool.run(4, rank_of, table, run, HOSTS, "", timeout_s=LIMIT_S)[0]
    assert not any("residuals" in note for note in notes)
    assert_same(run, tmp_path / "alone" / "run")
    assert predicted.sent_bytes == measured.sent_bytes
    assert predicted.memory_bytes == measured.memory_bytes
