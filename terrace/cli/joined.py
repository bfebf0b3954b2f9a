"""Steps that the ranks of a command take together once they have joined, and limits before they start."""

import sys
import time
from collections.abc import Callable
from datetime import timedelta

from terrace.base.errors import ConfigError
from terrace.base.words import were
from terrace.cli.launching import torchrun
from terrace.cluster.cluster import Cluster
from terrace.launch.machines import check_tiers
from terrace.launch.world import World

JOIN_TIMEOUT_S = 600.0  # machines of one job may start minutes apart
_PREPARE_TIMEOUT = timedelta(days=1)  # a large corpus takes hours to tokenise; a rank that dies ends the job
_HEARD_S = 10.0  # enough for ranks that only read a key
_MAX_LOCAL_RANKS = 64  # a process takes some 200 MB: more than this on one machine is surely a mistake

_FAILED, _MADE = "failed", "made:"


def check_local(cluster: Cluster) -> None:
    """Raise `ConfigError` for a cluster with more ranks than one machine may start."""
    if cluster.world_size > _MAX_LOCAL_RANKS:
        raise ConfigError(
            f"cluster {cluster.name!r} has {cluster.world_size} ranks, and one machine starts at most "
            f"{_MAX_LOCAL_RANKS} as local processes: start it on the cluster, as {torchrun(cluster, 'train ...')} (or "
            "srun terrace train ...), or resize a tier, for example "
            f"--cluster.tiers.{cluster.tiers[-1].name}.size 1"
        )


def check_world(world: World, cluster: Cluster) -> None:
    """Raise `ConfigError` unless the launcher's ranks are the cluster's, in number and on their machines."""
    if world.world_size != cluster.world_size:
        raise ConfigError(
            f"{were(world.world_size, 'rank')} started, but cluster {cluster.name!r} has "
            f"{cluster.world_size}: start {cluster.world_size}, or resize a tier, for example "
            f"--cluster.tiers.{cluster.tiers[-1].name}.size N"
        )
    check_tiers(world.machines, [(tier.name, tier.size) for tier in cluster.tiers])


def one_makes(world: World, key: str, num_others: int, mine: bool, make: Callable[[], str]) -> str:
    """Text of `make`, called on one rank (`mine`) and sent to the others through the store.

    If it raises anything, only that rank reports the error; the other `num_others` exit. Raises `ConfigError` for a
    text that no rank of this run wrote.
    """
    if not mine:
        world.store.wait([key], _PREPARE_TIMEOUT)
        said = world.seal.open(key, bytes(world.store.get(key)))
        if said == _FAILED:
            # Acknowledged, so that the failing rank may end and take the store with it.
            world.store.add(f"{key}/heard", 1)
            sys.exit(2)
        return said.removeprefix(_MADE)
    try:
        made = make()
    except BaseException:
        world.store.set(key, world.seal.close(key, _FAILED))
        # The store may be in this process: it stays until the others have heard.
        deadline_s = time.monotonic() + _HEARD_S
        while world.store.add(f"{key}/heard", 0) < num_others and time.monotonic() < deadline_s:
            time.sleep(0.02)
        raise
    world.store.set(key, world.seal.close(key, _MADE + made))
    return made
