"""The store of a world, and the rendezvous of its ranks under a launcher.

Torchrun's agents keep one store over restarts, and their restart counts differ between machines. So ranks agree on a
name space for each lifetime of the world instead of deriving it: every rank sends a join request (a fresh token and its
facts), rank 0 answers each token with the name space, and gives the go-ahead when all have joined.
"""

import ipaddress
import json
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # public, not in __all__
from torch.distributed.distributed_c10d import Store

from terrace.base.errors import ConfigError, HangError, TerraceError
from terrace.base.schema import load
from terrace.launch.machines import Facts, arrange, check_same_code, machine_map, names_of, other_configurations
from terrace.launch.postmortem import in_words
from terrace.launch.seal import Seal

_T = TypeVar("_T")

_POLL_S = 0.02
_LAST_PORT = 65535
_BACKLOG = 4096  # ranks that may connect at once
_RESOLVE_S = 10.0  # a name may be new, as a pod's is
_QUIET_S = 5.0
_AGENT_S = 10.0  # torchrun's store has answered before the ranks start
_RECEIVED_S = 10.0


def host_store(address: str, port: int, timeout_s: float) -> Store:
    """Starts the store's server, and returns a client of it. Port 0 takes a free port.

    For a loopback address it listens only there, whereas torch's own server listens on every interface. Raises
    `ConfigError` for a port that is in use or invalid.
    """
    own = _loopback(address)
    try:
        if own is not None:
            family = socket.AF_INET6 if ":" in own else socket.AF_INET
            listener = socket.create_server((own, port), family=family, backlog=_BACKLOG)
        elif socket.has_dualstack_ipv6():
            listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        else:
            listener = socket.create_server(("", port), backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {own or 'all interfaces'}, port {port}, for the ranks of the run: {error}; under a "
            "launcher set MASTER_PORT to a free port, from 1024 to 65535"
        ) from error
    return TCPStore(
        own or "127.0.0.1",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def open_store(
    address: str,
    port: int,
    timeout_s: float,
    say: Callable[[str], None] = lambda text: None,
    *,
    agent_hosts: bool = False,
) -> Store:
    """Connects to the store at `address`, whose server may start up to `timeout_s` late.

    With `agent_hosts` the server is torchrun's, which runs before the ranks, so the limit is a few seconds. `say` gets
    a line after some seconds without an answer. Raises `ConfigError` for an address that does not resolve, and
    `HangError` if nothing answers, or something that is not a store.
    """
    begin_s, reported = time.monotonic(), False
    if not 1 <= port <= _LAST_PORT:
        raise ConfigError(f"MASTER_PORT={port} is no port: set it to that of rank 0, from 1 to {_LAST_PORT}")
    while True:
        late_s = time.monotonic() - begin_s
        try:
            # Torch's client would print pages of warnings while it waits.
            socket.create_connection((address, port), timeout=max(1.0, min(_QUIET_S, timeout_s))).close()
            break
        except (socket.gaierror, UnicodeError) as error:
            if late_s > _RESOLVE_S:
                raise ConfigError(
                    f"MASTER_ADDR={address!r} does not resolve: {error}; set it to rank 0's host name or IP address"
                ) from error
        except OSError as error:
            if agent_hosts and late_s > _AGENT_S:
                raise HangError(
                    f"torchrun does not answer at {address}:{port} ({error}), where it hosts the store of its ranks: "
                    "it has ended"
                ) from error
            if late_s > timeout_s:
                raise HangError(
                    f"nothing answers at {address}:{port} within {timeout_s:g} s ({error}): start rank 0 there, or "
                    "correct MASTER_ADDR and MASTER_PORT"
                ) from error
            if late_s > _QUIET_S and not reported:
                reported = True
                say(f"waiting up to {timeout_s:g} s for rank 0 at {address}:{port} ({error.strerror or error})")
        time.sleep(0.2)
    try:
        return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except DistError as error:
        raise HangError(
            f"what answers at {address}:{port} is not the store of rank 0, or rank 0 has just ended "
            f"({str(error).partition(chr(10))[0]}): see rank 0's output, or set MASTER_PORT to a port of its own"
        ) from error


def _loopback(address: str) -> str | None:
    # The address itself: 127.0.1.1 and ::1 are other addresses than 127.0.0.1. None: it is to be reached from outside.
    if address == "localhost":
        return "127.0.0.1"
    try:
        return address if ipaddress.ip_address(address).is_loopback else None
    except ValueError:
        return None


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Outcome for a rank: the name space of this lifetime, its seal and number, and where all ranks are."""

    namespace: str
    seal: Seal
    rank: int
    local_world_size: int  # ranks on this machine
    hosts: tuple[str, ...]
    machines: tuple[str, ...]
    map: str  # which ranks run where
    notes: tuple[str, ...] = ()


def _appears(store: Store, key: str, timeout_s: float) -> bool:
    begin_s = time.monotonic()
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except dist.DistError:
        # A lost store fails at once.
        if time.monotonic() - begin_s < timeout_s / 2:
            raise
        return False
    return True


@dataclass(frozen=True)
class _JoinRequest:
    token: str
    facts: Facts = field(default_factory=lambda: Facts(""))
    refusal: str = ""  # why this rank cannot take part


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    refused: bool
    ranks: tuple[int, ...] = ()  # new number of every rank, by the launcher's
    hosts: tuple[str, ...] = ()  # of the ranks, by their new numbers
    machines: tuple[str, ...] = ()


def join_ranks(
    store: Store,
    rank: int,
    world_size: int,
    facts: Facts | TerraceError,
    seal: Seal,
    timeout_s: float,
    *,
    renumber: bool,
    say: Callable[[str], None] = lambda text: None,
    late: str = "",
) -> Rendezvous:
    """Meets the other ranks. Every rank calls this with the number that the launcher gave it.

    A rank that cannot take part passes its error in place of its facts, and raises it once rank 0 has received it.
    Ranks that do not join within seconds are named in a line for `say`, with the advice `late`.

    With `renumber`, ranks get new numbers if the launcher's numbers separate the ranks of a machine. Raises
    `ConfigError` on rank 0, and `SystemExit` on the others, for ranks that cannot take part, run other code, share a
    device or may not be renumbered; `ConfigError` for a rank without the run's secret; `HangError` for ranks that do
    not come within `timeout_s`.
    """
    if rank == 0:
        return _Host(store, world_size, seal, timeout_s, say, late).join_ranks(facts, renumber)
    token, timeout, begin_s = uuid.uuid4().hex, timedelta(seconds=timeout_s), time.monotonic()
    if isinstance(facts, TerraceError):
        request = _JoinRequest(token, refusal=f"{facts} (rank {rank} on {socket.gethostname()})")
    else:
        request = _JoinRequest(token, facts)
    store.set(f"request/{rank}", seal.close(f"request/{rank}", _text(request)))
    store.add("requests", 1)
    try:
        if not _appears(store, f"answer/{token}", min(_QUIET_S, timeout_s)):
            say(f"rank {rank} waits up to {timeout_s:g} s for rank 0")
            store.wait([f"answer/{token}"], timeout)
        namespace = seal.open(f"answer/{token}", bytes(store.get(f"answer/{token}")), "rank 0")
        inner = seal.within(namespace)
        store.set(f"{namespace}/in/{rank}", inner.close(f"in/{rank}", token))
        store.add(f"{namespace}/in", 1)
        store.wait([f"{namespace}/outcome"], timeout)
        outcome = _read(_Outcome, inner.open("outcome", bytes(store.get(f"{namespace}/outcome"))))
    except dist.DistError as error:
        waited_s = time.monotonic() - begin_s
        if waited_s < timeout_s:
            raise HangError(f"rank 0 ended before rank {rank} had joined; its own output says why") from error
        raise HangError(f"rank {rank} waited {timeout_s:g} s for rank 0 to gather the world") from error
    if outcome.refused:
        # Acknowledged, so that rank 0 may end and take the store with it; the reason is printed there, once.
        store.add(f"{namespace}/received", 1)
        raise facts if isinstance(facts, TerraceError) else SystemExit(2)
    return _joined(namespace, inner, rank, outcome)


class _Host:
    def __init__(
        self, store: Store, world_size: int, seal: Seal, timeout_s: float, say: Callable[[str], None], late: str
    ) -> None:
        self._store, self._world_size, self._timeout_s = store, world_size, timeout_s
        self._say, self._advice = say, f": {late}" * bool(late)
        self._seal, self._namespace = seal, uuid.uuid4().hex
        self._inner = seal.within(self._namespace)
        self._raws: dict[int, bytes] = {}
        self._requests: dict[int, _JoinRequest] = {}

    def join_ranks(self, own: Facts | TerraceError, renumber: bool) -> Rendezvous:
        try:
            if isinstance(own, TerraceError):
                self._answer_all()
                raise own
            facts = [own, *self._gathered()]
            check_same_code(facts)
            hosts, machines = names_of(facts)
            ranks = arrange(machines, [each.numa for each in facts] if renumber else ())
            if ranks != list(range(self._world_size)) and not renumber:
                raise ConfigError(
                    f"the ranks of a machine are not neighbours ({machine_map(machines)}): start one machine's ranks "
                    "after the other's (srun --distribution=block, mpirun --map-by slot)"
                )
        except TerraceError:
            self._refuse()
            raise
        order = sorted(range(self._world_size), key=ranks.__getitem__)
        there = tuple(hosts[old] for old in order), tuple(machines[old] for old in order)
        outcome = _Outcome(refused=False, ranks=tuple(ranks), hosts=there[0], machines=there[1])
        self._publish(outcome)
        return _joined(self._namespace, self._inner, 0, outcome, other_configurations(facts))

    def _gathered(self) -> list[Facts]:
        num_seen, reported, begin_s = 0, False, time.monotonic()
        while self._store.add(f"{self._namespace}/in", 0) < self._world_size - 1 or not self._all_in():
            # One counter is polled between join requests, not a key per rank.
            num_requests = self._store.add("requests", 0)
            if num_requests != num_seen:
                num_seen = num_requests
                self._answer()
            for rank, request in self._requests.items():
                # Only from a rank of this lifetime, which has received the answer.
                if request.refusal and self._is_in(rank):
                    raise ConfigError(request.refusal)
            waited_s = time.monotonic() - begin_s
            if waited_s > min(_QUIET_S, self._timeout_s) and not reported:
                reported = True
                self._say(f"rank 0 waits up to {self._timeout_s:g} s for {self._absent()}{self._advice}")
            if waited_s > self._timeout_s:
                raise HangError(f"{self._absent()} did not join the world within {self._timeout_s:g} s{self._advice}")
            time.sleep(_POLL_S)
        return [self._requests[rank].facts for rank in range(1, self._world_size)]

    def _answer_all(self) -> None:
        # For ranks that come within seconds: without an answer they would wait for a rank 0 that has ended.
        deadline_s = time.monotonic() + _QUIET_S
        while len(self._requests) < self._world_size - 1 and time.monotonic() < deadline_s:
            self._answer()
            time.sleep(_POLL_S)

    def _absent(self) -> str:
        absent = set(range(1, self._world_size)) - set(self._requests)
        return in_words(absent) if absent else "a rank that asked to join earlier and died"

    def _all_in(self) -> bool:
        # The counter may count a rank twice that died and asked again, so each rank's own word is read at the end.
        return all(self._is_in(rank) and not self._requests[rank].refusal for rank in range(1, self._world_size))

    def _is_in(self, rank: int) -> bool:
        request, key = self._requests.get(rank), f"in/{rank}"
        if request is None or not self._store.check([f"{self._namespace}/{key}"]):
            return False
        return (
            self._inner.open(key, bytes(self._store.get(f"{self._namespace}/{key}")), f"rank {rank}") == request.token
        )

    def _answer(self) -> None:
        # Keys of an earlier lifetime answer no fresh token, so they cannot be mistaken for current ones.
        for rank in range(1, self._world_size):
            key = f"request/{rank}"
            raw = bytes(self._store.get(key)) if self._store.check([key]) else b""
            # A rank that died and was restarted sends a join request again with another token.
            if raw and self._raws.get(rank) != raw:
                self._raws[rank] = raw
                self._requests[rank] = _read(_JoinRequest, self._seal.open(key, raw, f"rank {rank}"))
                answer = f"answer/{self._requests[rank].token}"
                self._store.set(answer, self._seal.close(answer, self._namespace))

    def _refuse(self) -> None:
        self._publish(_Outcome(refused=True))
        # The store may be in this process, so it stays until the ranks have read their answers.
        deadline_s = time.monotonic() + _RECEIVED_S
        while self._store.add(f"{self._namespace}/received", 0) < len(self._requests) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)

    def _publish(self, outcome: _Outcome) -> None:
        self._store.set(f"{self._namespace}/outcome", self._inner.close("outcome", _text(outcome)))


def _joined(namespace: str, seal: Seal, rank: int, outcome: _Outcome, notes: Sequence[str] = ()) -> Rendezvous:
    new = outcome.ranks[rank]
    started = sorted(range(len(outcome.ranks)), key=outcome.ranks.__getitem__)
    return Rendezvous(
        namespace=namespace,
        seal=seal,
        rank=new,
        local_world_size=outcome.hosts.count(outcome.hosts[new]),
        hosts=outcome.hosts,
        machines=outcome.machines,
        map=machine_map(outcome.machines, started),
        notes=tuple(notes),
    )


def _text(value: Any) -> str:
    return json.dumps(asdict(value))


def _read(cls: type[_T], text: str) -> _T:
    return load(cls, json.loads(text), "the rendezvous of the ranks")
