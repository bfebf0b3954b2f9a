"""The folder of the fork server's socket: none stays behind, however its process ended."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from terrace.base.errors import ConfigError
from terrace.launch import socket_folder
from terrace.launch.socket_folder import clear_abandoned, clear_all_abandoned, short_folders
from tests.support.tiny_runs import environment

MAKE = """
import os, sys
from multiprocessing import util
from terrace.launch.socket_folder import use_socket_folder
use_socket_folder()
use_socket_folder()
print(util.get_temp_dir(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path a socket's fits into, which pytest's own need not be: then folders are made in /tmp itself,
    among those of other processes.
    """
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield Path(folder)


def made(parent: Path) -> "tuple[subprocess.Popen[str], Path]":
    """A process with such a folder in `parent`."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE],
        env=environment() | {"TMPDIR": str(parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_folder_goes_with_its_process_or_at_the_next_start(short_path: Path) -> None:
    ends, killed = made(short_path), made(short_path)
    assert sorted(short_path.iterdir()) == sorted([ends[1], killed[1]])
    killed[0].kill()
    killed[0].communicate()
    clear_abandoned(short_path)
    assert list(short_path.iterdir()) == [ends[1]], "the folder of a process that lives stays"
    ends[0].communicate()
    assert not list(short_path.iterdir())
    assert (ends[0].returncode, killed[0].returncode) == (0, -signal.SIGKILL)


def test_only_folders_of_this_name_without_an_owner_are_removed(tmp_path: Path) -> None:
    other, link = tmp_path / "terrace-other", tmp_path / "terrace-ranks-link"
    other.mkdir()
    link.symlink_to(other)
    held = tmp_path / "terrace-ranks-held"
    held.mkdir()
    handle = os.open(held, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    clear_abandoned(tmp_path)
    assert set(tmp_path.iterdir()) == {other, link, held}
    os.close(handle)
    clear_abandoned(tmp_path)
    assert set(tmp_path.iterdir()) == {other, link}


def test_a_start_that_was_killed_before_its_folder_was_its_own(short_path: Path) -> None:
    kills = "import fcntl, os\ndef kill(*_): os.kill(os.getpid(), 9)\nfcntl.flock = kill\n" + MAKE
    done = subprocess.run([sys.executable, "-c", kills], env=environment() | {"TMPDIR": str(short_path)}, timeout=60)
    assert done.returncode == -signal.SIGKILL
    (left,) = short_path.iterdir()
    assert left.name.startswith("terrace-new-")
    own = short_path / "terrace-new-ideas"
    own.mkdir()
    (own / "file").touch()
    clear_abandoned(short_path)
    assert list(short_path.iterdir()) == [own], "a user's own folder stays"


def test_a_folder_that_another_start_took_for_abandoned_is_made_again(short_path: Path) -> None:
    sweeps = (
        "import fcntl, os\nfrom pathlib import Path\nseen = []\n"
        "def swept(handle, how):\n"
        "    seen.append(how)\n"
        "    len(seen) == 1 and os.rmdir(os.readlink(f'/proc/self/fd/{handle}'))\n"
        "fcntl.flock = swept\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", sweeps + MAKE],
        env=environment() | {"TMPDIR": str(short_path)},
        input="",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(done.stdout.strip()).parent == short_path
    assert not list(short_path.iterdir())


def test_a_folder_is_made_where_there_are_no_locks(short_path: Path) -> None:
    program = "import fcntl\ndef none(*_): raise OSError(37, 'No locks available')\nfcntl.flock = none\n" + MAKE
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment() | {"TMPDIR": str(short_path)},
        input="",
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert not list(short_path.iterdir())


SERVES = """
from multiprocessing.connection import Client, Listener
from terrace.launch.socket_folder import use_socket_folder
use_socket_folder()
with Listener(family="AF_UNIX") as listener:
    Client(listener.address).close()
    print(listener.address)
"""


@pytest.mark.parametrize("letter", ["x", "\u00fc"])
def test_a_long_folder_of_temporary_files_is_passed_over(tmp_path: Path, letter: str) -> None:
    """Many clusters give every job a folder of its own. A path counts in bytes."""
    room = 107 - len(os.fsencode(tmp_path)) - 2
    long = tmp_path / (letter * (room // len(letter.encode())))
    long.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SERVES],
        env=environment() | {"TMPDIR": str(long)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    folder = Path(done.stdout.strip()).parent
    assert folder.parent in map(Path, socket_folder._OTHERS)
    assert not folder.exists(), "it goes with its process, as any other"
    assert not list(long.iterdir())


def test_a_place_that_cannot_be_written_to_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    monkeypatch.setattr(socket_folder, "_OTHERS", ("/proc/self", str(tmp_path)))
    monkeypatch.setattr(socket_folder, "_LONGEST", len(str(tmp_path)) + socket_folder._SOCKET)
    (abandoned := tmp_path / "terrace-ranks-old").mkdir()
    folder = socket_folder._owned_folder()
    assert (folder.parent, abandoned.exists()) == (tmp_path, False)
    abandoned.mkdir()
    clear_all_abandoned()
    assert list(tmp_path.iterdir()) == [folder]


def test_without_a_place_for_sockets_the_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(socket_folder, "_OTHERS", ())
    assert short_folders(50) == []
    with pytest.raises(
        ConfigError, match=rf"none of {long} .* {len(str(long))} bytes, of at most .*: set TMPDIR to a "
    ):
        socket_folder._owned_folder()
