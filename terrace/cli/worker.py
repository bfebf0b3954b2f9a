"""The ranks of `terrace train`: started here, or joined under a launcher."""

import pickle
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from terrace.base.errors import CheckpointError, ConfigError, DataError, TerraceError, TrainingError
from terrace.cli.output import drop_stdout, replace_unprintable, sigterm_raises
from terrace.cli.prepare import prepare
from terrace.cli.screen import Screen, show_plan
from terrace.cluster import Cluster
from terrace.runtime.launch import detect, join, launch_local, pace
from terrace.runtime.world import World
from terrace.train.config import RunConfig
from terrace.train.data import Source, load_tokenizer
from terrace.train.data.prepared import prepare_sources
from terrace.train.loop import Job, train
from terrace.train.metrics import Silent

JOIN_TIMEOUT_S = 600.0  # machines of one job may start minutes apart
_PREPARE_TIMEOUT = timedelta(days=1)  # a large corpus takes hours to tokenise; a rank that dies ends the job
_HEARD_S = 10.0  # for ranks that only read a key
_MAX_LOCAL_RANKS = 64  # a process takes some 200 MB: more than this on one machine is surely not meant

T = TypeVar("T")


def run(config: RunConfig, *, folder: Path | None, resume: Path | None) -> None:
    """Train with local processes, or as one rank of a launcher's world."""
    pace()  # refuses a bad value before anything is made
    if detect():
        _run_joined(config, folder, resume)
        return
    check_local(config.cluster)
    job = prepare(config, folder, resume)
    show_plan(job)
    with sigterm_raises():
        launch_local(config.cluster.world_size, run_rank, (job,))


def check_local(cluster: Cluster) -> None:
    """Raise `ConfigError` for a cluster of more ranks than are started on one machine."""
    if cluster.world_size > _MAX_LOCAL_RANKS:
        raise ConfigError(
            f"cluster {cluster.name!r} has {cluster.world_size} ranks, and one machine starts at most "
            f"{_MAX_LOCAL_RANKS} as local processes: use torchrun or srun, or resize a tier, for example "
            f"--cluster.tiers.{cluster.tiers[-1].name}.size 1"
        )


def check_world(world: World, cluster: Cluster) -> None:
    """Raise `ConfigError` unless the launcher started as many ranks as the cluster has."""
    if world.world_size != cluster.world_size:
        raise ConfigError(
            f"{world.world_size} ranks were started, but cluster {cluster.name!r} has "
            f"{cluster.world_size}: start {cluster.world_size}, or resize a tier, for example "
            f"--cluster.tiers.{cluster.tiers[-1].name}.size N"
        )


def run_rank(world: World, job: Job) -> None:
    """One rank; rank 0 prints. Top-level, so that a child process can import it."""
    replace_unprintable()
    try:
        train(world, job, Screen(job) if world.rank == 0 else Silent())
    except BrokenPipeError as error:
        drop_stdout()
        raise TrainingError(
            "nobody reads the output any more, so the run ended; send it to a file, and go on with --resume "
            f"{job.folder} if it has a checkpoint"
        ) from error


def _run_joined(config: RunConfig, folder: Path | None, resume: Path | None) -> None:
    world = join(timeout_s=JOIN_TIMEOUT_S)

    def prepare_here() -> Job:
        check_world(world, config.cluster)
        return prepare(config, folder, resume)

    job = one_makes(world, "job", world.world_size - 1, world.rank == 0, prepare_here)
    if world.rank == 0:
        show_plan(job)
    here = f"tokens/{socket.gethostname()}"
    sources = one_makes(world, here, world.local_world_size - 1, world.local_rank == 0, lambda: _sources_here(job))
    run_rank(world, replace(job, sources=sources))
    dist.destroy_process_group()


def one_makes(world: World, key: str, num_others: int, mine: bool, make: Callable[[], T]) -> T:
    """Return what the rank whose turn it is makes; when it cannot, it alone says why, and the others end."""
    if not mine:
        world.store.wait([key], _PREPARE_TIMEOUT)
        made: T | None = pickle.loads(world.store.get(key))
        if made is None:
            world.store.add(f"{key}/heard", 1)
            sys.exit(2)
        return made
    try:
        result = make()
    except TerraceError:
        world.store.set(key, pickle.dumps(None))  # type: ignore[arg-type]  # any bytes are fine
        # The store may be in this process: it stays until the others have heard.
        deadline_s = time.monotonic() + _HEARD_S
        while world.store.add(f"{key}/heard", 0) < num_others and time.monotonic() < deadline_s:
            time.sleep(0.02)
        raise
    world.store.set(key, pickle.dumps(result))  # type: ignore[arg-type]
    return result


def _sources_here(job: Job) -> tuple[Source, ...]:
    """Return the data of this machine, having checked that it sees the run folder of rank 0."""
    if not (job.folder / "config.toml").is_file():
        raise CheckpointError(
            f"{socket.gethostname()} does not see the run folder {job.folder} that rank 0 made: name a --folder on a "
            "file system that all machines share"
        )
    data = job.run.data
    sources = prepare_sources(data, load_tokenizer(data.tokenizer), job.run.train.sequence)
    for mine, of_rank_0 in zip(sources, job.sources, strict=True):
        if mine.tokens.digest != of_rank_0.tokens.digest:
            raise DataError(
                f"{mine.name} on {socket.gethostname()} differs from that of rank 0: give every machine the same data"
            )
    return sources
