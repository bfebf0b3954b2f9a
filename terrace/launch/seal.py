"""Authenticates values in the store, so that only this run can have written them.

Torch's store is a TCP server without a password: any process that reaches its port may read and write every key. So
each value that Terrace itself puts there carries an HMAC-SHA256 of the value, its key and the lifetime of the world,
which is checked before the value is used. Nothing from the store is unpickled. Torch's own rendezvous in the same store
has no such protection, so the port must not be reachable from outside (SECURITY.md).
"""

import hmac
import os
import secrets
import stat
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from terrace.base.errors import ConfigError

_SEPARATOR = ":"
_SECRET_BYTES = 32
_WRITTEN_WITHIN_S = 2.0


@dataclass(frozen=True)
class Seal:
    """The secret of a run, and the scope (a lifetime of the world) in which its values are valid."""

    secret: bytes = field(repr=False)
    source: str = "the process that started the ranks"  # where the secret is from, for errors
    scope: str = ""

    @classmethod
    def fresh(cls) -> "Seal":
        """A seal with a new secret, for ranks that get it from their parent."""
        return cls(secrets.token_bytes(_SECRET_BYTES))

    def within(self, scope: str) -> "Seal":
        """The same secret for a scope inside this one; values of other scopes are rejected there."""
        return replace(self, scope=f"{self.scope}/{scope}")

    def close(self, key: str, text: str) -> str:
        """`text` with its hash, as stored under `key`."""
        return f"{self._hash(key, text)}{_SEPARATOR}{text}"

    def open(self, key: str, raw: bytes, who: str = "another process") -> str:
        """The text of a sealed value. Raises `ConfigError` if it was not sealed with this secret for `key`."""
        found, _, text = raw.decode(errors="replace").partition(_SEPARATOR)
        if not hmac.compare_digest(found.encode(), self._hash(key, text).encode()):
            raise ConfigError(
                f"{key!r} in the store of the ranks is not of this run: {who} has another secret than {self.source}; "
                "set TERRACE_SECRET to the same random text for every rank, or keep strangers off the port"
            )
        return text

    def _hash(self, key: str, text: str) -> str:
        # Lengths first, so that no other split into parts gives the same message.
        parts = [part.encode(errors="surrogatepass") for part in (self.scope, key, text)]
        message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.digest(self.secret, message, "sha256").hex()


def user_secret(folder: Path) -> Seal:
    """The secret in `folder`, readable by its user alone; made on first use.

    Raises `ConfigError` if the file cannot be made or read, or if others can read it.
    """
    path = folder / "secret"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make(path)
        secret, status = _read(path)
    except OSError as error:
        raise ConfigError(
            f"cannot use {path}, the secret by which the ranks of a run know each other: {error.strerror}; set "
            "TERRACE_SECRET to the same random text for every rank"
        ) from error
    if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid != os.getuid():
        raise ConfigError(f"others may read {path}: delete it, and a new one will be made")
    if len(secret) < _SECRET_BYTES:
        raise ConfigError(f"{path} holds {len(secret)} bytes, no secret: delete it, and a new one will be made")
    return Seal(secret, str(path))


def _make(path: Path) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(_SECRET_BYTES))


def _read(path: Path) -> tuple[bytes, os.stat_result]:
    deadline_s = time.monotonic() + _WRITTEN_WITHIN_S
    while True:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            secret, status = file.read(4 * _SECRET_BYTES).strip(), os.fstat(file.fileno())
        # Another rank may have made the file and not yet written it.
        if len(secret) >= _SECRET_BYTES or time.monotonic() > deadline_s:
            return secret, status
        time.sleep(0.05)
