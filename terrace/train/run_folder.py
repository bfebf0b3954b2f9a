"""The run folder of a command that trains: made, tidied, locked, compared with that of its last start.

The lock lets one run at a time write to a folder, and ends with its process, even if that is killed. Otherwise a job
restarted while its predecessor still runs would remove half-written checkpoints, mix the checkpoints of both, and write
to the same metrics.
"""

import fcntl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from shlex import quote
from typing import Any

from terrace.base.errors import CheckpointError, ConfigError
from terrace.base.files import remove_abandoned
from terrace.base.foreign import leaves
from terrace.base.schema import read_table
from terrace.checkpoint.writing import clear_leftovers
from terrace.launch.socket_folder import clear_all_abandoned
from terrace.launch.start import is_restarted
from terrace.train.runs import table_to_resume

RUNS = Path("runs")
# Sections of a run that may change its numbers.
OF_NUMBERS = ("train", "optimizer", "plan", "lora", "balance", "teacher")
LOCK = ".lock"
_WAIT_S = 5.0  # ranks whose parent was killed notice within seconds
_PAUSE_S = 0.1
_WRITTEN = (".json", ".jsonl", ".toml")  # ends of names that a run writes


class CompleteError(CheckpointError):
    """The run has already completed all its steps."""


def goes_on(folder: Path | None, resume: Path | None, asked: bool) -> bool:
    """Whether to continue an existing run in `folder`: if `asked`, or if a launcher restarts the ranks."""
    return asked or (folder is not None and resume is None and is_restarted())


def check_command(folder: Path, command: str) -> None:
    """Raises `CheckpointError` if the run in `folder` belongs to the other command, whose files would be replaced.

    Unreadable settings do not prevent a resume (`earlier_table`).
    """
    with suppress(ConfigError):
        table_to_resume(folder, command)


def check_left(folder: Path, done: int, steps: int, key: str) -> None:
    """Raises `CompleteError` if the checkpoint in `folder` is already at the run's last step; `key` sets the number of
    steps.
    """
    if done >= steps:
        raise CompleteError(
            f"{folder} is after step {done} of {steps}, so nothing is left to train: ask for more with --{key} N"
        )


def say_complete(complete: CompleteError, going_on: bool) -> None:
    """Prints that a run is complete, or raises `complete` if the user asked for more."""
    # A launcher may restart a complete run once too often; a user gets an error with the fix.
    if not going_on:
        raise complete
    print(complete, flush=True)


def tidy(folder: Path, saves: Sequence[Path]) -> None:
    """Removes what a killed run left in its folder and in `saves`, the folders that hold its checkpoints.

    Needed for a run with nothing left to train, whose ranks are not started to do the same. Raises `CheckpointError` if
    another run writes there.
    """
    clear_all_abandoned()
    # Fails if another run writes there: its rank 0 holds the lock to the end.
    with folder_lock(folder):
        remove_abandoned(folder)
        for each in saves:
            # Also for a run that has nothing left to train, which was killed after its last checkpoint.
            if (each / "checkpoints").is_dir():
                try:
                    clear_leftovers(each / "checkpoints")
                except OSError as error:
                    raise unusable(folder, error) from error


def changes(
    old: Mapping[str, Any] | None, new: Mapping[str, Any], sections: Sequence[str] = OF_NUMBERS
) -> tuple[str, ...]:
    """Settings that may change a resumed run's numbers and differ from the earlier start: `key old -> new`.

    Data, model and ranks are compared with the checkpoint, and reported elsewhere.
    """
    if not old:
        return ("the settings of the earlier start cannot be read, so changes of them are not known",)
    found = []
    for section in sections:
        before, after = (_flat(table.get(section, {}), section) for table in (old, new))
        for key in sorted(before.keys() | after.keys()):
            values = (before.get(key), after.get(key))
            # An empty list equals a key unknown to an earlier version; 0 and false may not.
            if values[0] != values[1] and not all(value in (None, []) for value in values):
                found.append(f"{key} {before.get(key, 'unset')!s} -> {after.get(key, 'unset')!s}")
    return tuple(found)


def _flat(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}.{key}") if isinstance(value, Mapping) else {f"{prefix}.{key}": value}
    return flat


def earlier_table(folder: Path) -> dict[str, Any] | None:
    """The settings of a run's earlier start; None if there was none, empty if they cannot be read."""
    path = folder / "config.toml"
    try:
        return read_table(path, folder) if path.is_file() and path.stat().st_size else None
    except ConfigError:
        return {}


def new_folder(folder: Path | None, going_on: bool = False) -> Path:
    """Makes a run folder, by default named after the current time. Raises `ConfigError` if it cannot be made."""
    # An empty config.toml claims the folder at once, so that no two runs take the same one. With `going_on` the folder
    # of a run that ended before its first checkpoint is taken over, too.
    if going_on and folder is not None and (folder / "config.toml").is_file():
        return folder
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    # Two runs of the same second get different folders.
    candidates = [folder] if folder is not None else (RUNS / f"{stamp}{f'-{n}' * bool(n)}" for n in count())
    for candidate in candidates:
        try:
            candidate.mkdir(parents=True, exist_ok=folder is not None)
            if any(candidate.iterdir()):
                raise FileExistsError
            (candidate / "config.toml").touch(exist_ok=False)
            return candidate
        except FileExistsError:
            if folder is not None and folder.is_dir():
                break
            if folder is not None:
                raise ConfigError(f"--folder {folder} is a file: name a new folder") from None
        except OSError as error:
            raise unusable(candidate, error) from error
    raise ConfigError(
        f"--folder {folder} is not empty: name a new folder, or resume with --resume {quote(str(folder))}"
    )


def unusable(folder: Path, error: OSError) -> ConfigError:
    """The error for a run folder that the system refuses."""
    return ConfigError(f"cannot use {folder} as run folder: {error.strerror}; name another --folder")


@contextmanager
def folder_lock(folder: Path, wait_s: float | None = None) -> Iterator[None]:
    """Holds the lock of a run folder while the body runs.

    Raises `CheckpointError` if another process holds it for longer than `wait_s` (default: some seconds), or if a file
    in the folder is a pipe, which would block, or a link to outside, whose target the run would overwrite. Does nothing
    on a file system without locks, or in a folder that cannot be written.
    """
    _refuse_others(folder)
    try:
        file = (folder / LOCK).open("a")
    except OSError:
        yield  # the next write to the folder raises the error
        return
    # Closing the file, or the end of the process, releases the lock.
    with file:
        _take(file.fileno(), folder, time.monotonic() + (_WAIT_S if wait_s is None else wait_s))
        yield


def _refuse_others(folder: Path) -> None:
    with suppress(OSError):  # the next write to the folder raises the error
        for path in sorted(folder.iterdir()):
            # A user may keep a whole folder, such as that of the checkpoints, on another file system.
            if path.is_symlink() and not path.is_dir() and leaves(path, folder):
                raise CheckpointError(
                    f"{path} is a link out of the run folder, whose target the run would write: put a copy of the file "
                    "there (cp -L), or remove the link"
                )
            if (path.name == LOCK or path.suffix in _WRITTEN) and not (path.is_file() or path.is_dir()):
                raise CheckpointError(
                    f"{path} is a pipe, a socket or a device, and the run would write it: remove it, or name another "
                    "--folder"
                )


def _take(handle: int, folder: Path, until_s: float) -> None:
    with suppress(OSError):  # such as ENOLCK
        while True:
            try:
                # Polled instead of blocking, so that the wait can end with an error.
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() > until_s:
                    raise CheckpointError(
                        f"another run is writing in {folder}: wait until it has ended, or name another --folder"
                    ) from error
            time.sleep(_PAUSE_S)
