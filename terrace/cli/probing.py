"""Runs the ranks of `terrace probe` and `terrace doctor --network`: started here, or joined under a launcher."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from terrace.cli.output import printable_output, sigterm_raises
from terrace.cluster.cluster import Cluster
from terrace.launch.refusals import refusals_told
from terrace.launch.start import detect, join, launch_local, pace
from terrace.launch.world import World
from terrace.probe.measure import measure
from terrace.probe.network import MeasuredTier, measure_links
from terrace.probe.samples import Samples
from terrace.train.joined import JOIN_TIMEOUT_S, check_local, check_world, one_makes, together

T = TypeVar("T")


def run(cluster: Cluster, seconds: float, check: Callable[[], None]) -> Samples | None:
    """Measures with local processes, or as one rank of a launcher's world. Returns None on all ranks except the first.

    `check` raises for an unusable output file. It is called once, before anything is started or measured.
    """
    return _on_all_ranks(cluster, run_rank, (cluster, seconds), check, print)


def run_links(cluster: Cluster, seconds: float, *, quiet: bool) -> list[MeasuredTier] | None:
    say = _nothing if quiet else print
    return _on_all_ranks(cluster, run_links_rank, (cluster, seconds, quiet), lambda: None, say)


def _on_all_ranks(
    cluster: Cluster,
    target: Callable[..., T],
    arguments: tuple[Any, ...],
    check: Callable[[], None],
    say: Callable[[str], None],
) -> T | None:
    with refusals_told():
        pace()  # refuses a bad TERRACE_PACE before anything is started
    if not detect():
        check_local(cluster)
        check()
        with sigterm_raises():
            made: T = launch_local(cluster.world_size, target, arguments, say=say)
        return made
    world = join(timeout_s=JOIN_TIMEOUT_S, say=say)

    # One rank checks for all: files may be visible to it alone.
    def check_here() -> str:
        check_world(world, cluster)
        check()
        return ""

    with together(world):
        one_makes(world, "probe", world.rank == 0, check_here)
    made = target(world, *arguments)
    dist.destroy_process_group()
    return made if world.rank == 0 else None


def run_rank(world: World, cluster: Cluster, seconds: float) -> Samples:
    """One rank; rank 0 prints progress. Top-level, so that a child process can import it."""
    with printable_output():
        return measure(world, cluster, seconds, _say if world.rank == 0 else _nothing)


def run_links_rank(world: World, cluster: Cluster, seconds: float, quiet: bool) -> list[MeasuredTier]:
    """One rank of `run_links`; top-level, so that a child process can import it."""
    with printable_output():
        return measure_links(world, cluster, seconds, _say if world.rank == 0 and not quiet else _nothing)


def _nothing(what: str) -> None:
    pass


def _say(what: str) -> None:
    print(f"measuring {what}", flush=True)
