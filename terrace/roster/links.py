"""Connections of one rank to the ranks of its number on other islands, for one attempt at an exchange.

A group of gloo would do, but cannot be given up: its threads write into its buffers until its timeout, and a frozen
member holds up all others. Once these connections are closed, no thread reads or writes any more.

Every rank listens on one port from its start to its end. Of two islands the later one by name connects. It proves with
the run's secret that it belongs to the attempt, over a number that the listener has just drawn. Tensors are neither
sealed nor encrypted, as in gloo and NCCL.
"""

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from terrace.base.errors import ConfigError
from terrace.launch.seal import Seal
from terrace.roster.entries import Attempt

_LONGEST_LINE = 4096
_BACKLOG = 256
_GREET_S = 5.0  # in which a process that has connected must prove who it is
_AGAIN_S = 0.1
_BUFFER = 1 << 20
Key = tuple[Attempt, str]  # an attempt, and the island that connects for it


class LinkError(Exception):
    """An attempt cannot be made: `blames` are the islands that were not reached."""

    def __init__(self, blames: Sequence[str], why: str) -> None:
        super().__init__(f"island {', '.join(blames)}: {why}")
        self.blames = tuple(blames)


class Listener:
    """A rank's port. Connections that nobody waits for are kept until they are fetched, or the listener is closed."""

    def __init__(self, seal: Seal, rank: int, host: str) -> None:
        """`host` is this machine's address as the other islands reach it."""
        self._seal, self._rank = seal, rank
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self.address = f"{host}|{self._listener.getsockname()[1]}"
        self._found: dict[Key, socket.socket] = {}
        self._is_closed = False
        self._news = threading.Condition()
        threading.Thread(target=self._accept, name="roster listener", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._news:
            for each in self._found.values():
                each.close()
            self._found.clear()

    def fetch(self, keys: Iterable[Key], until_s: float, is_over: Callable[[], bool]) -> dict[str, socket.socket]:
        """Connections, by island, of those of `keys` that arrive before `until_s` (monotonic clock) or `is_over`."""
        wanted = list(keys)
        with self._news:
            # Woken now and then, since an attempt may be given up meanwhile.
            while any(key not in self._found for key in wanted) and time.monotonic() < until_s and not is_over():
                self._news.wait(0.1)
            return {island: self._found.pop((key, island)) for key, island in wanted if (key, island) in self._found}

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                link, _ = self._listener.accept()
            # Closed, or out of files for a moment, or the other end has gone already: no reason to stop listening.
            except OSError:
                time.sleep(_AGAIN_S)
                continue
            threading.Thread(target=self._greet, args=(link,), name="roster greeting", daemon=True).start()

    def _greet(self, link: socket.socket) -> None:
        try:
            link.settimeout(_GREET_S)
            nonce = secrets.token_hex(16)
            link.sendall(f"{nonce}\n".encode())
            greeting = json.loads(self._seal.open(f"link/{nonce}", _line(link)))
            key = Attempt(int(greeting["exchange"]), int(greeting["attempt"]))
            if greeting["rank"] != self._rank:
                raise ValueError("another rank is meant")
            with self._news:
                # Connections of earlier attempts are no longer needed.
                for old in [each for each in self._found if each[0] < key]:
                    self._found.pop(old).close()
                self._found[key, str(greeting["island"])] = link
                self._news.notify_all()
        # A stranger, or one that has gone again: whatever it sent is no reason to stop listening.
        except Exception:
            link.close()


def _line(link: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"\n"):
        more = link.recv(1)
        if not more or len(found) > _LONGEST_LINE:
            raise OSError("no line")
        found += more
    return found[:-1]


def _bytes(values: Tensor) -> memoryview:
    found: Any = values.view(torch.uint8).numpy()  # numpy's stubs know no buffer protocol before Python 3.12
    return memoryview(found)


def own_address(host: str, port: int) -> str:
    """This machine's address on its way to `host`. Sends nothing. Raises `ConfigError` if there is no way."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"cannot reach {host!r} from {socket.gethostname()} ({error}): give the name or address of the machine of "
            "terrace meet (--meet HOST:PORT)"
        ) from error


class Links:
    """Connections to all other islands of an attempt. Messages to different islands travel at the same time.

    `sent_bytes` counts what was sent. A wait for one message takes at most `patience_s`.
    """

    def __init__(self, listener: Listener, seal: Seal, rank: int, patience_s: float) -> None:
        self._listener, self._seal, self._rank, self.patience_s = listener, seal, rank, patience_s
        self._links: dict[str, socket.socket] = {}
        self._senders: list[threading.Thread] = []
        self._failures: dict[str, str] = {}
        self._is_closed = False
        self.sent_bytes = 0

    def open(self, key: Attempt, own: str, addresses: dict[str, str]) -> None:
        """Connect to the islands at `addresses`. Raises `LinkError` that names all that were not reached."""
        until_s = time.monotonic() + self.patience_s
        missing = dict[str, str]()
        for island in sorted(each for each in addresses if each < own):
            try:
                self._links[island] = self._dial(key, own, addresses[island])
            except (OSError, ValueError) as error:
                missing[island] = str(error)
        later = [(key, island) for island in addresses if island > own]
        self._links |= self._listener.fetch(later, until_s, lambda: self._is_closed)
        missing |= {island: "it did not connect" for _, island in later if island not in self._links}
        for link in self._links.values():
            link.settimeout(self.patience_s)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if missing:
            raise LinkError(sorted(missing), next(iter(missing.values())))

    def _dial(self, key: Attempt, own: str, address: str) -> socket.socket:
        host, _, port = address.partition("|")
        link = socket.create_connection((host, int(port)), timeout=self.patience_s)
        nonce = _line(link).decode(errors="replace")
        greeting = {"exchange": key.exchange, "attempt": key.attempt, "island": own, "rank": self._rank}
        link.sendall(f"{self._seal.close(f'link/{nonce}', json.dumps(greeting))}\n".encode())
        return link

    def send(self, island: str, values: Tensor) -> None:
        """Begin to send CPU `values`, which must not change before `sent` returns."""
        data = _bytes(values.contiguous())
        self.sent_bytes += len(data)
        sender = threading.Thread(target=self._send, args=(island, data), name="roster sender", daemon=True)
        self._senders.append(sender)
        sender.start()

    def _send(self, island: str, data: memoryview) -> None:
        try:
            self._links[island].sendall(data)
        except OSError as error:
            self._failures[island] = str(error)

    def sent(self) -> None:
        """Wait for all messages that are being sent. Raises `LinkError`."""
        for sender in self._senders:
            sender.join()
        self._senders.clear()
        if self._failures:
            raise LinkError(sorted(self._failures), next(iter(self._failures.values())))

    def receive(self, island: str, values: Tensor) -> None:
        """Fill contiguous CPU `values` from `island`. Raises `LinkError`."""
        data, begin = _bytes(values), 0
        try:
            while begin < len(data):
                num = self._links[island].recv_into(data[begin : begin + _BUFFER])
                if not num:
                    raise OSError("it has closed the connection")
                begin += num
        except OSError as error:
            raise LinkError([island], str(error) or "it did not answer in time") from error

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """End all connections: whoever waits for one of them gets an error. May be called from another thread."""
        self._is_closed = True
        for link in list(self._links.values()):
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()
