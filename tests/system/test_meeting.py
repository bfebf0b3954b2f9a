"""Ranks of several machines, told apart by the host names that this file gives them."""

import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from bench.common import free_port
from tests.support import warm
from tests.support.tiny_runs import environment, write_run

pytestmark = pytest.mark.timeout(240)


def start(folder: Path, hosts: str, port: int | None, words: tuple[tuple[str, ...], ...] = ()) -> list["warm.Command"]:
    """A rank for each letter, its host, as srun starts them; `words` has further options of each rank."""
    table = {"SLURM_NTASKS": str(len(hosts)), "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "127.0.0.1"}
    if port is not None:
        table |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    table["TERRACE_SECRET"] = "only the ranks know this"
    command = ["train", "--config", "run.toml", "--folder", "run"]
    return [
        warm.Command(
            [*command, *(words[rank] if words else ())],
            folder,
            environment() | table | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(hosts[:rank].count(host))},
            host=host,
        )
        for rank, host in enumerate(hosts)
    ]


def ends(ranks: list["warm.Command"]) -> list[tuple[int | None, str, str]]:
    """Code, output and errors of every rank, all read at once: one that may not write holds up the others."""
    try:
        with ThreadPoolExecutor(len(ranks)) as readers:
            texts = list(readers.map(lambda rank: rank.communicate(timeout=200), ranks))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(rank.returncode, out, errors) for rank, (out, errors) in zip(ranks, texts, strict=True)]


def test_under_srun_cyclic_ranks_meet_are_renumbered_and_have_logs(tmp_path: Path) -> None:
    """Four ranks dealt out in turn to two machines: pairs of the innermost tier end up on one machine each.

    Only Slurm's own variables are exported, and the meeting place follows from the job. The output of ranks 1 to 3,
    with NCCL's lines, is in files.
    """
    write_run(tmp_path, 2, 1, 2, steps=2, rank_logs=True)
    found = ends(start(tmp_path, "abab", None))
    assert [code for code, _, _ in found] == [0] * 4, found
    assert "2 machines: ranks 0-1 on a (started as 0, 2), 2-3 on b (started as 1, 3)" in found[0][1]
    assert not any(out for _, out, _ in found[1:])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    logs = sorted(path.name for path in (tmp_path / "run" / "logs").iterdir())
    assert logs == [f"rank-{rank:05d}.log" for rank in (1, 2, 3)]


@pytest.mark.nightly
def test_a_machines_tier_over_two_machines_is_refused_once(tmp_path: Path) -> None:
    write_run(tmp_path, 2, 1, 2, steps=2)
    found = ends(start(tmp_path, "abbb", free_port()))
    assert [code for code, _, _ in found] == [2] * 4, found
    assert "tier 'package' joins 2 ranks of one machine, but ranks 0 to 1 are on a and b" in found[0][2]
    assert not any("terrace:" in errors for _, _, errors in found[1:])
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_another_configuration_of_a_rank_is_said(tmp_path: Path) -> None:
    write_run(tmp_path, 2, steps=2)
    found = ends(start(tmp_path, "aa", free_port(), ((), ("--train.seed", "1"))))
    assert [code for code, _, _ in found] == [0, 0], found
    assert "rank 1 started with other values in [train]; rank 0's are used" in found[0][1]


def connected(port: int) -> TCPStore:
    """A stranger's client of the ranks' store."""
    deadline_s = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        except OSError:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


def test_a_job_that_a_stranger_puts_into_the_store_is_not_believed(tmp_path: Path) -> None:
    """A process that knows the port writes a job under the life's name, which the store tells it."""
    write_run(tmp_path, 2, steps=2)
    port = free_port()
    ranks = start(tmp_path, "aa", port)
    try:
        store = connected(port)
        store.wait(["request/1"])
        token = json.loads(bytes(store.get("request/1")).decode().partition(":")[2])["token"]
        store.wait([f"answer/{token}"])
        life = bytes(store.get(f"answer/{token}")).decode().partition(":")[2]
        job = json.dumps({"run": "", "folder": str(tmp_path / "elsewhere"), "sources": [], "tokenizer_fingerprint": ""})
        while ranks[1].returncode is None:
            # Again and again, over whatever rank 0 writes.
            store.set(f"terrace/{life}/world/job", f"{'0' * 64}:made:{job}")
    except RuntimeError:
        pass  # the store ends with rank 0
    finally:
        ranks[0].kill()  # a launcher ends the others, too
        found = ends(ranks)
    assert "'job' in the store of the ranks is not of this run" in found[1][2], found
    assert not (tmp_path / "elsewhere").exists()
