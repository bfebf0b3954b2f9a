"""A mirror of the Hugging Face hub that a test serves itself: what `huggingface_hub` asks for, from folders."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMITS = ("1" * 40, "2" * 40)


class Mirror:
    """Repositories by "models/ORG/NAME" or "datasets/ORG/NAME", each a folder for every commit; "main" is the last."""

    def __init__(self, repositories: Mapping[str, list[Path]]) -> None:
        self.repositories, self.fetched = dict(repositories), list[str]()

    def folder(self, repository: str, revision: str) -> tuple[str, Path] | None:
        folders = self.repositories.get(repository)
        if folders is None:
            return None
        if revision not in ("main", *COMMITS):
            return None
        number = COMMITS.index(revision) if revision in COMMITS else len(folders) - 1
        return (COMMITS[number], folders[number]) if number < len(folders) else None

    def answer(self, path: str) -> tuple[str, Path] | list[object] | dict[str, object] | None:
        """A file with its commit, or what an API call returns; None for what is not there."""
        parts = [unquote(part) for part in urlsplit(path).path.strip("/").split("/")]
        if parts[0] == "api":
            repository, rest = "/".join(parts[1:4]), parts[4:]
            found = self.folder(repository, rest[1] if len(rest) > 1 else "main")
            if found is None:
                return None
            names = sorted(each.relative_to(found[1]).as_posix() for each in found[1].rglob("*") if each.is_file())
            if rest[:1] == ["tree"]:
                return [
                    {
                        "type": "file",
                        "path": name,
                        "oid": _sum(found[1] / name),
                        "size": (found[1] / name).stat().st_size,
                    }
                    for name in names
                ]
            return {"id": "/".join(parts[2:4]), "sha": found[0], "siblings": [{"rfilename": name} for name in names]}
        kind = [] if parts[0] == "datasets" else ["models"]
        at = parts.index("resolve")
        found = self.folder("/".join([*kind, *parts[:at]]), parts[at + 1])
        return None if found is None else (found[0], found[1].joinpath(*parts[at + 2 :]))


@contextmanager
def mirror_of(repositories: Mapping[str, list[Path]]) -> Iterator[tuple[str, Mirror]]:
    """The address of a mirror while it is served, and the mirror with the files that were fetched."""
    mirror = Mirror(repositories)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found, headers, status = mirror.answer(self.path), dict[str, str](), 200
            body = json.dumps(found).encode() if not isinstance(found, tuple) else b""
            if isinstance(found, tuple):
                commit, file = found
                if not file.is_file():
                    found = None
                else:
                    body, headers = file.read_bytes(), {"X-Repo-Commit": commit, "ETag": f'"{_sum(file)}"'}
                    if self.command == "GET":
                        mirror.fetched.append(urlsplit(self.path).path)
            if found is None:
                status, body, headers = 404, b"{}", {"X-Error-Code": "EntryNotFound"}
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", mirror
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _sum(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
