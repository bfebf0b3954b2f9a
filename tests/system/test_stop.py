"""How a run is asked to stop: by one rank or all, at any time; all stop after the same step."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]  # HashStore: public, not in __all__

from terrace.base.errors import HangError
from terrace.checkpoint.layout import latest
from terrace.checkpoint.reading import Checkpoint
from terrace.launch.seal import Seal
from terrace.launch.start import LocalPool, launch_local
from terrace.launch.stop import Stop, StopSignal, Vote, ask, begin_steps
from terrace.launch.watchdog import Watchdog
from terrace.launch.world import World
from terrace.train import calibrate
from terrace.train.job import RunJob
from terrace.train.loop import train
from terrace.train.metrics import Silent
from terrace.train.prepare import prepare
from terrace.train.resolve import resolve
from terrace.train.run_folder import CompleteError
from tests.support.tiny_runs import (
    all_gone,
    descendants,
    environment,
    is_alive,
    metrics,
    terrace,
    wait_for_step,
    write_run,
)

pytestmark = pytest.mark.timeout(400)


def wish(name: str | None) -> StopSignal:
    stop_signal = StopSignal(())
    stop_signal.name = name
    return stop_signal


def steps_of(world_size: int, wishes: dict[int, tuple[int, str]], outside: int | None, every: int) -> list[Stop | None]:
    """How each rank ended. Ranks are threads that meet in every step; a wish is (steps before it, signal)."""
    store, seal, barrier = HashStore(), Seal.fresh(), threading.Barrier(world_size)
    begin_steps(World(0, world_size, 0, world_size, store, seal=seal))
    found: list[Stop | None] = [None] * world_size

    def rank_of(rank: int) -> None:
        generator = random.Random(rank)
        vote = Vote(World(rank, world_size, rank, world_size, store, seal=seal), wish(None), interval=every)
        for done in range(1, 40):
            barrier.wait(20)  # nobody ends a step before all have entered it
            time.sleep(generator.random() / 2000)
            if outside == done and rank == 0:
                ask(store, seal, "SIGINT")
            if wishes.get(rank, (0, ""))[0] == done:
                vote._signal = wish(wishes[rank][1])
            found[rank] = vote.after(done)
            if found[rank] is not None:
                return

    run_each(rank_of, world_size)
    return found


def run_each(work: Callable[[int], None], number: int) -> None:
    """Run `work` of every rank in a thread of its own, to its end."""
    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("wishes", "outside", "every", "at"),
    [
        ({2: (7, "SIGTERM")}, None, 1, 8),
        (dict.fromkeys(range(4), (7, "SIGTERM")), None, 1, 8),
        ({1: (7, "SIGTERM"), 3: (8, "SIGTERM")}, None, 1, 8),
        ({}, 5, 1, 6),
        ({3: (7, "SIGUSR1")}, None, 5, 15),  # asked after 7, seen at 10, so that all stop at 15
        ({}, None, 1, None),
    ],
)
def test_all_ranks_stop_after_the_same_step(
    wishes: dict[int, tuple[int, str]], outside: int | None, every: int, at: int | None
) -> None:
    for _ in range(5):
        found = steps_of(4, wishes, outside, every)
        assert [None if each is None else each.step for each in found] == [at] * 4
        assert len(set(found)) == 1


def islands_stop(turn: int, delay: int, slow: int, asks: int, after: int) -> list[Stop | None]:
    """Threads as islands, which meet in exchanges alone; island `asks` wants to stop `after` so many steps."""
    store, seal, num, ended = HashStore(), Seal.fresh(), 3, threading.Condition()
    started, found = [0] * num, list[Stop | None]([None] * num)

    def island_of(rank: int) -> None:
        vote = Vote(World(rank, num, rank, num, store, seal=seal), wish(None), interval=turn, delay=delay)
        for done in range(1, 20 * turn):
            time.sleep(0.002 * (rank == slow))
            with ended:
                if done % turn == 0:
                    started[rank] = done
                    ended.notify_all()
                arrives = max(0, done - delay) // turn * turn
                assert ended.wait_for(lambda: min(started) >= arrives, 20)  # noqa: B023  (waits before it goes on)
            if rank == asks and done == after:
                vote._signal = wish("SIGTERM")
            found[rank] = vote.after(done)
            if found[rank] is not None:
                # What others still wait for is there: the exchange of this step has started.
                return

    run_each(island_of, num)
    return found


@pytest.mark.parametrize(("turn", "delay"), [(1, 0), (4, 0), (4, 1), (4, 4), (2, 6), (3, 4)])
def test_islands_stop_after_the_same_step_however_far_apart_they_are(turn: int, delay: int) -> None:
    for slow, asks in ((0, 0), (0, 1), (1, 0), (2, 2)):
        found = islands_stop(turn, delay, slow, asks, after=turn + 1)
        assert len(set(found)) == 1, found
        assert found[0] is not None
        assert found[0].step % turn == 0
        # Looked at after two turns, and agreed on for one more turn, and the delay.
        assert found[0].step == 2 * turn + turn * -(-(turn + delay) // turn)


def test_a_rank_alone_stops_at_once_and_a_failure_has_its_own_words() -> None:
    vote = Vote(World(0, 1, 0, 1, HashStore()), wish("SIGTERM"))
    assert vote.after(3) == Stop(step=3, why="signal", text="SIGTERM")
    vote = Vote(World(0, 1, 0, 1, HashStore()), wish(None))
    assert vote.after(3) is None
    vote.fail("the disk is full")
    assert vote.after(4) == Stop(step=4, why="failed", text="the disk is full")


def test_a_large_world_asks_its_store_seldom() -> None:
    class Counting(HashStore):
        num_checks = 0

        def check(self, keys: Any) -> bool:
            self.num_checks += 1
            return bool(super().check(keys))

    store: Any = Counting()
    vote = Vote(World(9, 5120, 0, 8, store), wish(None))
    vote._store = store
    for done in range(1, 111):
        vote.after(done)
    assert store.num_checks == 10


def test_the_second_signal_ends_a_process_and_a_repeat_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, killed = [100.0], list[int]()
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(number))
    before = signal.getsignal(signal.SIGUSR1)
    with StopSignal() as stop_signal:
        for at_s, dies in ((0.0, False), (1.9, False), (2.1, True)):
            now_s[0] = 100.0 + at_s
            signal.raise_signal(signal.SIGUSR1)
            assert stop_signal.name == "SIGUSR1"
            assert bool(killed) == dies
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_signal_while_the_fork_server_starts_is_not_lost() -> None:
    """The server starts with stop signals ignored, which it keeps; the process that starts it gets them later."""
    program = """
import multiprocessing.forkserver, os, signal
from terrace.launch.fork_server import start_fork_server
from terrace.launch.signals import SIGNALS, handled

def start():
    for number in SIGNALS:
        assert signal.getsignal(number) == signal.SIG_IGN
        os.kill(os.getpid(), number)

taken = []
multiprocessing.forkserver.ensure_running = start
with handled(SIGNALS, lambda number, _: taken.append(number)):
    start_fork_server()
assert sorted(taken) == sorted(SIGNALS), taken
"""
    # In a process of its own: signals are held back in one thread, and pytest may have several.
    subprocess.run([sys.executable, "-c", program], check=True, env=environment(), timeout=60)


@pytest.mark.nightly
def test_torchrun_starts_a_struck_run_again_and_its_sigterm_saves(tmp_path: Path) -> None:
    """A rank is killed, the ranks are started again by the same command and go on; then torchrun is told to end."""
    write_run(tmp_path, 2, 2, steps=100_000, checkpoint_every=5)
    run = tmp_path / "run"
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    words += ["-m", "terrace", "train", "--config", "run.toml", "--folder", "run", "--resume", "auto"]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    family: set[int] = set()
    try:
        wait_for_step(run, 12)
        family = descendants(process.pid)
        ranks = sorted(pid for pid in family if "terrace" in Path(f"/proc/{pid}/cmdline").read_text())
        os.kill(ranks[-1], signal.SIGKILL)
        struck = latest(run)
        assert all_gone({ranks[-1]})
        assert struck is not None
        deadline_s = time.monotonic() + 200
        while not set(ranks).isdisjoint(descendants(process.pid)) or latest(run) == struck:
            assert time.monotonic() < deadline_s
            assert process.poll() is None
            time.sleep(0.05)
        family |= descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        said, errors = process.communicate(timeout=100)
    finally:
        process.kill()
        process.wait()
        for pid in family:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
    assert process.returncode != 0
    assert said.count("resuming after step ") == 1
    assert said.count("2 ranks in place of 4: node 2 -> 1") == 2
    assert (
        errors.count("terrace: ended by SIGTERM; saved checkpoints are complete; to go on: terrace train --resume run")
        == 1
    )
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    newest = latest(run)
    assert newest is not None
    assert newest.name == f"step-{len(lines):08d}"
    Checkpoint(newest).verify()


def watched(world: World, stopped_s: float) -> str:
    """A rank that is told to stop and takes its time: its watchdog lets it, since no rank is missing."""
    with (
        StopSignal((signal.SIGTERM,)) as stop_signal,
        Watchdog(
            world.store,
            world.rank,
            2,
            timeout_s=20.0,
            interval_s=0.2,
            catch_sigterm=True,
            stops="nothing was saved yet",
            seal=world.seal,
        ) as dog,
    ):
        dog.begin()
        dog.at(1, 2, "a long kernel")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(stopped_s)
        assert stop_signal.name == "SIGTERM"
    return "in order"


def told_early(world: World) -> None:
    """A rank that is told to stop while it measures."""
    with (
        StopSignal(),
        Watchdog(
            world.store,
            world.rank,
            2,
            timeout_s=20.0,
            on_hang=world.on_hang,
            catch_sigterm=True,
            stops="nothing was saved yet",
            seal=world.seal,
        ) as dog,
    ):
        dog.at(0, 0, "MEASURE node", (0, 1))
        if world.rank == 0:
            world.store.set("watching", "")
        else:
            world.store.wait(["watching"])
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60.0)


def without_store(world: World) -> None:
    """A rank that measures for long while the process that hosts the store of its run ends."""
    if world.rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        world.store.set("port", str(store.port))
        world.store.wait(["watched"])
        del store
        time.sleep(60.0)
    client = TCPStore("127.0.0.1", int(world.store.get("port")), is_master=False)
    with Watchdog(client, 0, 1, timeout_s=60.0, on_hang=world.on_hang, seal=world.seal, store_rank=0) as dog:
        dog.at(0, 0, "MEASURE node")
        world.store.set("watched", "")
        time.sleep(60.0)


def frozen(world: World) -> None:
    """Two ranks outside a step, one of which is frozen."""
    with Watchdog(world.store, world.rank, 2, timeout_s=3.0, on_hang=world.on_hang, seal=world.seal) as dog:
        dog.idle("finishing a checkpoint")
        time.sleep(1.5)
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60.0)


ENDS: list[tuple[Callable[[World], None], str]] = [
    (told_early, r"^rank 1 was told to stop \(SIGTERM\) before its first step; nothing"),
    (without_store, r"^rank 0 stopped: the store it hosts does not answer .* `MEASURE node`"),
    (frozen, r"^rank 1 stopped at .*`finishing a checkpoint` \(no heartbeat for .*"),
]


@pytest.mark.parametrize(("ranks", "named"), ENDS, ids=lambda value: getattr(value, "__name__", ""))
def test_one_rank_ends_all_outside_steps(ranks: Callable[[World], None], named: str) -> None:
    """In a pool of their own, whose patience with ranks that sleep or are frozen is short."""
    begin_s = time.monotonic()
    with LocalPool(2, grace_s=1.0) as pool, pytest.raises(HangError, match=named):
        pool.run(2, ranks)
    assert time.monotonic() - begin_s < 45.0  # and not the 60 s that a rank would sleep


def measuring(world: World, job: RunJob, folder: Path) -> None:
    """One rank of a run whose measurement takes long."""

    def last(*_: object) -> float:
        (folder / f"{os.getpid()}.pid").touch()
        time.sleep(100.0)
        return 0.0

    calibrate._skew_s = last  # type: ignore[assignment]
    train(world, job, Silent())


def test_the_first_signal_ends_a_run_that_measures(tmp_path: Path) -> None:
    job = prepare(resolve(str(write_run(tmp_path, 2)), {}, {}), tmp_path / "run", None)
    struck_s = list[float]()

    def strike() -> None:
        while len(list(tmp_path.glob("*.pid"))) < 2:
            time.sleep(0.02)
        struck_s.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=strike, daemon=True).start()
    assert launch_local(2, measuring, (job, tmp_path), stoppable=True) == "SIGTERM"
    assert time.monotonic() - struck_s[0] < 60.0  # 1 s on a machine that is free, and not the 100 s of the measurement
    assert not [path for path in tmp_path.glob("*.pid") if is_alive(int(path.stem))]
    run = tmp_path / "run"
    command = f"terrace train --config {run}/config.toml --folder {run} --resume auto"
    assert job.again() == f"nothing was saved yet; to begin again: {command}"
    done = terrace(*command.split()[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert job.again() == f"saved checkpoints are complete; to go on: terrace train --resume {run}"
    # Killed after the last step, while it removed the checkpoint before.
    left = run / "checkpoints" / ".step-00000003.removed"
    left.mkdir()
    # Its fork server was killed with it.
    sockets = Path(tempfile.mkdtemp(prefix="terrace-ranks-"))
    with pytest.raises(CompleteError):
        prepare(job.run, run, None, going_on=True)
    assert not left.exists()
    assert not sockets.exists()


def test_a_watchdog_lets_a_run_that_is_told_to_stop_do_so(pool: LocalPool) -> None:
    assert pool.run(2, watched, 1.0) == ["in order"] * 2
