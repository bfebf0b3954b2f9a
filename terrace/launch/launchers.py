"""Rank, world size and address of rank 0, from the variables that launchers set.

Pure functions of the environment's variables, so that every launcher can be tested without it. Needs no torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from terrace.base.errors import ConfigError

_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
# Below the range from which Linux takes ports of outgoing connections, 32768 and above.
_FIRST_PORT, _NUM_PORTS = 12000, 20000


@dataclass(frozen=True)
class Launcher:
    """The variables of a launcher. `needed` lists further variables that must be set, to distinguish launchers that
    share some.
    """

    name: str
    rank: str
    world_size: str
    local_rank: str = ""
    local_world_size: str = ""
    needed: tuple[str, ...] = ()
    late: str = "the output of the others says why they ended, if they did"  # advice on ranks that do not join


# The first match is used. A process of mpirun or mpiexec inside a Slurm job also has Slurm's variables, those of the
# daemon that started it, and `srun --mpi=pmi2` sets PMI_RANK without a local rank.
LAUNCHERS = (
    Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        late="start the command on every machine, with the MASTER_ADDR and MASTER_PORT of rank 0",
    ),
    Launcher(  # Open MPI, and jsrun
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(  # Cray's
        "mpiexec (PALS)", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE", needed=("PMI_SIZE",)
    ),
    Launcher(  # Hydra of MPICH and Intel MPI
        "mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", needed=("MPI_LOCALRANKID",)
    ),
    Launcher(
        "srun",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        late="under Slurm start it with srun: a batch script by itself starts one process",
    ),
    Launcher("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    Launcher("mpiexec", "PMI_RANK", "PMI_SIZE"),
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A process's rank under a launcher; rank 0 is at `address`:`port`."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    address: str
    port: int
    late: str = field(default="", compare=False)  # advice on ranks that do not join


def is_launched(variables: Mapping[str, str]) -> bool:
    """Whether a launcher's variables are set, even if it started a single process."""
    return any(each.rank in variables for each in LAUNCHERS)


def rank_of(variables: Mapping[str, str]) -> str:
    """The rank set by the first matching launcher, unchecked; "0" without a launcher."""
    return next((variables[each.rank] for each in LAUNCHERS if each.rank in variables), "0")


def names() -> tuple[str, ...]:
    """All environment variables that this module reads."""
    own = [name for each in LAUNCHERS for name in (each.rank, each.world_size, each.local_rank, each.local_world_size)]
    return tuple(dict.fromkeys(name for name in (*own, *_ADDRESS, *_OF_SLURM) if name))


def launcher_of(variables: Mapping[str, str]) -> Launcher | None:
    """The launcher that started this process, whether or not it tells where rank 0 is; None without one, or for a
    single process.
    """
    for launcher in LAUNCHERS:
        world_size = variables.get(launcher.world_size)
        if any(name not in variables for name in (launcher.rank, launcher.world_size, *launcher.needed)):
            continue
        # All but torchrun set these for a single process, and srun's are set in a batch script.
        if launcher.name == "torchrun" or world_size != "1":
            return launcher
    return None


def place(variables: Mapping[str, str]) -> Place | None:
    """The rank and address that a launcher gave this process; None without one, or for a single process.

    The address is in MASTER_ADDR and MASTER_PORT; under srun it follows from the job (`slurm_address`). Raises
    `ConfigError` if another launcher does not set them, or a number is invalid.
    """
    launcher = launcher_of(variables)
    if launcher is None:
        return None
    address, port = _address(launcher, variables)
    of_rank = [_number(name, variables) for name in (launcher.rank, launcher.world_size)]
    found = Place(
        launcher=launcher.name,
        rank=of_rank[0] or 0,
        world_size=of_rank[1] or 0,
        local_rank=_number(launcher.local_rank, variables),
        local_world_size=_number(launcher.local_world_size, variables),
        address=address,
        port=port,
        late=launcher.late,
    )
    if not found.rank < found.world_size:
        raise ConfigError(
            f"{launcher.rank}={found.rank} with {launcher.world_size}={found.world_size}: ranks are numbered "
            "from 0 to the number of ranks less one; the launcher sets both, or unset both"
        )
    return found


def _address(launcher: Launcher, variables: Mapping[str, str]) -> tuple[str, int]:
    given = {name: variables[name] for name in _ADDRESS if variables.get(name)}
    missing = [name for name in _ADDRESS if name not in given]
    own = slurm_address(variables) if missing and launcher.name == "srun" else None
    if missing and own is None:
        raise ConfigError(
            f"{launcher.world_size}={variables[launcher.world_size]} says that {launcher.name} started this process, "
            f"and nothing says where rank 0 is; set {' and '.join(missing)}, or unset {launcher.world_size}"
            + ("; under Slurm start it with srun" if launcher.name == "srun" else "")
        )
    port = _number("MASTER_PORT", given)
    if port == 0:
        raise ConfigError("MASTER_PORT=0 is no port that other ranks could know; set it to one from 1024 to 65535")
    host, own_port = own or ("", 0)
    return given.get("MASTER_ADDR", host), own_port if port is None else port


_OF_SLURM = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID")


def slurm_address(variables: Mapping[str, str]) -> tuple[str, int] | None:
    """Host and port of rank 0 of a Slurm step; None if Slurm's variables do not determine them.

    The host is the first of the step's nodes, which runs task 0 under every distribution but `arbitrary`
    (SLURM_LAUNCH_NODE_IPADDR is srun's own host instead, a login node under salloc). The port is derived from the ids
    of job and step, so all ranks find the same one, and steps that share a node get different ones.
    """
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
    job, step = variables.get("SLURM_JOB_ID", ""), variables.get("SLURM_STEP_ID", "0")
    if not nodes or not job.isdecimal() or not step.isdecimal():
        return None
    return first_host(nodes), _FIRST_PORT + (int(job) * 17 + int(step)) % _NUM_PORTS


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: gpu003 for `gpu[003-006,010],login1`."""
    first, *_ = re.split(r",(?![^\[]*\])", nodes)  # at the commas outside brackets
    return re.sub(r"\[([^\]]*)\]", lambda ranges: re.split("[-,]", ranges[1])[0], first)


def _number(name: str, variables: Mapping[str, str]) -> int | None:
    text = variables.get(name) if name else None
    if text is not None and not text.isdecimal():
        raise ConfigError(f"{name}={text!r} must be a whole number; the launcher sets it, or unset it")
    return None if text is None else int(text)
