"""A browser without a screen: the document of a page, its messages to the console, and a picture of it."""

import shutil
import struct
import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path

BROWSER = next(
    (path for name in ("chromium", "google-chrome", "chromium-browser") if (path := shutil.which(name))), None
)
_QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--disable-default-apps",
    "--disable-extensions",
    "--enable-logging=stderr",
    "--hide-scrollbars",
]
_NOWHERE = "--host-resolver-rules=MAP * ~NOTFOUND"  # no name resolves: there is no network


@dataclass(frozen=True)
class Seen:
    """The document after its scripts ran, and its messages to the console."""

    dom: str
    console: list[str]


def seen(page: Path, profile: Path, width: int = 1280) -> Seen:
    """Open a page; its document and messages."""
    done = _run(page, profile, f"--window-size={width},900", "--virtual-time-budget=2000", "--dump-dom")
    return Seen(done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line])


def picture(page: Path, profile: Path, target: Path, width: int, height: int) -> tuple[int, int, float]:
    """Take a picture of a page; returns its width, its height, and the share of its bytes that changes are in.

    The bytes of a picture are stored as differences to their neighbours: of a page of one colour nearly all are 0.
    """
    _run(page, profile, f"--window-size={width},{height}", f"--screenshot={target}")
    raw, at, stored = target.read_bytes(), 8, b""
    size = struct.unpack(">II", raw[16:24])
    while at < len(raw):
        length, kind = struct.unpack(">I4s", raw[at : at + 8])
        stored += raw[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += 12 + length
    rows = zlib.decompress(stored)
    return size[0], size[1], 1 - rows.count(0) / len(rows)


def _run(page: Path, profile: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    assert BROWSER is not None, "the caller has looked"
    command = [BROWSER, *_QUIET, _NOWHERE, f"--user-data-dir={profile}", *words, page.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done
