"""Runs the ranks of `terrace train`: started here, or joined under a launcher."""

import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from terrace.base.errors import CheckpointError, ConfigError, DataError, TrainingError
from terrace.cli.checks import check_devices_here, check_memory_here
from terrace.cli.first_screen import show_plan
from terrace.cli.from_memory import check_partners, check_when_asked, checks_end, chosen, offer, placed
from terrace.cli.job_text import job_text, read_job, read_sources, section_digests, sources_text
from terrace.cli.joined import JOIN_TIMEOUT_S, check_local, check_world, one_makes, together
from terrace.cli.output import Terminated, outlive_output, printable_output, sigterm_raises
from terrace.cli.prepare import CompleteError, goes_on, prepare, say_complete
from terrace.cli.screen import Screen
from terrace.data.batches import Source
from terrace.data.eval_batches import EvalSource
from terrace.data.prepared import prepare_eval_sources, prepare_sources
from terrace.data.tokenizer import load_tokenizer
from terrace.launch.rank_log import FOLDER, rank_log
from terrace.launch.refusals import refusals_told
from terrace.launch.start import join, launch_local, local_devices, pace, world_size
from terrace.launch.stop import Stop
from terrace.launch.world import World, store_lost
from terrace.plan.partners import one_machine
from terrace.probe.machine import memory_bytes
from terrace.train.config import RunConfig
from terrace.train.job import RunJob
from terrace.train.loop import train
from terrace.train.metrics import Silent

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
            job = joined_job(world, config, folder, resume, going_on)
            if job is not None:
                if world.rank == 0:
                    print(changes, end="\n" * bool(changes))
                    show_plan(job, verbose)
                job = _with_sources(world, job)
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
        job = prepare(config, folder, resume, going_on)
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


def joined_job(
    world: World, config: RunConfig, folder: Path | None, resume: Path | None, going_on: bool
) -> RunJob | None:
    """The job of this rank in a launcher's world; None if nothing is left to train. Every rank calls this."""
    here = offer(world, folder)

    def prepare_here() -> str:
        with checks_end(world):
            check_world(world, config.cluster)
            is_new = resume is None and not (going_on and folder is not None and (folder / "config.toml").is_file())
            check_partners(world, config, is_new)
            memory = chosen(world, folder, here) if going_on and folder is not None and here is not None else None
        try:
            return job_text(prepare(config, folder, resume, going_on, memory))
        except CompleteError as complete:
            say_complete(complete, going_on)
            return ""

    if world.rank != 0:
        check_when_asked(world, here)
    text = one_makes(world, "job", world.rank == 0, prepare_here)
    return placed(read_job(text), here, world) if text else None


def _with_sources(world: World, job: RunJob) -> RunJob:
    # Token caches may be local to a machine: its first rank opens or builds them.
    host = world.hosts[world.rank]
    first = world.hosts.index(host) == world.rank
    text = one_makes(world, f"tokens/{host}", first, lambda: sources_text(*_sources_here(job)))
    sources, eval_sources = read_sources(text)
    return replace(job, sources=sources, eval_sources=eval_sources)


def _run_joined(world: World, job: RunJob, verbose: bool) -> None:
    signal_name = run_rank(world, job, verbose)
    dist.destroy_process_group()
    if signal_name is not None and world.rank != 0:
        sys.exit(128 + signal.SIGINT if signal_name == "SIGINT" else 128 + signal.SIGTERM)  # rank 0 says why
    _end(signal_name, job)


def _end(signal_name: str | None, job: RunJob) -> None:
    if signal_name is not None:
        raise Terminated(signal_name, job.again())


def _sources_here(job: RunJob) -> tuple[tuple[Source, ...], tuple[EvalSource, ...]]:
    # Once per machine: its run folder and its data must be rank 0's.
    if not (job.folder / "config.toml").is_file():
        raise CheckpointError(
            f"{socket.gethostname()} does not see the run folder {job.folder} that rank 0 made: name a --folder on a "
            "file system that all machines share"
        )
    data = job.run.data
    tokenizer, sequence = load_tokenizer(data.tokenizer, data.bos, data.eos), job.run.train.sequence
    sources = prepare_sources(data, tokenizer, sequence)
    eval_sources = prepare_eval_sources(data, tokenizer, sequence)
    # Paths may be local to machines: contents must be the same.
    for mine, of_rank_0 in zip((*sources, *eval_sources), (*job.sources, *job.eval_sources), strict=True):
        here, there = ((each.tokens.digest, each.tokens.sums_digest) for each in (mine, of_rank_0))
        if here != there:
            raise DataError(
                f"{mine.name} on {socket.gethostname()} differs from rank 0's: give every machine the same data"
            )
    return sources, eval_sources
