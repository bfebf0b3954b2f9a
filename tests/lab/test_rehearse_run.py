"""Rehearsals with real namespaces: counters, the rates reached, and that nothing is left over.

They need root and iproute2; without them they are skipped, and say so.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import tests.support.rehearsal_rank as rehearsal_rank
from terrace.base.errors import ClusterError
from terrace.base.schema import dump
from terrace.cluster.cluster import Cluster, Tier
from terrace.lab.rehearse import wire
from terrace.lab.rehearse.names import existing, owner_of
from terrace.lab.rehearse.network import network
from terrace.lab.rehearse.tools import capabilities, check_rights
from tests.support.nightly import nightly
from tests.support.tiny_runs import all_gone, environment, is_alive, terrace
from tests.support.toys import cluster_of
from tests.support.warm import Command

RANK = Path(rehearsal_rank.__file__)
NUM_RANKS = 4


def _missing() -> str:
    if not sys.platform.startswith("linux"):
        return "namespaces are Linux's"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc are not installed (Debian: iproute2)"
    try:
        check_rights(capabilities())
        with network(wire(_cluster(), 1.0)):
            return ""
    except ClusterError as error:
        return str(error)


def _cluster() -> Cluster:
    tiers = (
        Tier(name="node", size=2, bandwidth_bytes_per_s=2e7, latency_s=0.0),
        Tier(name="system", size=2, bandwidth_bytes_per_s=5e6, latency_s=0.0, shared=True),
    )
    return Cluster(name="small", device=cluster_of(2).device, tiers=tiers)


pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module", autouse=True)
def _able() -> None:
    reason = _missing()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def cluster_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(tomli_w.dumps(dump(_cluster())))
    return path


def _rehearse(cluster_file: Path, *words: str | Path, options: tuple[str | Path, ...] = ()) -> Any:
    command = ("rehearse", "run", "--cluster", cluster_file, *options, "--", sys.executable, RANK, *words)
    return terrace(*command, cwd=cluster_file.parent)


@contextmanager
def _staying(cluster_file: Path, name: str = "pids") -> Iterator[tuple[Command, dict[int, set[int]]]]:
    """Start a rehearsal whose ranks sleep; yield it with the processes of each rank: the rank and its child."""
    folder = cluster_file.parent / name
    folder.mkdir()
    command = ["rehearse", "run", "--cluster", str(cluster_file), "--", sys.executable, str(RANK), "stay", str(folder)]
    process = Command(command, cluster_file.parent, environment())
    pids: dict[int, set[int]] = {}
    try:
        while len(pids) < NUM_RANKS:
            assert process.returncode is None, process.communicate(timeout=9)[1]
            names = [path for path in folder.iterdir() if path.name.isdecimal()]
            pids = {int(path.name): set(map(int, path.read_text().split())) for path in names}
        yield process, pids
    finally:
        process.kill()
        process.wait()
        assert all_gone(_all(pids))
        terrace("rehearse", "clean", cwd=cluster_file.parent)


def _all(pids: dict[int, set[int]]) -> set[int]:
    return set().union(*pids.values())


def _namespaces_of(pid: int) -> list[str]:
    owners = ((name, owner_of(name)) for name in existing())
    return [name for name, owner in owners if owner is not None and owner.pid == pid]


# What is counted, and how fast it is


def test_rates_and_counters(cluster_file: Path, tmp_path: Path) -> None:
    """4 MB to the neighbour at 20 MB/s, and 4 MB over the uplink that two ranks share, at 2 x 5 MB/s."""
    num_bytes, counters = 4_000_000, tmp_path / "counters.json"
    done = _rehearse(cluster_file, "transfer", str(num_bytes), "1", "2", options=("--counters", counters))
    assert done.returncode == 0, done.stderr
    near, far = (json.loads(line) for line in done.stdout.splitlines())
    # A busy machine may send less than a link lets through, never more.
    assert num_bytes / near["seconds"] < 1.1 * 20e6
    assert num_bytes / far["seconds"] < 1.1 * 10e6
    for said, tier, other in ((near, "0", "1"), (far, "1", "0")):
        assert said["sent"][tier] == pytest.approx(rehearsal_rank.NUM_TRANSFERS * num_bytes, rel=0.03)
        assert said["sent"][other] < 10_000
    found = json.loads(counters.read_text())
    assert (found["cluster"], found["scale"], found["world_size"], found["exit_code"]) == ("small", 1.0, 4, 0)
    node, system = found["tiers"]["node"], found["tiers"]["system"]
    assert node["sent_bytes_by_rank"][0] == pytest.approx(rehearsal_rank.NUM_TRANSFERS * num_bytes, rel=0.03)
    assert system["sent_bytes_by_rank"][0] == pytest.approx(rehearsal_rank.NUM_TRANSFERS * num_bytes, rel=0.03)
    assert system["received_bytes_by_rank"][2] == pytest.approx(system["sent_bytes_by_rank"][0], rel=0.01)
    assert system["uplinks"][0] == {
        "ranks": [0, 1],
        "sent_bytes": pytest.approx(sum(system["sent_bytes_by_rank"][:2]), rel=0.01),
        "received_bytes": pytest.approx(sum(system["sent_bytes_by_rank"][2:]), abs=10_000),
    }
    assert node["sent_bytes_by_rank"][2:] == [0, 0], "ranks that say nothing send nothing"
    assert "small at scale 1" in done.stderr


@pytest.mark.nightly
def test_torch_runs_as_it_is_and_its_bytes_are_the_payload(cluster_file: Path, tmp_path: Path) -> None:
    program = tmp_path / "reduce.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "pairs = [dist.new_group([rank, rank + 2]) for rank in (0, 1)]\n"
        "values = torch.full((500_000,), float(dist.get_rank()))\n"
        "dist.all_reduce(values, group=pairs[dist.get_rank() % 2])\n"
        "print('sum', float(values[0]))\n"
        "dist.barrier()\n"
    )
    counters = tmp_path / "counters.json"
    command = ("rehearse", "run", "--cluster", cluster_file, "--counters", counters, "--", sys.executable, program)
    done = terrace(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "sum 2.0\n"
    for rank, total in ((1, 4.0), (2, 2.0), (3, 4.0)):
        assert f"[rank {rank}] sum {total}" in done.stderr
    sent = json.loads(counters.read_text())["tiers"]["system"]["sent_bytes_by_rank"]
    # Headers, acknowledgements and keys of the store come on top: 1 to 3 %, more on a busy machine.
    assert all(2_000_000 <= each <= 2_120_000 for each in sent), sent


def test_every_rank_has_its_own_network_and_a_launchers_variables(cluster_file: Path) -> None:
    done = _rehearse(cluster_file, "show")
    said = [done.stdout, *(line.partition("] ")[2] for line in done.stderr.splitlines() if line.startswith("[rank "))]
    for line in said:
        assert "4 terrace0 ['lo', 't0', 't1', 'terrace0']" in line
    assert sorted(line.split()[0] for line in said) == ["0", "1", "2", "3"]


# How it ends


def test_a_rank_that_fails_is_named_with_its_own_words_and_exit_code(cluster_file: Path) -> None:
    done = _rehearse(cluster_file, "fail")
    assert done.returncode == 7
    assert "[rank 2] ValueError: two is one too many" in done.stderr
    assert done.stderr.splitlines()[-1] == "terrace: rank 2 ended with exit code 7; 3 others were ended"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), *nightly((signal.SIGTERM, 143), (signal.SIGHUP, 143))]
)
def test_signals_end_everything(cluster_file: Path, number: signal.Signals, code: int) -> None:
    with _staying(cluster_file) as (process, pids):
        assert len(_namespaces_of(process.pid)) == NUM_RANKS + 1
        os.kill(process.pid, number)
        process.communicate(timeout=90)
        assert process.returncode == code
        assert all_gone(_all(pids), within_s=10)
        assert _namespaces_of(process.pid) == []


def test_a_killed_rank_ends_the_others_and_is_named(cluster_file: Path) -> None:
    with _staying(cluster_file) as (process, pids):
        os.kill(min(pids[3]), signal.SIGKILL)
        error = process.communicate(timeout=90)[1]
        assert process.returncode == 128 + signal.SIGKILL
        assert error.splitlines()[-1] == "terrace: rank 3 was killed by SIGKILL; 3 others were ended"
        assert all_gone(_all(pids), within_s=10), "children of ranks end, too"
        assert _namespaces_of(process.pid) == []


def test_a_killed_rehearsal_takes_its_ranks_along_and_clean_the_rest(cluster_file: Path) -> None:
    with _staying(cluster_file, "alive") as (living, their_pids), _staying(cluster_file) as (process, pids):
        process.kill()
        process.communicate(timeout=90)
        assert all_gone(_all(pids), within_s=30)
        assert len(_namespaces_of(process.pid)) == NUM_RANKS + 1
        mentioned = _rehearse(cluster_file, "exit", "0")
        assert mentioned.returncode == 0
        assert f"{process.pid} was killed and left namespaces behind: terrace rehearse clean" in mentioned.stderr
        cleaned = terrace("rehearse", "clean", cwd=cluster_file.parent)
        assert f"removed {NUM_RANKS + 1} namespaces of rehearsal {process.pid}" in cleaned.stdout
        assert _namespaces_of(process.pid) == []
        assert len(_namespaces_of(living.pid)) == NUM_RANKS + 1, "those of a living rehearsal stay"
        assert all(map(is_alive, _all(their_pids)))


@pytest.mark.nightly
def test_two_at_once_do_not_meet(cluster_file: Path) -> None:
    with _staying(cluster_file):
        done = _rehearse(cluster_file, "transfer", "100000", "2")
        assert done.returncode == 0, done.stderr


def test_nothing_is_put_into_the_machines_own_network() -> None:
    before = Path("/proc/self/net/dev").read_text().count(":"), Path("/proc/self/net/route").read_text()
    with network(wire(_cluster(), 1.0)):
        assert (Path("/proc/self/net/dev").read_text().count(":"), Path("/proc/self/net/route").read_text()) == before


def test_what_fails_inside_is_taken_down_too() -> None:
    def inside() -> None:
        with network(wire(_cluster(), 1.0)):
            with pytest.raises(ClusterError, match="already has a rehearsal"), network(wire(_cluster(), 1.0)):
                pass
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        inside()
    assert _namespaces_of(os.getpid()) == []
