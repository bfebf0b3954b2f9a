"""Real processes: a step that stops names its culprit, and nothing outlives its parent.

Run as a script, this file is also the program that torchrun starts and the parent that gets killed.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from terrace.base.errors import ConfigError, HangError, PlanError
from terrace.launch.process_pool import _death, _end_of_server, one_error
from terrace.launch.start import LocalPool, World, detect, join, launch_local
from terrace.launch.watchdog import watch
from terrace.launch.workers import Report
from tests.support import warm
from tests.support.nightly import nightly
from tests.support.tiny_runs import descendants, environment

TIMEOUT_S = 6.0  # longer than a busy machine keeps a rank from the processor
GRACE_S = 4.0
NUM_STEPS, NUM_INSTRUCTIONS = 6, 3

pytestmark = pytest.mark.timeout(240)


def toy(world: World, folder: str, what: str, victim: int, wait_s: float = 0.01) -> int:
    """Run steps of (compute, all_reduce) instructions; at step 3 the rank `victim` suffers the fault."""
    Path(folder, f"{os.getpid()}.pid").touch()
    group = tuple(range(world.world_size))
    value = torch.ones(100)
    with watch(world, timeout_s=TIMEOUT_S) as dog, dog.guard():
        for step in range(NUM_STEPS):
            for counter in range(NUM_INSTRUCTIONS):
                dog.at(step, counter, f"FORWARD b{counter}")
                time.sleep(wait_s)
                if world.rank == victim and (step, counter) == (3, 1):
                    strike(what)
                dog.at(step, counter, f"REDUCE b{counter}", group)
                dist.all_reduce(value)
            dog.idle()
    return world.rank * 10 + world.world_size


def strike(what: str) -> None:
    """Inflict the fault of the test on this process."""
    if what in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), signal.Signals[what])
    elif what == "server":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
    elif what == "sleep":
        time.sleep(1000)
    elif what == "ValueError":
        raise ValueError("boom")
    elif what == "PlanError":
        raise PlanError("the plan does not fit")


def state(pid: int) -> str:
    """Return the kernel's letter for a process's state; none for no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Say whether a process runs; a zombie does not."""
    return state(pid) not in ("", "Z")


def pids(folder: Path) -> list[int]:
    return [int(path.stem) for path in folder.glob("*.pid")]


def all_gone(folder: Path, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(is_alive, pids(folder))):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def hang(folder: Path, what: str, victim: int, grace_s: float = GRACE_S) -> str:
    with pytest.raises(HangError) as caught:
        launch_local(4, toy, (str(folder), what, victim), grace_s=grace_s)
    assert len(pids(folder)) == 4
    assert all_gone(folder, 0.0)
    return str(caught.value)


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    message = hang(tmp_path, "SIGKILL", 2)
    assert message.startswith("rank 2 stopped at")
    assert "step 3, instruction 1 `REDUCE b1` (no heartbeat for" in message
    assert "waiting for it: ranks 0-1, 3 (rank 0 at step 3, instruction 1 `REDUCE b1`)" in message
    assert message.endswith("(reported by ranks 0-1, 3)")
    assert message.count("rank 2") == 1


@pytest.mark.nightly  # tests/system/test_hang.py has one in a run
def test_a_stalled_rank_is_named(tmp_path: Path) -> None:
    message = hang(tmp_path, "sleep", 1)
    assert re.match(r"rank 1 has not moved for \d\.\d s from step 3, instruction 1 `FORWARD b1`", message)
    assert "waiting for it: ranks 0, 2-3 (rank 0 at step 3, instruction 1 `REDUCE b1`)" in message


@pytest.mark.nightly
def test_a_frozen_rank_is_named_and_ended(tmp_path: Path) -> None:
    message = hang(tmp_path, "SIGSTOP", 0, grace_s=2.0)
    assert message.startswith("rank 0 stopped at")
    assert "waiting for it: ranks 1-3" in message


_KILLED_SERVER = (
    r"^the fork server of the ranks was killed by SIGKILL, as the kernel does when memory runs out \(dmesg says so\), "
    r"and all ranks with it: start the run again$"
)


@pytest.mark.parametrize("again", ["", *nightly("again")])
def test_a_killed_fork_server_is_one_line(tmp_path: Path, again: str) -> None:
    """In a process of its own: the next server, which takes its seconds, begins without all that is imported here."""
    done = warm.run([__file__, "killed server", str(tmp_path), again], tmp_path, environment(), 120.0)
    assert (done.returncode, done.stderr) == (0, "")
    error, *codes = (line for line in done.stdout.splitlines() if not line.startswith("2 local processes"))
    assert re.match(_KILLED_SERVER, error)
    assert codes == (["2"] if again else [])


def kill_server(folder: str, again: str) -> None:
    try:
        launch_local(2, toy, (folder, "server", 1), grace_s=GRACE_S)
    except HangError as error:
        print(error)
    assert all_gone(Path(folder), 10.0)
    if again:
        print(launch_local(2, toy, (folder, "nothing", 0), grace_s=GRACE_S))


def _ended(code: int, status: int) -> os.waitid_result:
    return os.waitid_result((0, 0, 0, status, code))


def test_the_end_of_the_fork_server_may_come_after_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([None, None, _ended(os.CLD_EXITED, 255)])
    monkeypatch.setattr(forkserver._forkserver, "_forkserver_pid", os.getpid())
    monkeypatch.setattr(os, "waitid", lambda *_: next(found))
    assert _end_of_server() is None
    assert _end_of_server(5.0) == "exited with code 255"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "was killed by SIGKILL, as the kernel does when memory runs out (dmesg says so)"),
        (signal.SIGSEGV, "was killed by SIGSEGV"),
        (signal.SIGRTMIN + 6, f"was killed by signal {signal.SIGRTMIN + 6}"),
    ],
)
def test_only_sigkill_speaks_of_memory(monkeypatch: pytest.MonkeyPatch, number: int, words: str) -> None:
    monkeypatch.setattr(forkserver._forkserver, "_forkserver_pid", os.getpid())
    for code in (os.CLD_KILLED, os.CLD_DUMPED):
        monkeypatch.setattr(os, "waitid", lambda *_, code=code: _ended(code, number))
        assert _end_of_server() == words
    assert _death(3, -number) == f"rank 3 {words}"
    assert _death(3, 127) == "rank 3 exited with code 127 before it reported"


def test_ranks_that_cannot_be_started_are_one_line_with_the_program(tmp_path: Path) -> None:
    """An interpreter that this user may not read or run, say."""
    (tmp_path / "start.py").write_text(
        "import multiprocessing as m\n"
        "from tests.support import warm\n"
        "warm._starter.spawnv_passfds = warm._spawn\n"  # this server is not forked
        f"m.set_executable({str(tmp_path / 'python')!r})\n"
        "from terrace.launch.process_pool import ProcessPool\n"
        "from terrace.base.errors import HangError\n"
        "try:\n"
        "    ProcessPool(1, grace_s=0.1).call(1, print, (), 5.0)\n"
        "except HangError as error:\n"
        "    print(error)\n"
    )
    done = warm.run(["start.py"], tmp_path, environment(), 60.0)
    assert done.returncode == 0, done.stderr
    (said,) = done.stdout.splitlines()
    assert said.startswith("the fork server of the ranks exited with code ")
    assert said.endswith(f"and all ranks with it: its own lines say why; it runs {tmp_path / 'python'}")
    assert "memory" not in said


def test_ranks_that_end_without_a_word_are_one_line() -> None:
    def lost(rank: int) -> Report:
        return Report(1, rank, "communication", message="DistNetworkError: reset by peer\nException raised from recv")

    killed = one_error([lost(0)], ["rank 1 was killed by SIGKILL"])
    assert str(killed) == "rank 1 was killed by SIGKILL; rank 0 lost the connection"
    unexplained = one_error([lost(0), lost(2)], [])
    assert str(unexplained) == "ranks 0, 2 lost the connection to the others: DistNetworkError: reset by peer"
    assert isinstance(killed, HangError)
    assert isinstance(unexplained, HangError)


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        *nightly(("ValueError", RuntimeError, r"rank 3 failed: ValueError: boom\nTraceback")),  # as of a pool, below
        ("PlanError", PlanError, r"the plan does not fit \(reported by rank 3\)"),
    ],
)
def test_the_first_error_of_a_rank_is_the_one_reported(
    tmp_path: Path, what: str, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        launch_local(4, toy, (str(tmp_path), what, 3), grace_s=GRACE_S)
    assert all_gone(tmp_path, 0.0)


def test_results_come_back(tmp_path: Path) -> None:
    assert launch_local(3, toy, (str(tmp_path), "nothing", 0), grace_s=GRACE_S) == 3
    assert all_gone(tmp_path, 0.0)


@pytest.mark.parametrize(("how", "what"), [("SIGKILL", "SIGSTOP"), *nightly(("SIGINT", "nothing"))])
def test_nothing_outlives_the_parent(tmp_path: Path, how: str, what: str) -> None:
    parent = warm.Command([__file__, "parent", str(tmp_path), what], tmp_path, environment())
    try:
        deadline = time.monotonic() + 90
        while len(pids(tmp_path)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        while what == "SIGSTOP" and "T" not in map(state, pids(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        family = descendants(parent.pid)
        assert {*pids(tmp_path)} <= family
        os.kill(parent.pid, signal.Signals[how])
        _, errors = parent.communicate(timeout=90)
    finally:
        parent.kill()
    assert all_gone(tmp_path, 5.0)
    deadline = time.monotonic() + 30
    while any(map(is_alive, family)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in family if is_alive(pid)]
    if how == "SIGINT":
        assert "interrupted" in errors


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    with LocalPool(3, grace_s=GRACE_S) as pool:
        yield pool


def total(world: World, scale: int) -> tuple[int, int, float]:
    value = torch.full((4,), float(world.rank + 1))
    dist.all_reduce(value)
    return world.rank, os.getpid(), float(value.sum()) * scale


def break_on(world: World, victim: int) -> None:
    if world.rank == victim:
        raise ValueError(f"rank {victim} breaks")
    dist.barrier()


def sleep_on(world: World, victim: int) -> None:
    if world.rank == victim:
        time.sleep(1000)


def kill_on(world: World, victim: int) -> None:
    if world.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_pool_runs_worlds_of_several_sizes(pool: LocalPool) -> None:
    seen: set[int] = set()
    for world_size, expected in [(1, 4.0), (2, 12.0), (3, 24.0), (2, 12.0)]:
        results = pool.run(world_size, total, 2)
        assert [(rank, value) for rank, _, value in results] == [(rank, expected * 2) for rank in range(world_size)]
        seen.update(pid for _, pid, _ in results)
    assert seen == set(pool.pids)
    assert len(seen) == 3


def test_a_pool_raises_errors_and_goes_on(pool: LocalPool) -> None:
    with pytest.raises(RuntimeError, match="rank 1 failed: ValueError: rank 1 breaks"):
        pool.run(3, break_on, 1)
    assert len(pool.run(3, total, 1)) == 3
    with pytest.raises(HangError, match=r"^rank 2 was killed by SIGKILL, as the kernel does when memory runs out.*$"):
        pool.run(3, kill_on, 2)
    assert len(pool.run(2, total, 1)) == 2  # new ranks, which may still import what they need
    with pytest.raises(HangError, match=r"^rank 1 did not finish within 2 s"):
        pool.run(2, sleep_on, 1, timeout_s=2.0)
    with pytest.raises(ValueError, match="a world of 4 needs 1 to 3 processes"):
        pool.run(4, total, 1)
    assert len(pool.run(2, total, 1)) == 2


@pytest.mark.nightly
def test_torchrun_names_the_killed_rank_and_a_restart_starts_afresh(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command += ["--max-restarts", "1", __file__, "torchrun", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stderr.splitlines() if line.startswith("terrace: rank 1 stopped at")]
    assert len(lines) == 2, run.stderr
    for line, reporter in zip(sorted(lines, key=lambda line: line[-3:]), (0, 2), strict=True):
        assert "instruction 1 `REDUCE b1` (no heartbeat for" in line
        assert "waiting for it: ranks 0, 2" in line
        assert line.endswith(f"(reported by rank {reporter})")
    assert run.stdout.count("3 ranks under torchrun, backend ") == 2
    assert "second life: 3 of 3 here" in run.stdout
    assert all_gone(tmp_path, 0.0)


def test_a_launcher_that_hides_the_meeting_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not detect()
    with pytest.raises(ConfigError, match="no launcher started this process"):
        join(1.0)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert not detect()
    monkeypatch.setenv("SLURM_NTASKS", "8")
    with pytest.raises(ConfigError, match="nothing says where rank 0 is; set MASTER_ADDR and MASTER_PORT"):
        detect()
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert detect()


@pytest.mark.parametrize(("rank", "world_size"), [("5", "1"), ("2", "2"), ("0", "0")])
def test_a_rank_beyond_the_world_is_refused(monkeypatch: pytest.MonkeyPatch, rank: str, world_size: str) -> None:
    values = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"RANK={rank} with WORLD_SIZE={world_size}"):
        detect()


def test_a_short_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TERRACE_SECRET": "short"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="TERRACE_SECRET has 5 characters, at least 16"):
        join(1.0)


def test_join_names_the_ranks_that_stay_away(monkeypatch: pytest.MonkeyPatch) -> None:
    port = 20000 + os.getpid() % 10000
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(HangError, match=r"^ranks 1-2 did not join the world within 1 s: start the command on every"):
        join(1.0)


def main(role: str, folder: str, *rest: str) -> None:
    own = import_module("tests.system.test_launch")  # which ranks have, unlike this script
    toy = own.toy
    if role == "killed server":
        own.kill_server(folder, *rest)
        return None
    if role == "parent":
        # Without a fault of their own, the ranks must still run when the signal comes.
        launch_local(3, toy, (folder, rest[0], 1, 1.0 if rest[0] == "nothing" else 0.1), grace_s=30.0)
        return None
    world = join(30.0)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    toy(world, folder, "SIGKILL" if first else "nothing", 1)
    dist.destroy_process_group()
    if world.rank == 0:
        print(f"second life: {world.local_world_size} of {world.world_size} here")
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
