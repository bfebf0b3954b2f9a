"""Preparation steps that a command's ranks take together after joining, and limits checked before they start."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from terrace.base import errors
from terrace.base.errors import ConfigError, HangError, TerraceError, first_line
from terrace.base.words import were
from terrace.cluster.cluster import Cluster
from terrace.launch.machines import check_tiers
from terrace.launch.world import World
from terrace.train.planned import torchrun

JOIN_TIMEOUT_S = 600.0  # machines of one job may start minutes apart
_PREPARE_LIMIT_S = 24 * 3600.0  # a large corpus takes hours to tokenise; a rank that dies ends the job
_HEARD_S = 10.0  # enough for ranks that only read a key
_MAX_LOCAL_RANKS = 64  # a process takes some 200 MB: more than this on one machine is surely a mistake

_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.02, 1.0
_REFUSED, _READY = "prepare/refused", "prepare/ready"  # in the store


def check_local(cluster: Cluster) -> None:
    """Raises `ConfigError` for a cluster with more ranks than one machine may start."""
    if cluster.world_size > _MAX_LOCAL_RANKS:
        raise ConfigError(
            f"cluster {cluster.name!r} has {cluster.world_size} ranks, and one machine starts at most "
            f"{_MAX_LOCAL_RANKS} as local processes: start it on the cluster, as {torchrun(cluster, 'train ...')} (or "
            "srun terrace train ...), or resize a tier, for example "
            f"--cluster.tiers.{cluster.tiers[-1].name}.size 1"
        )


def check_world(world: World, cluster: Cluster) -> None:
    """Raises `ConfigError` unless the launcher's ranks match the cluster, in number and by machine."""
    if world.world_size != cluster.world_size:
        raise ConfigError(
            f"{were(world.world_size, 'rank')} started, but cluster {cluster.name!r} has "
            f"{cluster.world_size}: start {cluster.world_size}, or resize a tier, for example "
            f"--cluster.tiers.{cluster.tiers[-1].name}.size N"
        )
    check_tiers(world.machines, [(tier.name, tier.size) for tier in cluster.tiers])


@contextmanager
def together(world: World) -> Iterator[None]:
    """Context manager for preparations on all ranks: either all of them leave the body, or none does and rank 0 reports
    why.

    If one rank fails, the others end at their next wait, in `one_makes` or at the end of the body. Rank 0 raises the
    same error with the rank's name; the others exit. No watchdog runs yet: if a rank is killed, the launcher ends the
    job.
    """
    try:
        yield
    except SystemExit:  # of another rank's error
        raise
    except BaseException as error:
        with suppress(RuntimeError):  # the store is gone
            # Only the first error counts: later ones may follow from it.
            world.store.compare_set(_REFUSED, "", world.seal.close(_REFUSED, json.dumps(_as_told(world, error))))
            _wait_until_heard(world)
        raise
    world.store.add(_READY, 1)
    _wait_for(lambda: _is_refused(world) or int(world.store.add(_READY, 0)) >= world.world_size)
    _end_if_refused(world)


def awaited(world: World, key: str, of: str = "another rank", limit_s: float = _PREPARE_LIMIT_S) -> str:
    """Waits for the text under `key`, written by `of`. Inside `together`; an error of another rank ends the wait."""
    _wait_for(lambda: world.store.check([key]) or _is_refused(world), limit_s)
    _end_if_refused(world)
    return world.seal.open(key, bytes(world.store.get(key)), of)


def one_makes(world: World, key: str, mine: bool, make: Callable[[], str]) -> str:
    """Calls `make` on the rank with `mine` set, and broadcasts its text through the store. Inside `together`.

    Raises `ConfigError` for a text that no rank of this run wrote.
    """
    if mine:
        made = make()
        world.store.set(key, world.seal.close(key, made))
        return made
    return awaited(world, key)


def _is_refused(world: World) -> bool:
    return bool(world.store.check([_REFUSED]))


def _end_if_refused(world: World) -> None:
    if not _is_refused(world):
        return
    name, message = json.loads(world.seal.open(_REFUSED, bytes(world.store.get(_REFUSED))))
    # Acknowledged, so that the refusing rank may end and take the store with it.
    world.store.add(f"{_REFUSED}/heard", 1)
    if world.rank != 0:
        sys.exit(2)
    if world.store_rank == 0:
        _wait_until_heard(world)
    kind = getattr(errors, name, None)
    raise (kind if isinstance(kind, type) and issubclass(kind, TerraceError) else HangError)(message)


def _wait_until_heard(world: World) -> None:
    _wait_for(lambda: int(world.store.add(f"{_REFUSED}/heard", 0)) >= world.world_size - 1, _HEARD_S)


def _as_told(world: World, error: BaseException) -> tuple[str, str]:
    """Class name of an error, and its message with the rank's name."""
    text = str(error) if isinstance(error, TerraceError) else first_line(error)
    where = f" on {world.hosts[world.rank]}" if world.hosts else ""
    return type(error).__name__, f"{text} (rank {world.rank}{where})"


def _wait_for(is_over: Callable[[], object], limit_s: float = _PREPARE_LIMIT_S) -> None:
    begin_s = time.monotonic()
    while not is_over() and (waited_s := time.monotonic() - begin_s) < limit_s:
        # A large corpus is prepared for hours, by one rank while thousands ask.
        time.sleep(min(_LONGEST_POLL_S, max(_SHORTEST_POLL_S, waited_s / 20)))
