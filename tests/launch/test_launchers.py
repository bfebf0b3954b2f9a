"""Ranks, world and address from the variables that each launcher sets for its processes."""

import re

import pytest

from terrace.base.errors import ConfigError
from terrace.launch.launchers import LAUNCHERS, Place, first_host, names, place, rank_of, slurm_address

_MEETING = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
_SLURM = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[003-006]", "SLURM_NTASKS": "8"}


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("torchrun", {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}),
        ("srun", {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}),
        (
            "mpirun",
            {
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_SIZE": "8",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
            },
        ),
        ("mpiexec", {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}),
        ("mpiexec", {"PMI_RANK": "5", "PMI_SIZE": "8"}),
        (
            "mpiexec (PALS)",
            {"PALS_RANKID": "5", "PMI_RANK": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1", "PMI_LOCAL_SIZE": "4"},
        ),
        ("flux run", {"FLUX_TASK_RANK": "5", "FLUX_JOB_SIZE": "8", "FLUX_TASK_LOCAL_ID": "1"}),
    ],
)
def test_a_rank_knows_its_place_under_every_launcher(launcher: str, variables: dict[str, str]) -> None:
    found = place(variables | _MEETING)
    assert found is not None
    assert (found.launcher, found.rank, found.world_size) == (launcher, 5, 8)
    said = [variables.get(name) for each in LAUNCHERS for name in (each.local_rank, each.local_world_size) if name]
    assert {str(each) for each in (found.local_rank, found.local_world_size)} - {"None"} == {e for e in said if e}
    assert (found.address, found.port) == ("host0", 29500)
    assert rank_of(variables) == "5"
    assert variables.keys() | _MEETING.keys() <= set(names()) | {"PMI_RANK"}


def test_a_process_of_mpirun_inside_of_slurm_is_mpiruns() -> None:
    """Open MPI starts its daemons with srun, a task a node: its processes inherit the daemon's variables."""
    daemon = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    own = {"OMPI_COMM_WORLD_RANK": "7", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    found = place(daemon | own | _MEETING)
    assert found is not None
    assert (found.launcher, found.rank, found.local_rank) == ("mpirun", 7, 3)
    hydra = {"PMI_RANK": "7", "PMI_SIZE": "8", "MPI_LOCALRANKID": "3"}
    found = place(daemon | hydra | _MEETING)
    assert found is not None
    assert (found.launcher, found.rank, found.local_rank) == ("mpiexec", 7, 3)


def test_srun_with_pmi2_is_srun() -> None:
    variables = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "PMI_RANK": "3", "PMI_SIZE": "8"} | _SLURM
    found = place(variables)
    assert found is not None
    assert (found.launcher, found.local_rank) == ("srun", 1)


@pytest.mark.parametrize("variables", [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, {"SLURM_NTASKS": "8"}])
def test_a_shell_in_an_allocation_is_no_rank(variables: dict[str, str]) -> None:
    assert place(variables) is None


def test_under_srun_rank_0_is_found_from_the_job() -> None:
    """All ranks find the same host and port; another step, or job, has another port."""
    found = [place(_SLURM | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2)}) for rank in range(8)]
    assert {(each.address, each.port) for each in found if each is not None} == {("gpu003", 12000 + 4711 * 17 % 20000)}
    ports = {slurm_address(_SLURM | {"SLURM_STEP_ID": str(step)}) for step in range(17)}
    assert len(ports) == 17
    assert slurm_address({"SLURM_JOB_NODELIST": "a", "SLURM_JOB_ID": "9" * 12}) is not None
    # What the user sets wins, each by itself.
    own = place(_SLURM | {"SLURM_PROCID": "1", "MASTER_PORT": "1234"})
    assert own is not None
    assert (own.address, own.port) == ("gpu003", 1234)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("login1", "login1"),
        ("gpu[003-006,010],login1", "gpu003"),
        ("gpu[010,012-014]", "gpu010"),
        ("a,b", "a"),
        ("r[1-2]n[07-09]-ib", "r1n07-ib"),
        ("frontier00001.olcf,frontier00002.olcf", "frontier00001.olcf"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "where rank 0 is; set MASTER_ADDR and MASTER_PORT, or unset WORLD_SIZE",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "rank 0 is; set MASTER_PORT, or unset WORLD_SIZE"),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"},
            "PMI_SIZE=2 says that mpiexec started",
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}, "set MASTER_ADDR and MASTER_PORT"),
        (_SLURM | {"SLURM_PROCID": "8"}, "SLURM_PROCID=8 with SLURM_NTASKS=8: ranks are numbered from 0"),
        (_SLURM | {"SLURM_PROCID": "one"}, "SLURM_PROCID='one' must be a whole number"),
        (_SLURM | {"SLURM_PROCID": "0", "MASTER_PORT": "0"}, "MASTER_PORT=0 is no port"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"} | _MEETING, "LOCAL_RANK='-1' must be a whole number"),
    ],
)
def test_what_a_launcher_cannot_mean_is_refused(variables: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        place(variables)


def test_a_place_is_a_value() -> None:
    assert place(_SLURM | {"SLURM_PROCID": "0"}) == Place(
        launcher="srun",
        rank=0,
        world_size=8,
        local_rank=None,
        local_world_size=None,
        address="gpu003",
        port=12000 + 4711 * 17 % 20000,
    )
