"""Processes without the run's secret on the ports of a roster."""

import errno
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest

from terrace.base.errors import ConfigError
from terrace.launch.seal import Seal
from terrace.roster.entries import Attempt, Terms
from terrace.roster.links import Links, Listener, own_address
from terrace.roster.place import _MOST_STRANGERS, Place
from terrace.roster.reports import Report
from terrace.roster.talk import Talk

OWN, OTHER = Seal(b"0" * 32, "the test"), Seal(b"1" * 32, "a stranger")
REPORT = Report(island="a", token="t", terms=Terms(every=1, steps=2, rounds=1, patience_s=5.0))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    over = threading.Event()
    found = Place("127.0.0.1", 0, OWN, tmp_path / "roster.jsonl", 1, lambda line: None)
    thread = threading.Thread(target=found.serve, args=(over.is_set,), daemon=True)
    thread.start()
    yield found
    over.set()
    thread.join()


def connected(place: Place) -> socket.socket:
    return socket.create_connection(("127.0.0.1", place.port), timeout=5)


def test_a_stranger_is_not_answered_and_decides_nothing(place: Place, tmp_path: Path) -> None:
    talk = Talk(connected(place), OTHER, serves=False)
    talk.send(asdict(REPORT))
    with pytest.raises(ConfigError, match="another secret than a stranger"):
        talk.receive()
    with pytest.raises(OSError, match="ended"):
        talk.receive()
    assert not (tmp_path / "roster.jsonl").read_text()
    own = Talk(connected(place), OWN, serves=False)
    own.send(asdict(REPORT))
    assert own.receive()["deal"]["shares"] == {"a": 1}


def test_refused_connections_are_told_once_in_a_while(tmp_path: Path) -> None:
    said, over = list[str](), threading.Event()
    place = Place("127.0.0.1", 0, OWN, tmp_path / "roster.jsonl", 1, said.append)
    thread = threading.Thread(target=place.serve, args=(over.is_set,), daemon=True)
    thread.start()
    for _ in range(3):
        talk = Talk(connected(place), OTHER, serves=False)
        talk.send(asdict(REPORT))
        with pytest.raises(ConfigError):
            talk.receive()
    over.set()
    thread.join()
    (line,) = said
    assert line.startswith("refused 1 connection without the secret of the run, the last from 127.0.0.1")


def test_a_line_counts_at_its_place_in_its_connection_alone(place: Place) -> None:
    link = connected(place)
    number = link.makefile("rb").readline().decode().strip()
    sealed = OWN.within(f"roster/{number}").close("island/0", json.dumps(asdict(REPORT)))
    link.sendall(f"{sealed}\n{sealed}\n".encode())
    answers = link.makefile("rb")
    assert answers.readline()
    assert answers.readline() == b"another secret\n"
    assert not answers.readline()  # the same line again ends the connection
    other = connected(place)
    answers = other.makefile("rb")
    answers.readline()
    other.sendall(f"{sealed}\n".encode())
    assert answers.readline() == b"another secret\n"
    assert not answers.readline()


def test_a_reply_of_a_stranger_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
        with there:
            server = threading.Thread(target=lambda: Talk(there, OTHER, serves=True).send({}), daemon=True)
            server.start()
            with pytest.raises(ConfigError, match="another secret"):
                Talk(link, OWN, serves=False).receive()
            server.join()


def test_a_machine_without_a_name_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="cannot reach 'no such machine'"):
        own_address("no such machine", 29400)


def test_a_connection_between_islands_needs_the_secret_and_the_rank() -> None:
    listener, key = Listener(OWN, 0, "127.0.0.1"), Attempt(0, 0)
    try:
        for seal, rank in ((OTHER, 0), (OWN, 1)):
            link = Links(listener, seal, rank, 1.0)._dial(key, "b", listener.address)
            link.settimeout(5)
            assert not link.recv(1)  # the listener has closed it
        assert not listener.fetch([(key, "b")], time.monotonic() + 0.2, lambda: False)
        Links(listener, OWN, 0, 1.0)._dial(key, "b", listener.address)
        assert [*listener.fetch([(key, "b")], time.monotonic() + 5, lambda: False)] == ["b"]
    finally:
        listener.close()


def test_connections_without_the_secret_keep_nobody_out(place: Place) -> None:
    own = Talk(connected(place), OWN, serves=False)
    own.send(asdict(REPORT))
    assert own.receive()["deal"]
    silent = [connected(place) for _ in range(_MOST_STRANGERS + 3)]
    silent[0].settimeout(5)
    assert silent[0].recv(64)  # the number
    assert not silent[0].recv(1)  # the oldest are closed for newer ones
    own.send(asdict(REPORT))  # an island that has proved itself is not
    assert own.receive()["deal"]
    again = Talk(connected(place), OWN, serves=False)
    again.send(asdict(REPORT))
    assert again.receive()["deal"]
    for link in silent:
        link.close()


def test_a_connection_that_cannot_be_taken_does_not_end_the_listening(place: Place) -> None:
    """As when a process is out of file descriptors for a moment."""
    taken, failures = place._listener.accept, [OSError(errno.EMFILE, "Too many open files")]

    class Short:
        def accept(self) -> Any:
            if failures:
                raise failures.pop()
            return taken()

        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

    listener = place._listener
    place._listener = cast(Any, Short())
    for _ in range(3):  # the first is taken by the call that waits already
        own = Talk(connected(place), OWN, serves=False)
        own.send(asdict(REPORT))
        assert own.receive()["deal"]
    assert not failures
