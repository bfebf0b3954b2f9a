"""Ranks meet in a store: they get their numbers, their machines and a seal, or one line that says why not."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistNetworkError, HashStore  # type: ignore[attr-defined]  # public, not in __all__

from terrace.base.errors import ConfigError, HangError
from terrace.launch.machines import Facts
from terrace.launch.rendezvous import Rendezvous, host_store, join_ranks, open_store
from terrace.launch.seal import Seal
from terrace.launch.world import store_lost

VERSIONS = {"torch": "2.13"}


def met(
    facts: list[Facts], seals: list[Seal] | None = None, *, renumber: bool = True, limit_s: float = 20.0
) -> list[Any]:
    """Outcome of every rank, a thread each: a `Rendezvous` or an exception."""
    store, found = HashStore(), list[Any](facts)
    secrets = seals or [Seal.fresh()] * len(facts)

    def rank_of(rank: int) -> None:
        try:
            found[rank] = join_ranks(store, rank, len(facts), facts[rank], secrets[rank], limit_s, renumber=renumber)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(len(facts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def test_ranks_in_cyclic_order_get_new_numbers() -> None:
    found = met([Facts(host, versions=VERSIONS) for host in "abab"])
    assert all(isinstance(each, Rendezvous) for each in found)
    assert [each.rank for each in found] == [0, 2, 1, 3]
    assert {each.hosts for each in found} == {("a", "a", "b", "b")}
    assert {each.local_world_size for each in found} == {2}
    assert len({each.namespace for each in found}) == 1
    assert found[3].seal.open("x", found[0].seal.close("x", "y").encode()) == "y"
    assert found[0].map == "2 machines: ranks 0-1 on a (started as 0, 2), 2-3 on b (started as 1, 3)"


def test_who_may_not_be_renumbered_is_told_the_map() -> None:
    found = met([Facts(host, versions=VERSIONS) for host in "abab"], renumber=False)
    assert isinstance(found[0], ConfigError)
    assert "not neighbours (2 machines: ranks 0 on a, 1 on b, 2 on a, 3 on b)" in str(found[0])
    assert [type(each) for each in found[1:]] == [SystemExit] * 3


def test_a_rank_with_other_files_ends_the_meeting_and_is_named_once() -> None:
    facts = [Facts("a", versions=VERSIONS), Facts("b", versions={"torch": "2.12"}), Facts("b", versions=VERSIONS)]
    found = met(facts)
    assert isinstance(found[0], ConfigError)
    assert "rank 1 on b would run torch 2.12" in str(found[0])
    assert [type(each) for each in found[1:]] == [SystemExit] * 2


def test_a_rank_without_the_secret_is_named_within_seconds() -> None:
    right = Seal(b"right" * 8, "TERRACE_SECRET")
    begin_s = time.monotonic()
    found = met([Facts("a")] * 2, [right, Seal.fresh()], limit_s=1.0)
    assert isinstance(found[0], ConfigError)
    assert "rank 1 has another secret than TERRACE_SECRET" in str(found[0])
    assert isinstance(found[1], HangError)
    assert time.monotonic() - begin_s < 30


def test_a_rank_that_asks_twice_stands_for_nobody_else() -> None:
    """Rank 1 died and was started again while rank 2 is late."""
    store, seal, found = HashStore(), Seal.fresh(), dict[str, Any]()

    def rank_of(name: str, rank: int) -> None:
        found[name] = join_ranks(store, rank, 3, Facts("a"), seal, 30.0, renumber=True)

    def started(name: str, rank: int) -> threading.Thread:
        thread = threading.Thread(target=rank_of, args=(name, rank), daemon=True)
        thread.start()
        return thread

    host, first = started("host", 0), started("first life", 1)
    store.wait(["request/1"])
    answer = json.loads(bytes(store.get("request/1")).decode().partition(":")[2])["token"]
    store.wait([f"answer/{answer}"])
    again = started("second life", 1)
    time.sleep(0.5)
    assert not found
    late = started("late", 2)
    for thread in (host, first, again, late):
        thread.join(40)
    assert {name: each.rank for name, each in found.items()} == {
        "host": 0,
        "first life": 1,
        "second life": 1,
        "late": 2,
    }


def test_an_answer_of_a_stranger_is_not_believed() -> None:
    """A stranger who reads the join request and answers first: the rank refuses to follow."""
    store, seal, found = HashStore(), Seal.fresh(), list[BaseException]()

    def rank_1() -> None:
        try:
            join_ranks(store, 1, 2, Facts("a"), seal, 20.0, renumber=True)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=rank_1, daemon=True)
    thread.start()
    store.wait(["request/1"])
    token = json.loads(bytes(store.get("request/1")).decode().partition(":")[2])["token"]
    store.set(f"answer/{token}", Seal.fresh().close(f"answer/{token}", "0" * 32))
    thread.join(30)
    assert isinstance(found[0], ConfigError)
    assert "rank 0 has another secret" in str(found[0])


def listening(port: int) -> set[str]:
    """Local addresses, in hex, on which somebody listens on this port."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")}


def test_a_store_of_this_machine_listens_on_loopback_alone() -> None:
    store: Any = host_store("127.0.0.1", 0, 5.0)
    outside = {"00000000", "0" * 32}  # another process may have the same port on another address
    assert "0100007F" in listening(store.port)
    assert not outside & listening(store.port)
    open_store("127.0.0.1", store.port, 5.0).set("a", "b")
    assert bytes(store.get("a")) == b"b"
    other: Any = host_store("127.0.1.1", 0, 5.0)
    assert "0101007F" in listening(other.port)
    open_store("127.0.1.1", other.port, 5.0).set("a", "b")
    if Path("/proc/net/if_inet6").exists():
        sixth: Any = host_store("::1", 0, 5.0)
        assert "0" * 24 + "01000000" in listening(sixth.port)
        open_store("::1", sixth.port, 5.0).set("a", "b")
    everywhere: Any = host_store(socket.gethostname(), 0, 5.0)
    assert listening(everywhere.port) & outside


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (lambda port: host_store("127.0.0.1", port, 5.0), r"cannot listen on 127.0.0.1, port \d+, .* set MASTER_PORT"),
        (lambda port: host_store("some-host", port, 5.0), r"cannot listen on all interfaces, port \d+"),
        (lambda port: host_store("127.0.0.1", 99_999, 5.0), "cannot listen on 127.0.0.1, port 99999"),
        (lambda port: open_store("127.0.0.1", 99_999, 5.0), "MASTER_PORT=99999 is no port"),
    ],
)
def test_a_port_that_cannot_be_used_is_one_line(start: Callable[[int], Any], said: str) -> None:
    with socket.create_server(("", 0)) as taken, pytest.raises(ConfigError, match=said):
        start(taken.getsockname()[1])


def test_an_address_that_does_not_resolve_is_said_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terrace.launch.rendezvous._RESOLVE_S", 0.5)
    with pytest.raises(ConfigError, match=r"MASTER_ADDR='no-such-host.invalid'"):
        open_store("no-such-host.invalid", 1, 60.0)


@contextmanager
def silent_port() -> Iterator[int]:
    """A port of loopback that refuses connections, and that no other process can take meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_a_torchrun_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terrace.launch.rendezvous._AGENT_S", 0.3)
    with silent_port() as port:
        said = rf"^torchrun does not answer at 127.0.0.1:{port} \(.*: it has ended$"
        with pytest.raises(HangError, match=said):
            open_store("127.0.0.1", port, 600.0, agent_hosts=True)


def test_a_store_that_ends_is_one_line() -> None:
    said = r"torchrun or rank 0, has ended; its output says why \(Connection reset\)$"
    with pytest.raises(HangError, match=said), store_lost():
        raise DistNetworkError("Connection reset\nframe #1")


def test_a_port_of_another_program_is_one_line() -> None:
    def hang_up(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                server.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=hang_up, args=(server,), daemon=True).start()
        port = server.getsockname()[1]
        said = rf"^what answers at 127.0.0.1:{port} is not the store of rank 0, [^\n]*$"
        with pytest.raises(HangError, match=said):
            open_store("127.0.0.1", port, 1.0)
        server.shutdown(socket.SHUT_RDWR)


def test_nobody_there_is_said_while_waiting_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terrace.launch.rendezvous._QUIET_S", 0.3)
    said: list[str] = []
    with silent_port() as port, pytest.raises(HangError, match=r"nothing answers at 127\.0\.0\.1"):
        open_store("127.0.0.1", port, 1.5, said.append)
    assert len(said) == 1
    assert said[0].startswith("waiting up to 1.5 s for rank 0 at 127.0.0.1")
