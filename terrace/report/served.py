"""A page served to this machine alone, rendered again when its files change.

The server listens on 127.0.0.1 and refuses a request whose Host header is neither that address nor localhost, so that a
foreign page whose name resolves to this machine (DNS rebinding) reads nothing. It has two paths: `/` is the page, and
`/state` a text that changes with the page. An open page polls the state and reloads itself when that has changed.
"""

import hashlib
import secrets
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
_SHARE = 0.2  # largest share of the time that goes into rendering
_WATCHED = ("*", "profile/*", "checkpoints/*/manifest.json", "*/checkpoints/*/manifest.json")
_IGNORED = ("report.html", "compared.html", ".lock")  # a page does not show them

# Polls the state. When the server does not answer, the page says that it is no longer updated.
_SCRIPT = """<p id=stands hidden style="position:fixed;right:12px;bottom:12px;margin:0;padding:6px 10px;\
background:var(--ink);color:var(--paper);border-radius:5px;font-size:13px">terrace report --watch has ended</p>
<script>(() => {
  const note = document.getElementById("stands");
  const ask = async () => {
    try {
      const answer = await fetch("/state", { cache: "no-store" });
      note.hidden = true;
      if (answer.ok && await answer.text() !== "STATE") location.reload();
    } catch { note.hidden = false; }
    setTimeout(ask, POLL);
  };
  setTimeout(ask, POLL);
})();</script>
"""


class LivePage:
    """The page of some folders, which `make` renders; again once a file there has changed."""

    def __init__(self, folders: Sequence[Path], make: Callable[[], str]) -> None:
        self._folders, self._make, self._lock = folders, make, threading.Lock()
        self._state, self._page, self._not_before_s = "", "", 0.0
        self._salt = secrets.token_hex(8)  # so that an open page of an earlier server reloads

    def current(self) -> tuple[str, str]:
        """(state, page)."""
        with self._lock:
            state = self._state_of_files()
            begin_s = time.monotonic()
            # A large page of a fast run must not be rendered all the time.
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
                # A run may remove a file after it was listed.
                with suppress(OSError):
                    if path.name not in _IGNORED and path.is_file():
                        about = path.stat()
                        found.update(f"{path}\0{about.st_size}\0{about.st_mtime_ns}\n".encode(errors="replace"))
        return found.hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, page: LivePage) -> None:
        self.page = page
        super().__init__((ADDRESS, port), _Handler)

    def server_bind(self) -> None:
        # The base class looks up the machine's name, which may take seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Browsers close connections in the middle of an answer: no traceback for that.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10  # seconds for a request, so that none holds a thread for ever
    server_version, sys_version = "terrace", ""

    def do_GET(self) -> None:
        # Browsers leave the port out where it is 80.
        named = (self.headers.get("Host") or "").partition(":")[0]
        if named not in (ADDRESS, "localhost"):
            return self._answer(HTTPStatus.FORBIDDEN, "text/plain", f"ask for {ADDRESS} or localhost\n")
        path = self.path.partition("?")[0]
        if path not in ("/", "/state"):
            return self._answer(HTTPStatus.NOT_FOUND, "text/plain", "nothing but / is here\n")
        try:
            state, page = self.server.page.current()
        except (TerraceError, OSError) as error:
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n")
        if path == "/state":
            return self._answer(HTTPStatus.OK, "text/plain", state)
        return self._answer(HTTPStatus.OK, "text/html", page)

    def log_message(self, format: str, *args: object) -> None:
        # A line per poll would fill the screen.
        pass

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def served(page: LivePage, port: int) -> Iterator[ThreadingHTTPServer]:
    """A server of the page, not yet serving; port 0 is any free one. Raises `OSError` for a port that is taken."""
    server = _Server(port, page)
    try:
        yield server
    finally:
        server.server_close()
