"""Runs of `terrace train --meet` as islands of a roster, with the real model, data and optimizer."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from terrace.checkpoint.layout import folder_of
from terrace.cli.main import main
from terrace.launch.start import LocalPool, secret
from terrace.launch.world import World
from terrace.roster.entries import Dealt, Gone
from terrace.roster.outer import num_slices
from terrace.roster.place import Place, read_log
from terrace.train.loop import train
from terrace.train.meeting import Own, write_own
from terrace.train.metrics import Outcome, Silent
from terrace.train.prepare import prepare
from terrace.train.resolve import resolve
from tests.support.checkpoints import contents
from tests.support.tiny_runs import metrics, one_line, started, terrace, wait_for_step, write_run

pytestmark = pytest.mark.timeout(400)

EXACT: dict[str, Any] = {
    "plan": {"compute": "fp64", "master": "fp64"},
    "optimizer": {"name": "sgd", "clip": 0.0, "lr": 0.5},
}
AVERAGE: dict[str, Any] = {"every": 1, "optimizer": "average", "patience_s": 60.0}


@contextmanager
def meeting(log: Path, wait_for: int) -> Iterator[int]:
    """A meeting place in a thread, until the body ends; its port."""
    over = threading.Event()
    place = Place("127.0.0.1", 0, secret().within("roster"), log, wait_for, lambda line: None)
    thread = threading.Thread(target=place.serve, args=(over.is_set,), daemon=True)
    thread.start()
    try:
        yield place.port
    finally:
        over.set()
        thread.join()


def run_island(world: World, folder: Path, port: int, overrides: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """One rank of the pool as an island of one rank: what its last checkpoint has, and the bytes beside its states."""
    name = "abcd"[world.rank]
    elastic = {} if not port else {"elastic": {"meet": f"127.0.0.1:{port}", "island": name, **AVERAGE}}
    run = resolve(str(folder / "run.toml"), {}, {**overrides, **elastic})
    job = prepare(run, folder / name, None)
    alone = World(0, 1, 0, 1, PrefixStore(name, world.store), seal=world.seal, supervised=True)
    outcome = train(alone, job, Silent())
    assert isinstance(outcome, Outcome)
    found = contents(folder_of(folder / name, run.train.steps))
    beside = outcome.measured.memory_bytes.get("outer", 0)
    return {key: value for key, value in found.items() if "/master" in key}, beside


def test_islands_with_unequal_shares_train_as_one_process(
    pool: LocalPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Averaged after each step, with an optimizer that is linear in the gradient, islands are the synchronous run."""
    write_run(tmp_path, 1, plan="ddp", steps=3, batch=5)
    ((expected, without),) = pool.run(1, run_island, tmp_path, 0, EXACT, timeout_s=200)
    log = tmp_path / "roster.jsonl"
    with meeting(log, 3) as port:
        islands = tmp_path / "islands"
        islands.mkdir()
        write_run(islands, 1, plan="ddp", steps=3, batch=5)
        found = pool.run(3, run_island, islands, port, EXACT, timeout_s=200)
    assert [entry.shares for entry in read_log(log) if isinstance(entry, Dealt)] == 3 * [{"a": 2, "b": 2, "c": 1}]
    numel = sum(value.numel() for value in expected.values())
    for own, beside in found:
        assert own.keys() == expected.keys()
        for name, value in own.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-10)
            assert torch.equal(value, found[0][0][name])
        slices = num_slices(resolve(None, {}, {"elastic": {"meet": "h:1", "optimizer": "average"}}).elastic.outer)
        assert (without, beside) == (0, slices * numel * 8)
    # The log knows an island by its token, whatever its configuration calls it: nothing, for one of a default name.
    config = islands / "b" / "config.toml"
    config.write_text(config.read_text().replace('island = "b"', "").partition("\n")[2])  # without its checksum
    assert main(["replay", str(islands), "--log", str(log)]) == 0
    # A loss and a norm of three steps of each island, and its last checkpoint.
    assert "3 exchanges are those of the run: 21 figures and checkpoints differ by at most" in capsys.readouterr().out
    write_own(islands / "c", Own(island="c", token="of another roster"))
    assert main(["replay", str(islands), "--log", str(log)]) == 2
    assert one_line(capsys.readouterr().err).startswith(
        f"terrace: error: {islands / 'c'} is of island 'c' of another roster than"
    )


@contextmanager
def islands(folder: Path, log: Path, names: str, *more: str) -> Iterator[dict[str, Any]]:
    """Processes of `terrace train --meet`, by name, with a meeting place in a thread."""
    with meeting(log, len(names)) as port:
        words: tuple[str | Path, ...] = (
            "--config",
            folder / "run.toml",
            "--meet",
            f"127.0.0.1:{port}",
            "--elastic.every",
            "2",
            *more,
        )
        if len(names) == 1:
            with started("train", *words, "--island", names, "--folder", folder / names, cwd=folder) as only:
                yield {names: only}
            return
        with (
            started("train", *words, "--island", "a", "--folder", folder / "a", cwd=folder) as one,
            started("train", *words, "--island", "b", "--folder", folder / "b", cwd=folder) as other,
        ):
            yield {"a": one, "b": other}


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "plan"), [(1, "ddp"), (2, "zero1")])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_an_island_goes_and_the_other_trains_to_the_end(tmp_path: Path, ranks: int, plan: str, end: int) -> None:
    write_run(tmp_path, ranks, plan=plan, steps=16, batch=8)
    log = tmp_path / "roster.jsonl"
    with islands(tmp_path, log, "ab", "--elastic.patience_s", "8") as both:
        wait_for_step(tmp_path / "b", 3)
        os.kill(both["b"].pid, end)
        assert both["a"].wait(300) == 0
        both["b"].wait(60)
    steps = [each["step"] for each in metrics(tmp_path / "a")]
    assert steps == list(range(1, 17))
    (gone,) = [entry for entry in read_log(log) if isinstance(entry, Gone)]
    assert (gone.first >= 0) == (end == signal.SIGKILL)
    assert folder_of(tmp_path / "a", 16).is_dir()
    again = terrace("replay", tmp_path, cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "8 exchanges are those of the run" in again.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_islands_with_other_axes_are_replayed_in_one_process(tmp_path: Path, axis: str) -> None:
    write_run(tmp_path, 2, plan="zero1", steps=6, batch=4)
    words = ("--plan.mapping", f"{{ package = {{ {axis} = 2 }} }}", "--plan.compute", "fp64", "--plan.master", "fp64")
    with islands(tmp_path, tmp_path / "roster.jsonl", "a", *words) as one:
        assert one["a"].wait(300) == 0
    again = terrace("replay", tmp_path, cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    # In fp64, to 1e-10: a loss and a norm of six steps, and the last checkpoint.
    assert "3 exchanges are those of the run: 13 figures and checkpoints differ by at most" in again.stdout


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--plan", "ddp", "--plan.outer.preset", "diloco"], "leave plan.outer out"),
        (["--elastic.patience_s", "0.2"], "islands report five times a second"),
        (["--elastic.every", "0"], "islands exchange every so many steps"),
        (["--train.peer_copies", "1"], "leave train.peer_copies out"),
        (["--resume", "auto", "--folder", "there"], "leave --resume out"),
        (["--island", "a/b"], "elastic.island = 'a/b'"),
        (["--meet", "nowhere"], "'nowhere' is no address"),
    ],
)
def test_what_cannot_be_an_island_is_refused_in_one_line(tmp_path: Path, words: list[str], line: str) -> None:
    write_run(tmp_path, 2, plan="zero1")
    ended = terrace("train", "--config", "run.toml", "--meet", "127.0.0.1:1", *words, cwd=tmp_path)
    assert ended.returncode == 2
    assert line in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_keys_of_the_roster_without_a_meeting_place_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, 1, plan="ddp")
    ended = terrace("train", "--config", "run.toml", "--elastic.every", "5", cwd=tmp_path)
    assert "[elastic] has no effect without a meeting place" in ended.stderr


def test_replicated_optimizer_states_would_cross_the_slow_link_more_than_once(tmp_path: Path) -> None:
    write_run(tmp_path, 2, plan="ddp")
    ended = terrace("train", "--config", "run.toml", "--meet", "127.0.0.1:1", cwd=tmp_path)
    assert "shard them over the island" in ended.stderr


def test_a_meeting_place_that_is_stopped_says_that_islands_wait(tmp_path: Path) -> None:
    with started("meet", "127.0.0.1:0", cwd=tmp_path) as place:
        assert place.stdout is not None
        assert "meeting at port" in place.stdout.readline()
        os.kill(place.pid, signal.SIGTERM)
        _, words = place.communicate(timeout=60)
    line = "terrace: ended by SIGTERM; roster.jsonl has every decision; islands wait for a meeting place at this port"
    assert words == f"{line} with this --log\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["."], "holds neither deals.jsonl nor run folders of islands"),
        (["gone"], "gone is not there: give a run folder"),
        (["other"], "other/roster.jsonl is not there: name a step of this run"),
        (["other", "--step", "1", "--log", "x"], "leave --step out"),
        (["other", "--log", "empty"], "no island has joined"),
        (["other", "--step", "1"], "whose steps depend on the others: leave --step out"),
    ],
)
def test_what_is_no_roster_is_not_replayed(tmp_path: Path, words: list[str], line: str) -> None:
    write_run(tmp_path, 1, plan="ddp")
    run = resolve(str(tmp_path / "run.toml"), {}, {"elastic": {"meet": "h:1", "island": "a"}})
    (tmp_path / "empty").touch()
    if "other" in words:
        prepare(run, tmp_path / "other", None, say=lambda words: None)
    ended = terrace("replay", *words, cwd=tmp_path)
    assert ended.returncode == 2
    assert line in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["99999"], "'99999' is no address: give [HOST:]PORT"),
        (["0", "--islands", "0"], "--islands 0"),
        (["0", "--log", "text.txt"], "is no entry of a roster"),
        (["nowhere.invalid:0"], "cannot listen at nowhere.invalid"),
        (["0", "--log", "/dev/null"], "--log /dev/null is no file"),
    ],
)
def test_a_meeting_place_that_cannot_be_is_refused_in_one_line(tmp_path: Path, words: list[str], line: str) -> None:
    (tmp_path / "text.txt").write_text("The fox\n")
    ended = terrace("meet", *words, cwd=tmp_path)
    assert ended.returncode == 2
    assert line in ended.stderr
    assert (tmp_path / "text.txt").read_text() == "The fox\n"
