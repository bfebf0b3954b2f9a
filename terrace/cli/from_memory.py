"""Copies in the memory of machines, at the start of a run: hosts list their files, rank 0 chooses.

every host      check the files in its memory -> store: list of those that are whole
rank 0          newest step of which all boxes are there -> manifest in the job
every host      links its files into the checkpoint's folder; missing ones follow once engines are ready
                (terrace.checkpoint.peer_copies.gather_files)
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from terrace.base.errors import CheckpointError, ConfigError
from terrace.base.schema import dump, load
from terrace.checkpoint.memory import Held, held, in_memory, memory_folder, newest, place, run_id
from terrace.checkpoint.reading import Checkpoint
from terrace.launch.world import World
from terrace.simulate.peer_copies import find_partners, one_machine
from terrace.train.config import RunConfig
from terrace.train.job import RunJob


@dataclass(frozen=True, kw_only=True)
class _Told:
    copies: tuple[str, ...] = ()  # manifests
    wrong: tuple[str, ...] = ()


def check_partners(world: World, run: RunConfig, is_new: bool) -> None:
    """Raise `ConfigError` for a new run with `train.peer_copies` whose ranks have no partners on other machines."""
    sizes = [tier.size for tier in run.cluster.tiers]
    if is_new and run.train.peer_copies and find_partners(sizes, world.machines) is None:
        raise ConfigError(one_machine(world.machines))


def offer(world: World, run_folder: Path | None) -> Held | None:
    """Tell rank 0 which copies this host holds; returns them on the host's first rank. Every rank calls this."""
    host = world.hosts[world.rank]
    if world.hosts.index(host) != world.rank:
        return None
    run = "" if run_folder is None else run_id(run_folder)
    here = held(memory_folder(run, run_folder, host)) if run and run_folder is not None else Held(folder=Path())
    told = json.dumps(dump(_Told(copies=here.copies, wrong=here.wrong)))
    world.store.set(_key(host), world.seal.close(_key(host), told))
    return here


def chosen(world: World, run_folder: Path) -> Checkpoint | None:
    """The newest checkpoint in the memory of all hosts together; rank 0 calls this and names damaged files.

    A run keeps its copies until its end, so they count also where it makes no more (`train.peer_copies = 0`).
    """
    if not run_id(run_folder):
        return None
    copies: list[str] = []
    for host in dict.fromkeys(world.hosts):
        world.store.wait([_key(host)])
        raw = world.seal.open(_key(host), bytes(world.store.get(_key(host))), host)
        told = load(_Told, json.loads(raw), f"the copies of {host}")
        copies += told.copies
        for line in told.wrong:
            print(f"{host}: {line}, so this copy is not used", flush=True)
    found = newest(copies, memory_folder(run_id(run_folder), run_folder, world.hosts[0]))
    if copies and found is None:
        print("no copy in the memory of the machines is whole: resuming from disk", flush=True)
    return found


def placed(job: RunJob, here: Held | None, world: World) -> RunJob:
    """The job with the checkpoint's folder on this host. Every rank calls this. Raises `CheckpointError`."""
    if not job.memory:
        return job
    folder = memory_folder(run_id(job.folder), job.folder, world.hosts[world.rank])
    if here is not None:
        try:
            place(replace(here, folder=folder), job.memory)
        except OSError as error:
            raise CheckpointError(
                f"{world.hosts[world.rank]} cannot use its memory folder {folder} ({error.strerror}): delete it"
            ) from error
    return replace(job, resume=in_memory(folder, job.memory).folder)


def _key(host: str) -> str:
    return f"copies/{host}"
