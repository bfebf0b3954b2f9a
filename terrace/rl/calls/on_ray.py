"""Roles on several machines as Ray actors. Only this file imports Ray.

Ray starts and places the processes and transports calls. Rows are in Ray's object store, from which ranks on any
machine fetch them. Collectives among a role's ranks use gloo and do not involve Ray.
"""

import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__
from torch.distributed.distributed_c10d import PrefixStore

from terrace.base.errors import ConfigError, HangError
from terrace.base.extras import needs
from terrace.base.own_path import safe_flags
from terrace.base.words import counted
from terrace.launch.process_pool import one_error
from terrace.launch.rendezvous import host_store, open_store
from terrace.launch.seal import Seal
from terrace.launch.socket_folder import short_folders
from terrace.launch.workers import Report, failure
from terrace.launch.world import World
from terrace.rl.calls.host import Answer, Host, Part, Task
from terrace.rl.calls.pending import Pending, Sent, checked, in_progress, overdue, seconds_left
from terrace.rl.calls.processes import GRACE_S
from terrace.rl.calls.ray_address import check_address
from terrace.rl.calls.runtime import Handle, Pool, Runtime
from terrace.rl.calls.serve import named
from terrace.rl.values.packing import Packing
from terrace.rl.values.rows import Rows

try:
    import ray
    from ray.exceptions import RayActorError
    from ray.job_config import JobConfig
    from ray.util import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ConfigError(f"RayRuntime {needs(str(error.name))}") from error

_ray: Any = ray  # not all of its functions are typed
_RAY_SOCKET = 75  # bytes that Ray appends to the path of its folder, with a margin
_REACH_S = 5.0  # for the head of a cluster to accept a connection
_START_S = 120.0  # for a rank to join its pool's world, and for Ray to find free resources


@dataclass(frozen=True)
class _Place:
    reference: Any  # an ObjectRef
    packing: Packing


class _ObjectStore:
    """A `Store` in Ray's object store, which counts references, so `drop` does nothing."""

    def keep(self, rows: Rows) -> _Place:
        packing = Packing.of(rows)
        memory = np.empty(packing.num_bytes, np.uint8)
        packing.write(rows, memory)
        return _Place(ray.put(memory), packing)

    def fetch(self, place: _Place) -> Rows:
        # Ray's buffers are read-only, which torch tensors cannot be.
        return place.packing.read(ray.get(place.reference).copy())

    def drop(self, place: _Place) -> None:
        pass

    def part(self, place: _Place, start: int, stop: int, columns: Sequence[str] = ()) -> _Place:
        return replace(place, packing=place.packing.part(start, stop, columns))


class _Actor:
    """One rank. Call order: `where`, `host` on one rank, `join`, then `run`."""

    def where(self) -> tuple[str, str]:
        return _ray.get_runtime_context().get_node_id(), _ray.util.get_node_ip_address()

    def host(self, address: str) -> int:
        """Host the pool's store. Returns its port."""
        self._store = host_store(address, 0, _START_S)
        assert isinstance(self._store, TCPStore), "whose port is known"
        return int(self._store.port)

    def join(self, rank: int, nodes: Sequence[str], address: str, port: int, secret: bytes, limit_s: float) -> None:
        """Join the pool's world; `nodes[r]` is the node of rank r."""
        self._rank, own, world = rank, nodes[rank], None
        if len(nodes) > 1:
            store = open_store(address, port, _START_S)
            group, limit = PrefixStore("group", store), timedelta(seconds=limit_s)
            dist.init_process_group("gloo", store=group, rank=rank, world_size=len(nodes), timeout=limit)
            world = World(
                rank=rank,
                world_size=len(nodes),
                local_rank=nodes[:rank].count(own),
                local_world_size=nodes.count(own),
                store=PrefixStore("world", store),
                seal=Seal(secret),
                hosts=tuple(nodes),
                machines=tuple(nodes),
            )
        self._host = Host(world, _ObjectStore())

    def run(self, task: Task) -> Answer | Report:
        """Run a task; a failure is returned as a report."""
        try:
            return self._host.run(task)
        except Exception as error:
            found = named(error, task)
            found.__cause__ = None if found is error else error
            return failure(task.number, self._rank, found)


@dataclass(eq=False, kw_only=True)
class _Rank(Pending):
    actor: Any
    address: str
    references: deque[Any] = field(default_factory=deque)  # ObjectRefs of answers, one per pending call


class RayRuntime(Runtime):
    """Pools of Ray actors, one per rank, each with `num_cpus` CPUs of the cluster at `address`.

    Without an address it is Ray's default cluster, or the one that this process has joined (`ray.init`). Ranks on one
    node are consecutive. Deadlines and errors are those of `LocalRuntime`, except that Ray does not report which signal
    killed a process, and that failures are noticed only when the controller next calls or waits. Raises `ConfigError`
    for `num_gpus` above 0: roles would not use the GPUs.
    """

    def __init__(
        self, address: str = "", *, num_cpus: float = 1.0, num_gpus: float = 0.0, timeout_s: float = 1800.0
    ) -> None:
        self._timeout_s = checked(timeout_s)
        if num_gpus:
            raise ConfigError(f"num_gpus = {num_gpus:g}: roles run on the CPU, over gloo, so leave GPUs to others")
        super().__init__(_ObjectStore())
        self._resources = {"CPU": num_cpus}
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            _join_cluster(address)
        elif address:
            raise ConfigError(f"address = {address!r}, and this process has joined a Ray cluster already: leave it out")
        self._groups: list[Any] = []
        self._ranks: list[list[_Rank]] = []  # by pool
        self._error: Exception | None = None
        self._stores: list[TCPStore] = []

    def meeting(self) -> tuple[str, int]:
        """A new store on this process's node."""
        address = str(_ray.util.get_node_ip_address())
        store = host_store(address, 0, self._timeout_s)
        assert isinstance(store, TCPStore), "whose port is known"
        self._stores.append(store)
        return address, int(store.port)

    def _open(self, pool: Pool) -> None:
        self._check()
        wanted = {name: number for name, number in self._resources.items() if number}
        group = placement_group([wanted] * pool.num_ranks, strategy="PACK")
        self._groups.append(group)
        if not group.wait(_START_S):
            free = ", ".join(
                f"{number:g} {name}" for name, number in _ray.available_resources().items() if name in wanted
            )
            raise ConfigError(
                f"Ray has no room for a pool of {counted(pool.num_ranks, 'rank')} with {wanted} each within "
                f"{_START_S:g} s: {free or 'nothing'} free"
            )
        scheduling = PlacementGroupSchedulingStrategy(group)
        actor = _ray.remote(_Actor).options(num_cpus=self._resources["CPU"], scheduling_strategy=scheduling)
        actors = [actor.remote() for _ in range(pool.num_ranks)]
        places = ray.get([each.where.remote() for each in actors])
        nodes = [node for node, _ in places]
        # Ranks of a node are consecutive; nodes are in order of first appearance.
        order = sorted(range(pool.num_ranks), key=lambda index: nodes.index(nodes[index]))
        address, secret = places[order[0]][1], Seal.fresh().secret
        port = ray.get(actors[order[0]].host.remote(address)) if pool.num_ranks > 1 else 0
        ordered = [nodes[index] for index in order]
        joins = [
            actors[index].join.remote(rank, ordered, address, port, secret, self._timeout_s)
            for rank, index in enumerate(order)
        ]
        ray.get(joins)
        self._ranks.append(
            [
                _Rank(pool=pool.index, rank=rank, actor=actors[index], address=places[index][1])
                for rank, index in enumerate(order)
            ]
        )

    def send(self, pool: Pool, tasks: Sequence[Task], handle: Handle, given: Sequence[Handle]) -> None:
        self.collect(0.0)
        sent = Sent(tasks[0].name, handle, given)
        for task, rank in zip(tasks, self._ranks[pool.index], strict=True):
            rank.references.append(rank.actor.run.remote(task))
            rank.add(sent)

    def collect(self, timeout_s: float | None) -> None:
        self._check()
        busy = {rank.references[0]: rank for ranks in self._ranks for rank in ranks if rank.calls}
        if not busy:
            return
        limit_s = seconds_left(busy.values(), self._timeout_s)
        patience_s = max(0.0, limit_s if timeout_s is None else min(timeout_s, limit_s))
        ready, _ = ray.wait(list(busy), timeout=patience_s)
        for each in ready:
            found = _found(each)
            if not isinstance(found, Answer):
                self._fail(busy[each], found)
            else:
                busy[each].references.popleft()
                busy[each].take(found)
        if not ready and limit_s <= patience_s:
            late, words = overdue(busy.values(), self._timeout_s)
            if late:
                self._end(HangError(words))

    def _fail(self, first: _Rank, found: Report | None) -> NoReturn:
        """Raise a pool's first failure, after giving its other ranks `GRACE_S` to report theirs."""
        reports, deaths = list[Report](), list[str]()
        ranks = self._ranks[first.pool]
        doing = in_progress(self.pools[first.pool].roles, ranks)
        others = {rank.references[0]: rank for rank in ranks if rank.calls and rank is not first}
        ready, _ = ray.wait(list(others), num_returns=len(others), timeout=GRACE_S) if others else ([], [])
        for rank, outcome in [(first, found), *((others[each], _found(each)) for each in ready)]:
            if isinstance(outcome, Report):
                reports.append(outcome)
            elif outcome is None:
                deaths.append(f"the process of rank {rank.rank} on {rank.address} died")
        error = one_error(reports, deaths)
        self._end(HangError(f"{error}; {doing}") if isinstance(error, HangError) else error)

    def forget(self, part: Part) -> None:
        """Does nothing: Ray counts references."""

    def close(self) -> None:
        """End all actors, and leave the cluster if this runtime joined it."""
        if self._error is None:
            with suppress(ConfigError):
                self._end(ConfigError("the runtime is closed: make another one"))
        if self._is_ours and ray.is_initialized():
            ray.shutdown()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _end(self, error: Exception) -> NoReturn:
        self._error = error
        for rank in (each for ranks in self._ranks for each in ranks):
            ray.kill(rank.actor)
        for group in self._groups:
            remove_placement_group(group)
        raise error


def _join_cluster(address: str) -> None:
    """Join Ray's cluster; raises `ConfigError` if there is none (Ray itself would wait for minutes and then exit)."""
    if address:
        check_address(address)
    host, _, port = address.rpartition(":")
    try:
        if host:
            socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
        _init(address)
    except (OSError, OverflowError, ValueError) as error:  # a port beyond the largest overflows
        place = repr(address) if address else "this machine"
        raise ConfigError(f"no Ray cluster at {place} ({error}): start one with ray start --head") from error


def _init(address: str) -> None:
    # Ray puts the working folder first on its workers' sys.path, except for client jobs.
    job: Any = JobConfig(_client_job=True) if safe_flags() else None
    try:
        ray.init(address=address or None, log_to_driver=False, job_config=job)
    except (OSError, ValueError) as error:
        # When Ray starts a cluster, its socket paths are much longer than TMPDIR and may exceed the limit.
        folders = short_folders(_RAY_SOCKET) if "AF_UNIX" in str(error) else []
        if not folders:
            raise
        ray.init(address=address or None, log_to_driver=False, job_config=job, _temp_dir=str(folders[0] / "ray"))


def _found(reference: Any) -> Answer | Report | None:
    try:
        found = ray.get(reference)
    except RayActorError:
        return None
    assert isinstance(found, (Answer, Report))
    return found
