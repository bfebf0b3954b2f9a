"""The ranks of `terrace probe`: started here, or joined under a launcher."""

from collections.abc import Callable

import torch.distributed as dist

from terrace.cli.output import replace_unprintable, sigterm_raises
from terrace.cli.worker import JOIN_TIMEOUT_S, check_local, check_world, one_makes
from terrace.cluster import Cluster
from terrace.probe.measure import measure
from terrace.probe.samples import Samples
from terrace.runtime.launch import detect, join, launch_local, pace
from terrace.runtime.world import World


def run(cluster: Cluster, seconds: float, check: Callable[[], None]) -> Samples | None:
    """Measure with local processes, or as one rank of a launcher's world; returns None on all ranks but the first.

    `check` raises what is wrong with the output: once, before anything is started or measured.
    """
    pace()  # refuses a bad value before anything is started
    if not detect():
        check_local(cluster)
        check()
        with sigterm_raises():
            samples: Samples = launch_local(cluster.world_size, run_rank, (cluster, seconds))
        return samples
    world = join(timeout_s=JOIN_TIMEOUT_S)

    def check_here() -> bool:
        check_world(world, cluster)
        check()
        return True

    one_makes(world, "probe", world.world_size - 1, world.rank == 0, check_here)
    samples = run_rank(world, cluster, seconds)
    dist.destroy_process_group()
    return samples if world.rank == 0 else None


def run_rank(world: World, cluster: Cluster, seconds: float) -> Samples:
    """One rank; rank 0 says what is measured. Top-level, so that a child process can import it."""
    replace_unprintable()
    return measure(world, cluster, seconds, _say if world.rank == 0 else lambda what: None)


def _say(what: str) -> None:
    print(f"measuring {what}", flush=True)
