"""Ranks that do not come, or that cannot: the others say so within seconds, and rank 0 tells why."""

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not in __all__
from torch.distributed.distributed_c10d import PrefixStore

from terrace.base.errors import CheckpointError, ConfigError, DataError, HangError
from terrace.launch import rendezvous
from terrace.launch.launchers import place
from terrace.launch.machines import Facts, check_same_code
from terrace.launch.rendezvous import Rendezvous, join_ranks
from terrace.launch.seal import Seal
from terrace.launch.world import World, store_lost
from terrace.train import joined
from terrace.train.joined import one_makes, together
from tests.support.tiny_runs import environment, write_run
from tests.support.warm import Command

SLURM = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "localhost"}


def on_threads(work: Any, num: int, seconds: float = 60.0) -> list[Any]:
    """What `work(rank)` returns or raises on each of `num` threads."""
    found = list[Any]([None] * num)

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_rank_that_is_late_is_waited_for_in_words(monkeypatch: pytest.MonkeyPatch, absent: int) -> None:
    monkeypatch.setattr(rendezvous, "_QUIET_S", 0.2)
    store, seal, said, spoken = HashStore(), Seal.fresh(), list[str](), threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if absent or len(said) == 2:
            spoken.set()

    def rank_of(rank: int) -> Rendezvous:
        if rank == absent:
            assert spoken.wait(20)
        return join_ranks(store, rank, 3, Facts("a"), seal, 60.0, renumber=True, say=say, late="start it with srun")

    assert all(isinstance(each, Rendezvous) for each in on_threads(rank_of, 3)), "they go on once all are there"
    if absent:
        assert said == [f"rank 0 waits up to 60 s for rank {absent}: start it with srun"]
    else:
        assert sorted(said) == [f"rank {rank} waits up to 60 s for rank 0" for rank in (1, 2)]


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_rank_that_cannot_take_part_ends_the_meeting(refusing: int) -> None:
    store, seal = HashStore(), Seal.fresh()
    error = ConfigError("local rank 9 has no device")

    def rank_of(rank: int) -> Rendezvous:
        return join_ranks(store, rank, 3, error if rank == refusing else Facts("a"), seal, 20.0, renumber=True)

    found = on_threads(rank_of, 3)
    assert found[refusing] is error
    who = "" if refusing == 0 else f" (rank 1 on {socket.gethostname()})"
    assert str(found[0]) == f"{error}{who}"
    others = [each for rank, each in enumerate(found) if rank not in (0, refusing)]
    assert {type(each) for each in others} == {SystemExit}


def test_a_refusal_of_an_earlier_life_counts_no_more() -> None:
    """Torchrun's agents keep the store over restarts, and with it the word of a rank that has ended."""
    store, seal = HashStore(), Seal.fresh()
    with pytest.raises(HangError):
        join_ranks(store, 1, 2, DataError("no data"), seal, 0.2, renumber=True)

    def again(rank: int) -> Rendezvous:
        time.sleep(0.5 * rank)
        return join_ranks(store, rank, 2, Facts("a"), seal, 20.0, renumber=True)

    assert all(isinstance(each, Rendezvous) for each in on_threads(again, 2))


def test_backends_must_agree() -> None:
    facts = [Facts("a", backend="nccl", why="it has one"), Facts("b", backend="gloo", why="no usable CUDA device")]
    with pytest.raises(
        ConfigError, match=r"^rank 1 on b would use gloo \(no usable CUDA device\), but rank 0 uses nccl"
    ):
        check_same_code(facts)


@pytest.mark.parametrize(("variables", "words"), [(SLURM, "srun"), ({"RANK": "0", "WORLD_SIZE": "2"}, "every machine")])
def test_what_to_do_about_late_ranks_depends_on_the_launcher(variables: dict[str, str], words: str) -> None:
    found = place({**variables, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
    assert found is not None
    assert words in found.late


def test_a_batch_script_without_srun_is_told_of_it(tmp_path: Path) -> None:
    config = write_run(tmp_path, 1, 1, 2)
    with socket.create_server(("localhost", 0)) as held:
        port = held.getsockname()[1]
    # Its output is a pipe, as in a job.
    process = Command(["train", "--config", str(config)], tmp_path, environment() | SLURM | {"MASTER_PORT": str(port)})
    said = list[str]()
    output = process.stdout
    reader = threading.Thread(target=lambda: said.append(output.readline()), daemon=True)
    reader.start()
    reader.join(60)
    still_waits = process.returncode is None
    process.kill()
    process.wait()
    assert said, "a line before the process ends"
    assert said[0].startswith("rank 0 waits up to 600 s for rank 1: under Slurm start it with srun")
    assert still_waits


def worlds(num: int, hosts: tuple[str, ...] = ()) -> list[World]:
    store, seal = PrefixStore("life", HashStore()), Seal.fresh()
    return [World(rank, num, rank, num, store, store_rank=0, seal=seal, hosts=hosts) for rank in range(num)]


@pytest.mark.parametrize("refusing", [0, 1, 2])
def test_a_refusal_while_a_run_is_prepared_reaches_all_ranks(refusing: int) -> None:
    """Rank 0 has read its own data long before another host finds that it has none."""
    ranks, error = worlds(3, ("a", "b", "c")), CheckpointError("c does not see the run folder")

    def rank_of(rank: int) -> None:
        with together(ranks[rank]):
            if rank == refusing:
                time.sleep(0.3)
                raise error

    found = on_threads(rank_of, 3)
    assert found[refusing] is error
    who = "" if refusing == 0 else f" (rank {refusing} on {'abc'[refusing]})"
    assert (type(found[0]), str(found[0])) == (CheckpointError, f"{error}{who}")
    assert [type(each) for rank, each in enumerate(found) if rank not in (0, refusing)] == [SystemExit] * (
        1 if refusing else 2
    )


def test_an_error_that_is_no_refusal_of_ours_is_told_with_its_kind() -> None:
    ranks = worlds(2)

    def rank_of(rank: int) -> None:
        with together(ranks[rank]):
            if rank:
                raise PermissionError("cannot read")

    found = on_threads(rank_of, 2)
    assert (type(found[0]), str(found[0])) == (HangError, "PermissionError: cannot read (rank 1)")
    assert type(found[1]) is PermissionError


def test_what_one_rank_makes_reaches_the_others_or_ends_them() -> None:
    ranks = worlds(3)

    def made(rank: int) -> str:
        with together(ranks[rank]):
            return one_makes(ranks[rank], "job", rank == 1, lambda: "text")

    assert on_threads(made, 3) == ["text"] * 3
    others = worlds(3)

    def fails() -> str:
        raise DataError("no data")

    def refused(rank: int) -> str:
        with together(others[rank]):
            return one_makes(others[rank], "job", rank == 1, fails)

    found = on_threads(refused, 3)
    assert [type(each) for each in found] == [DataError, DataError, SystemExit]
    assert str(found[0]) == "no data (rank 1)"


def test_a_store_that_ends_meanwhile_leaves_the_rank_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def compare_set(self, *_: object) -> None:
            raise RuntimeError("Connection reset")

    (world,) = worlds(1)
    monkeypatch.setattr(joined, "_HEARD_S", 0.1)
    object.__setattr__(world, "store", Gone())
    with pytest.raises(DataError, match="no data"), store_lost(), together(world):
        raise DataError("no data")


def test_a_refusal_before_a_rank_joins_is_told_by_rank_0(tmp_path: Path) -> None:
    """Rank 1 does not see a file that rank 0 sees."""
    config = Path(write_run(tmp_path, 1, 1, 2))
    with socket.create_server(("localhost", 0)) as held:
        port = held.getsockname()[1]
    launcher = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TERRACE_SECRET": "s" * 32}
    ranks = [
        Command(
            ["train", "--config", str(config if rank == 0 else tmp_path / "none.toml")],
            tmp_path,
            environment() | launcher | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert said[1].startswith("terrace: error: ")
    assert f"{tmp_path / 'none.toml'}" in said[1]
    assert said[0] == f"{said[1].rstrip()} (rank 1 on {socket.gethostname()})\n"
    assert not [*(tmp_path / "runs").glob("*")]
