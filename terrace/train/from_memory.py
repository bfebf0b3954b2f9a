"""Restores from copies in the memory of machines when a run starts: hosts list their files, rank 0 chooses.

every host      lists of the files in its memory -> store
rank 0          newest step of which all boxes are listed -> store
every host      check its files of that step against their checksums -> store: the damaged ones
rank 0          are all boxes still there? the manifest goes into the job; else the step before it
every host      links its files into the checkpoint's folder; missing ones follow once engines are ready
                (terrace.checkpoint.peer_copies.gather_files)
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

from terrace.base.errors import CheckpointError, ConfigError
from terrace.base.schema import dump, load
from terrace.checkpoint.memory import Held, held, in_memory, memory_folder, newest, place, run_id, without
from terrace.checkpoint.reading import Checkpoint
from terrace.launch.world import World
from terrace.plan.partners import find_partners, one_machine
from terrace.train.config import RunConfig
from terrace.train.job import RunJob
from terrace.train.joined import awaited

_LONGEST_S = 1800.0  # to check the files of a machine


@dataclass(frozen=True, kw_only=True)
class _Told:
    copies: tuple[str, ...] = ()  # manifests
    damaged: tuple[str, ...] = ()  # files of the requested copy
    wrong: tuple[str, ...] = ()  # lines about damage


def check_partners(world: World, run: RunConfig, is_new: bool) -> None:
    """Raises `ConfigError` for a new run with `train.peer_copies` whose ranks have no partners on other machines."""
    sizes = [tier.size for tier in run.cluster.tiers]
    if is_new and run.train.peer_copies and find_partners(sizes, world.machines) is None:
        raise ConfigError(one_machine(world.machines))


def offer(world: World, run_folder: Path | None) -> Held | None:
    """Reports this host's copies to rank 0, and returns them on the host's first rank. Every rank calls this."""
    host = world.hosts[world.rank]
    if world.hosts.index(host) != world.rank:
        return None
    run = "" if run_folder is None else run_id(run_folder)
    here = held(memory_folder(run, run_folder, host)) if run and run_folder is not None else Held(folder=Path())
    _tell(world, 0, _Told(copies=here.copies, wrong=here.wrong))
    return here


@contextmanager
def checks_end(world: World) -> Iterator[None]:
    """On rank 0, around `chosen`: releases the other hosts from `check_when_asked`, whatever is raised."""
    try:
        yield
    finally:
        _ask(world, "")


def check_when_asked(world: World, here: Held | None) -> None:
    """Checks this host's files of each copy that rank 0 asks for, until rank 0 has chosen. Every rank but
    0 calls this.
    """
    # Only the first rank of a host reads its files.
    if here is None:
        return
    for number in count(1):
        asked = _heard(world, _question(number))
        if not asked:
            return
        _answer(world, number, here, asked)


def chosen(world: World, run_folder: Path, here: Held) -> Checkpoint | None:
    """The newest checkpoint in the memory of all hosts together, or None. Rank 0 calls this, and reports damaged files.

    Copies are verified from the newest step backwards until one is complete. A run keeps its copies until it ends, so
    they are used even if it makes no more (`train.peer_copies = 0`).
    """
    if not run_id(run_folder):
        return None
    copies = dict[str, tuple[str, ...]]()
    for host in dict.fromkeys(world.hosts):
        told = _told(world, host)
        copies[host] = told.copies
        _name(host, told.wrong)
    folder, are_any = memory_folder(run_id(run_folder), run_folder, world.hosts[0]), any(copies.values())
    while (found := newest(chain.from_iterable(copies.values()), folder)) is not None:
        number, is_whole = _ask(world, found.text), True
        _answer(world, number, here, found.text)
        for host in copies:
            told = _told(world, host, number)
            copies[host] = without(copies[host], found.text, told.damaged)
            _name(host, told.wrong)
            is_whole = is_whole and not told.damaged
        # Without the damaged files, another host's may still complete the step.
        if is_whole:
            return found
    if are_any:
        print("no copy in the memory of the machines is whole: resuming from disk", flush=True)
    return None


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


def _ask(world: World, text: str) -> int:
    # Number of the request to check a copy; an empty text is the last request.
    number = int(world.store.add("copies/asked", 1))
    key = _question(number)
    world.store.set(key, world.seal.close(key, text))
    return number


def _answer(world: World, number: int, here: Held, text: str) -> None:
    wrong = here.check(text)
    _tell(world, number, _Told(damaged=tuple(wrong), wrong=tuple(wrong.values())))


def _tell(world: World, number: int, told: _Told) -> None:
    key = _key(world.hosts[world.rank], number)
    world.store.set(key, world.seal.close(key, json.dumps(dump(told))))


def _told(world: World, host: str, number: int = 0) -> _Told:
    return load(_Told, json.loads(_heard(world, _key(host, number), host)), f"the copies of {host}")


def _heard(world: World, key: str, host: str = "") -> str:
    return awaited(world, key, host or world.hosts[0], _LONGEST_S)


def _name(host: str, wrong: tuple[str, ...]) -> None:
    for line in wrong:
        print(f"{host}: {line}, so this copy is not used", flush=True)


def _question(number: int) -> str:
    return f"copies/asked/{number}"


def _key(host: str, number: int) -> str:
    return f"copies/{number}/{host}"
