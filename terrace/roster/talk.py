"""Lines between an island and the meeting place: JSON, each sealed with the run's secret. Nothing is unpickled.

A server begins a connection with a number that it has just drawn. Both seal every line for that number, their direction
and the count of lines so far, so that no line can be replayed, in another connection or in this one.
"""

import json
import secrets
import socket
from contextlib import suppress
from typing import Any

from terrace.base.errors import ConfigError
from terrace.launch.seal import Seal

_LONGEST = 1 << 22  # bytes of a line: addresses of thousands of ranks
_NUMBER_BYTES = 16
_NO = b"another secret\n"  # no sealed line, so whoever has the secret does not believe it


class Talk:
    """One end of a connection. Raises `OSError` when it ends, and `ConfigError` for a line of another secret.

    A server answers such a line by one that is not sealed, so that the other end raises `ConfigError` as well.
    """

    def __init__(self, link: socket.socket, seal: Seal, *, serves: bool) -> None:
        self._link, self._file, self._serves = link, link.makefile("rb"), serves
        self._num_sent = self._num_heard = 0
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if serves:
            number = secrets.token_hex(_NUMBER_BYTES)
            link.sendall(f"{number}\n".encode())
        else:
            number = self._read().decode(errors="replace")
        self._seal = seal.within(f"roster/{number}")

    def send(self, value: dict[str, Any]) -> None:
        text = self._seal.close(self._key(self._serves, self._num_sent), json.dumps(value))
        self._num_sent += 1
        self._link.sendall(f"{text}\n".encode())

    def receive(self) -> dict[str, Any]:
        line = self._read()
        try:
            text = self._seal.open(self._key(not self._serves, self._num_heard), line)
        except ConfigError as error:
            if self._serves:
                self._link.sendall(_NO)
            raise ConfigError(
                f"the other end of the roster has another secret than {self._seal.source}: set TERRACE_SECRET to the "
                "same random text for terrace meet and every island, or keep strangers off the port"
            ) from error
        self._num_heard += 1
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ConfigError("a line of the roster is no table")
        return found

    def end(self) -> None:
        """End the connection for whoever waits for it, in another thread."""
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        # Both, since the file holds the connection open.
        self._file.close()
        self._link.close()

    def _read(self) -> bytes:
        line = self._file.readline(_LONGEST)
        if not line.endswith(b"\n"):
            raise OSError("the connection has ended")
        return line[:-1]

    def _key(self, is_servers: bool, number: int) -> str:
        return f"{'place' if is_servers else 'island'}/{number}"
