"""Runs the ranks of `terrace train`: started here, or joined under a launcher."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from terrace.base.errors import ConfigError, TrainingError
from terrace.cli.checks import check_devices_here, check_memory_here
from terrace.cli.first_screen import show_plan
from terrace.cli.output import Terminated, outlive_output, printable_output, sigterm_raises
from terrace.cli.screen import Screen
from terrace.cli.step_progress import passing_lines
from terrace.launch.rank_log import FOLDER, rank_log
from terrace.launch.refusals import refusals_told
from terrace.launch.start import join, launch_local, local_devices, pace, world_size
from terrace.launch.stop import Stop
from terrace.launch.world import World, store_lost
from terrace.plan.partners import one_machine
from terrace.probe.machine import memory_bytes
from terrace.train.config import RunConfig
from terrace.train.job import RunJob, section_digests
from terrace.train.joined import JOIN_TIMEOUT_S, check_local, together
from terrace.train.loop import train
from terrace.train.metrics import Silent
from terrace.train.prepare import joined_job, prepare, with_sources
from terrace.train.run_folder import CompleteError, goes_on, say_complete

Fit = Callable[[int], tuple[RunConfig, str]]  # number of ranks -> (run fitted to them, description of the changes)


def run(
    config: RunConfig,
    *,
    folder: Path | None,
    resume: Path | None,
    going_on: bool = False,
    verbose: bool = False,
    fit: Fit,
) -> None:
    """Trains with local processes, or as one rank of a launcher's world.

    With `going_on`, or if a launcher restarts its ranks, an existing run in `folder` is continued. In that case, and
    with `resume`, `fit` adapts the run to the number of started ranks. `verbose` prints tables at the start.
    """
    # Ranks note it in their run's folder; this process may have none yet.
    outlive_output(lambda words: print(f"terrace: {words}", file=sys.stderr, flush=True))
    going_on = goes_on(folder, resume, going_on)
    changes, num_ranks = "", world_size()
    with refusals_told():
        pace()  # refuses a bad TERRACE_PACE before anything is made
        # A fresh run must match the launcher's ranks exactly; only a resumed one is fitted.
        if num_ranks is not None and (going_on or resume is not None):
            config, changes = fit(num_ranks)
    if num_ranks is not None:
        world = join(timeout_s=JOIN_TIMEOUT_S, sections=section_digests(config))
        with store_lost(), together(world):
            with passing_lines() as say:
                job = joined_job(world, config, folder, resume, going_on, say)
            if job is not None:
                if world.rank == 0:
                    print(changes, end="\n" * bool(changes))
                    show_plan(job, verbose)
                job = with_sources(world, job)
        if job is not None:
            _run_joined(world, job, verbose)
        return
    if config.train.peer_copies:
        raise ConfigError(one_machine(()))
    check_local(config.cluster)
    devices = local_devices()
    if pace() is None:  # a paced run emulates the cluster on purpose
        check_devices_here(config, len(devices))
    check_memory_here(config, devices, memory_bytes())
    try:
        with passing_lines() as say:
            job = prepare(config, folder, resume, going_on, say=say)
    except CompleteError as complete:
        say_complete(complete, going_on)
        return
    show_plan(job, verbose)
    with sigterm_raises():
        # The parent only waits. A signal is passed on to the ranks, which stop after the same step, or at once before
        # the first.
        _end(launch_local(config.cluster.world_size, run_rank, (job, verbose), stoppable=True), job)


def run_rank(world: World, job: RunJob, verbose: bool = False) -> str | None:
    """Runs one rank; rank 0 prints. Returns the name of the signal that ended the run, or None.

    Top-level, so that a child process can import it.
    """
    try:
        with rank_log(_log_of(world.rank, job)), printable_output():
            outlive_output(lambda words: None)  # rank 0's screen notes it
            end = train(world, job, Screen(job, verbose) if world.rank == 0 else Silent())
        return end.text if isinstance(end, Stop) else None
    except BrokenPipeError as error:
        raise TrainingError(
            "the output's reader is gone, so the run ended; send output to a file, and resume with --resume "
            f"{job.folder} if it has a checkpoint"
        ) from error


def _log_of(rank: int, job: RunJob) -> Path | None:
    # Rank 0's output goes to the screen.
    return job.folder / FOLDER / f"rank-{rank:05d}.log" if rank and job.run.train.rank_logs else None


def _run_joined(world: World, job: RunJob, verbose: bool) -> None:
    signal_name = run_rank(world, job, verbose)
    dist.destroy_process_group()
    if signal_name is not None and world.rank != 0:
        sys.exit(128 + signal.SIGINT if signal_name == "SIGINT" else 128 + signal.SIGTERM)  # rank 0 says why
    _end(signal_name, job)


def _end(signal_name: str | None, job: RunJob) -> None:
    if signal_name is not None:
        raise Terminated(signal_name, job.again())
