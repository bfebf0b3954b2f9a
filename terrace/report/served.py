"""Serves a page to its owner only, and renders it again when its files change.

The server listens on 127.0.0.1, which every user of this machine can reach. So all paths begin with a random token that
is only in the printed address: `/TOKEN/` is the page, `/TOKEN/state` a digest that changes with it. An open page polls
the state and reloads itself when it has changed. Requests whose Host header is neither 127.0.0.1 nor localhost are
refused, so that a foreign page whose name resolves to this machine (DNS rebinding) can read nothing.

A request must arrive completely before a deadline, and the number of open connections is limited; when it is reached,
the oldest connection with an incomplete request is closed.
"""

import hashlib
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from terrace.base.errors import TerraceError

ADDRESS = "127.0.0.1"
_POLL_S = 3.0  # between two polls of a page
_REQUEST_S = 10.0  # for a whole request to arrive
_ANSWER_S = 60.0  # for a page to be sent, perhaps through ssh
_MOST_OPEN = 32  # connections; a browser has six
_TOKEN_BYTES = 24
_SHARE = 0.2  # largest share of the time spent rendering
_WATCHED = ("*", "profile/*", "checkpoints/*/manifest.json", "*/checkpoints/*/manifest.json")
_IGNORED = ("report.html", "compared.html", ".lock")  # files that do not affect the page

# Polls the state. When the server does not answer, the page says that it is no longer updated.
_SCRIPT = """<p id=stands hidden style="position:fixed;right:12px;bottom:12px;margin:0;padding:6px 10px;\
background:var(--ink);color:var(--paper);border-radius:5px;font-size:13px">terrace report --watch has ended</p>
<script>(() => {
  const note = document.getElementById("stands");
  const ask = async () => {
    try {
      const answer = await fetch("state", { cache: "no-store" });
      note.hidden = answer.status !== 404;  // a later server has another token
      if (answer.ok && await answer.text() !== "STATE") location.reload();
    } catch { note.hidden = false; }
    setTimeout(ask, POLL);
  };
  setTimeout(ask, POLL);
})();</script>
"""


class LivePage:
    """A page that `make` renders from `folders`, again when a file there has changed."""

    def __init__(self, folders: Sequence[Path], make: Callable[[], str]) -> None:
        self._folders, self._make, self._lock = folders, make, threading.Lock()
        self._state, self._page, self._not_before_s = "", "", 0.0
        self._salt = secrets.token_hex(8)  # so that an open page of an earlier server reloads

    def current(self) -> tuple[str, str]:
        with self._lock:
            state = self._state_of_files()
            begin_s = time.monotonic()
            # Limit the share of time spent rendering a large page of a fast run.
            if state != self._state and begin_s >= self._not_before_s:
                page = self._make()
                script = _SCRIPT.replace("STATE", state).replace("POLL", f"{1000 * _POLL_S:g}")
                before, _, after = page.rpartition("</body>")
                self._state, self._page = state, f"{before}{script}</body>{after}"
                end_s = time.monotonic()
                self._not_before_s = end_s + (end_s - begin_s) * (1 / _SHARE - 1)
            return self._state, self._page

    def _state_of_files(self) -> str:
        found = hashlib.blake2b(self._salt.encode(), digest_size=12)
        for folder in self._folders:
            for path in sorted({path for pattern in _WATCHED for path in folder.glob(pattern)}):
                # The run may have removed the file after it was listed.
                with suppress(OSError):
                    if path.name not in _IGNORED and path.is_file():
                        about = path.stat()
                        found.update(f"{path}\0{about.st_size}\0{about.st_mtime_ns}\n".encode(errors="replace"))
        return found.hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # listen backlog, so that the owner's connections are not refused

    def __init__(self, port: int, page: LivePage) -> None:
        self.page, self.token = page, secrets.token_urlsafe(_TOKEN_BYTES)
        self._lock, self._open = threading.Lock(), set[Any]()
        self._until_s = dict[Any, float]()  # connection with an incomplete request -> deadline, oldest first
        super().__init__((ADDRESS, port), _Handler)

    def server_bind(self) -> None:
        # Skip the base class, which looks up the machine's name, for seconds in some networks.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    @property
    def address(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            is_full = len(self._open) >= _MOST_OPEN
            oldest = next(iter(self._until_s), None) if is_full else None
            if oldest is not None:
                self._cut(oldest)
            if not is_full or oldest is not None:
                self._open.add(request)
                self._until_s[request] = time.monotonic() + _REQUEST_S
        if is_full and oldest is None:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def arrived(self, request: Any) -> None:
        """Record that a connection's request has arrived completely."""
        with self._lock:
            self._until_s.pop(request, None)

    def service_actions(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            for request in [each for each, until_s in self._until_s.items() if until_s < now_s]:
                self._cut(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._forget(request)
        super().shutdown_request(request)

    def _cut(self, request: Any) -> None:
        # The connection's thread sees the end of the stream and closes it.
        self._forget(request)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def _forget(self, request: Any) -> None:
        self._open.discard(request)
        self._until_s.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # No traceback for browsers that close a connection in the middle of a response.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_S
    server_version, sys_version = "terrace", ""

    def parse_request(self) -> bool:
        is_whole = super().parse_request()
        self.server.arrived(self.connection)
        self.connection.settimeout(_ANSWER_S)
        return is_whole

    def do_GET(self) -> None:
        # Ignore the port, which browsers omit if it is 80.
        named = (self.headers.get("Host") or "").partition(":")[0]
        if named not in (ADDRESS, "localhost"):
            return self._answer(HTTPStatus.FORBIDDEN, "text/plain", f"ask for {ADDRESS} or localhost\n")
        given, slash, path = self.path.partition("?")[0].removeprefix("/").partition("/")
        is_owner = secrets.compare_digest(given.encode(errors="replace"), self.server.token.encode())
        if not is_owner or path not in ("", "state"):
            return self._answer(
                HTTPStatus.NOT_FOUND, "text/plain", "open the address that terrace report --watch printed\n"
            )
        if not slash:  # the page asks for its state relative to its own address
            return self._answer(HTTPStatus.MOVED_PERMANENTLY, "text/plain", "", location=f"/{given}/")
        try:
            state, page = self.server.page.current()
        except (TerraceError, OSError) as error:
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n")
        if path == "state":
            return self._answer(HTTPStatus.OK, "text/plain", state)
        return self._answer(HTTPStatus.OK, "text/html", page)

    def log_message(self, format: str, *args: object) -> None:
        # A line per poll would fill the screen.
        pass

    def _answer(self, status: HTTPStatus, kind: str, text: str, location: str = "") -> None:
        content = text.encode(errors="replace")
        self.send_response(status)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def served(page: LivePage, port: int) -> Iterator[_Server]:
    """Create a server for the page without starting it; port 0 picks a free one. Raises `OSError` for a used port."""
    server = _Server(port, page)
    try:
        yield server
    finally:
        server.server_close()
