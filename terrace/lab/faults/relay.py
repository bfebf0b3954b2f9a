"""A relay between an island and the meeting place, which a rehearsal can hold back: bytes wait until it goes on."""

import socket
import threading
import time
from contextlib import suppress

_HOST = "127.0.0.1"
_POLL_S = 0.02
_PIECE = 1 << 16


class Relay:
    """Listens at `port`, and passes bytes on to and from `to_port` of this machine."""

    def __init__(self, to_port: int) -> None:
        self._to_port, self._cut_s, self._is_closed = to_port, 0.0, False
        self._listener = socket.create_server((_HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def cut(self, seconds: float) -> None:
        self._cut_s = time.monotonic() + seconds

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _stand(self) -> None:
        while time.monotonic() < self._cut_s and not self._is_closed:
            time.sleep(_POLL_S)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                island, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(island,), name="relay", daemon=True).start()

    def _join(self, island: socket.socket) -> None:
        self._stand()
        try:
            place = socket.create_connection((_HOST, self._to_port), timeout=_POLL_S * 50)
            place.settimeout(None)
        except OSError:  # the meeting place is not there: nor is this connection
            island.close()
            return
        for source, sink in ((island, place), (place, island)):
            threading.Thread(target=self._pass_on, args=(source, sink), name="relay", daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(_PIECE):
                self._stand()
                sink.sendall(piece)
        self._stand()
        # Both ends learn of the end of one; the last of the two threads finds them closed.
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
