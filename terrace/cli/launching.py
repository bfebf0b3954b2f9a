"""The command that starts the ranks of a cluster on its machines."""

import math

from terrace.cluster.cluster import Cluster
from terrace.launch.machines import MACHINE_TIERS


def num_machines(cluster: Cluster) -> int:
    """Machines of a cluster by the names of its tiers; without such a name, the members of its outermost tier."""
    sizes = [tier.size for tier in cluster.tiers]
    named = [index for index, tier in enumerate(cluster.tiers) if tier.name in MACHINE_TIERS]
    return math.prod(sizes[named[-1] + 1 :]) if named else sizes[-1]


def torchrun(cluster: Cluster, command: str) -> str:
    """`command` of terrace under torchrun, to be given on each machine of the cluster."""
    nodes = num_machines(cluster)
    places = f"--nproc-per-node {cluster.world_size // nodes}"
    if nodes > 1:
        places = f"--nnodes {nodes} {places} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"torchrun {places} -m terrace {command}"
