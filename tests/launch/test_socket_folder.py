"""The folder of the fork server's socket: none stays behind, however its process ended."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

from terrace.launch.socket_folder import clear_abandoned
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


def test_the_folder_goes_with_its_process_or_at_the_next_start(tmp_path: Path) -> None:
    ends, killed = made(tmp_path), made(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([ends[1], killed[1]])
    killed[0].kill()
    killed[0].communicate()
    clear_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == [ends[1]], "the folder of a process that lives stays"
    ends[0].communicate()
    assert not list(tmp_path.iterdir())
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


def test_a_start_that_was_killed_before_its_folder_was_its_own(tmp_path: Path) -> None:
    kills = "import fcntl, os\ndef kill(*_): os.kill(os.getpid(), 9)\nfcntl.flock = kill\n" + MAKE
    done = subprocess.run([sys.executable, "-c", kills], env=environment() | {"TMPDIR": str(tmp_path)}, timeout=60)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("terrace-new-")
    own = tmp_path / "terrace-new-ideas"
    own.mkdir()
    (own / "file").touch()
    clear_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == [own], "a user's own folder stays"


def test_a_folder_that_another_start_took_for_abandoned_is_made_again(tmp_path: Path) -> None:
    sweeps = (
        "import fcntl, os\nfrom pathlib import Path\nseen = []\n"
        "def swept(handle, how):\n"
        "    seen.append(how)\n"
        "    len(seen) == 1 and os.rmdir(os.readlink(f'/proc/self/fd/{handle}'))\n"
        "fcntl.flock = swept\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", sweeps + MAKE],
        env=environment() | {"TMPDIR": str(tmp_path)},
        input="",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(done.stdout.strip()).parent == tmp_path
    assert not list(tmp_path.iterdir())


def test_a_folder_is_made_where_there_are_no_locks(tmp_path: Path) -> None:
    program = "import fcntl\ndef none(*_): raise OSError(37, 'No locks available')\nfcntl.flock = none\n" + MAKE
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment() | {"TMPDIR": str(tmp_path)}, input="", text=True, timeout=60
    )
    assert done.returncode == 0
    assert not list(tmp_path.iterdir())
