"""The command that starts the ranks of a cluster on its machines."""

import math
import sys

from terrace.base.errors import ConfigError
from terrace.cluster.cluster import Cluster
from terrace.launch.launchers import launcher_of, rank_of
from terrace.launch.machines import MACHINE_TIERS
from terrace.probe.environment import environment_variables


def num_machines(cluster: Cluster) -> int:
    """Number of machines in a cluster, from the names of its tiers; without a machine tier, the size of the outermost
    tier.
    """
    sizes = [tier.size for tier in cluster.tiers]
    named = [index for index, tier in enumerate(cluster.tiers) if tier.name in MACHINE_TIERS]
    return math.prod(sizes[named[-1] + 1 :]) if named else sizes[-1]


def torchrun(cluster: Cluster, command: str) -> str:
    """The torchrun command line for a terrace `command`, to be run on each machine of the cluster."""
    nodes = num_machines(cluster)
    places = f"--nproc-per-node {cluster.world_size // nodes}"
    if nodes > 1:
        places = f"--nnodes {nodes} {places} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"torchrun {places} -m terrace {command}"


def check_alone(command: str, instead: str = "") -> None:
    """Refuses to run under a launcher a command that starts its ranks itself, because each process would start all of
    them.

    Raises `ConfigError` on rank 0, and ends the other ranks. `instead` says how other machines take part.
    """
    variables = environment_variables()
    launcher = launcher_of(variables)
    if launcher is None or variables[launcher.world_size] == "1":
        return
    rank = rank_of(variables)
    # Rank 0 prints it for all. A rank that is not a number may be the same on every process.
    if rank.isdecimal() and int(rank):
        sys.exit(2)
    raise ConfigError(
        f"terrace {command} starts its ranks itself, and {launcher.name} started {variables[launcher.world_size]} "
        f"processes of it ({launcher.world_size}={variables[launcher.world_size]}): start it once, without a launcher "
        f"(in a job of Slurm with --ntasks 1){f'; {instead}' if instead else ''}"
    )
