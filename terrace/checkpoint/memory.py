"""Checkpoint files in the memory of machines (/dev/shm), which outlives the processes of a run.

    /dev/shm/terrace-1000-5ad8c23cc2f59a10/     of one user, run and host; mode 0700
        00000003.0/  00000003.1/                slots of the run's third life (start), written alternately
            rank-00003.safetensors              a rank's part, as on disk
            rank-00003.json                     its list: the manifest of a checkpoint with this file alone
        00000002.step-00000012/                 a checkpoint that a later life resumes: all lists in one manifest

A file counts only with its list, so the list is removed before the file is overwritten, and written after it.
"""

import hashlib
import mmap
import os
import re
import shutil
import stat
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from terrace.base.errors import CheckpointError
from terrace.base.files import write_atomic
from terrace.checkpoint.layout import decode, encode
from terrace.checkpoint.reading import Checkpoint

ROOT = Path("/dev/shm")
MANIFEST = "manifest.json"
_ID = (
    ".memory"  # in the run folder: an id that distinguishes it from a new folder of the same name, and the newest life
)
_FILE = re.compile(r"rank-\d{5,}\.safetensors")
_LIFE = re.compile(r"[0-9a-f]{8}")
_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600
_NUM_READERS = 8


def run_id(run_folder: Path) -> str:
    """Id by which a run finds its memory folders; empty if it never had one."""
    return _id_and_life(run_folder)[0]


def new_life(run_folder: Path) -> tuple[str, str]:
    """A run's id, and the name of a new life of the run, which sorts after all earlier ones. Raises `OSError`."""
    run, life = _id_and_life(run_folder)
    run, life = run or uuid.uuid4().hex, f"{int(life or '0', 16) + 1:08x}"
    write_atomic(run_folder / _ID, f"{run} {life}")
    return run, life


def _id_and_life(run_folder: Path) -> tuple[str, str]:
    try:
        run, life = (run_folder / _ID).read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return "", ""
    return (run, life) if _LIFE.fullmatch(life) else ("", "")


def memory_folder(run: str, run_folder: Path, host: str) -> Path:
    # With the path, so that a copy of the run folder is another run.
    name = "\0".join([run, os.path.realpath(run_folder), host])
    return ROOT / f"terrace-{os.getuid()}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"


def make_private(folder: Path) -> None:
    """Create a folder that only this user may access, or use an existing one. Raises `OSError` if others may."""
    with suppress(FileExistsError):
        folder.mkdir(mode=_PRIVATE_FOLDER)
    if not _is_private(folder):
        raise PermissionError(0, f"{folder} is not a folder of this user alone")


class MemoryFile:
    """A new file in memory, fully allocated. `data` maps its bytes after `header`."""

    def __init__(self, path: Path, header: bytes, num_bytes: int) -> None:
        """Create the file. Raises `OSError` if there is not enough memory."""
        self.path, self.header = path, header
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _PRIVATE_FILE)
        try:
            # Without this a full memory would end the process at its first write.
            os.posix_fallocate(handle, 0, len(header) + num_bytes)
            mapped = mmap.mmap(handle, len(header) + num_bytes)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(handle)
        mapped[: len(header)] = header
        self.data = torch.frombuffer(mapped, dtype=torch.uint8, offset=len(header), count=num_bytes)


def mapped_file(path: Path) -> torch.Tensor:
    """Map the bytes of a file in memory, without copying. Raises `OSError`."""
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


def write_list(file: Path, manifest: Mapping[str, Any]) -> None:
    """Write the list of a file, which makes the file count. Raises `OSError`."""
    path = file.with_suffix(".json")
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    _write_new(temporary, encode(manifest).encode())
    temporary.rename(path)


@dataclass(frozen=True, kw_only=True)
class Held:
    """Contents of a memory folder according to its lists: a manifest per copy, and a line per damaged list.

    `paths` maps (life, step, file) to lists. Files are unverified until `check`.
    """

    folder: Path
    copies: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    paths: dict[tuple[str, int, str], Path] = field(default_factory=dict)

    def check(self, text: str) -> dict[str, str]:
        """Verify the files of a copy. Removes damaged ones from `paths` and returns name -> a line about the damage."""
        manifest = decode(text)
        key, entries = _key(manifest), manifest["files"]
        names = [name for name in entries if (*key, name) in self.paths]
        with ThreadPoolExecutor(_NUM_READERS) as readers:
            found = readers.map(lambda name: _damage(self.paths[*key, name], entries[name]), names)
            wrong = {name: line for name, line in zip(names, found, strict=True) if line}
        for name in wrong:
            del self.paths[*key, name]
        return wrong


def held(folder: Path) -> Held:
    """The copies in a memory folder, from their lists; files are not read."""
    if not _is_private(folder):
        return Held(folder=folder)
    copies, paths, wrong = dict[tuple[str, int], dict[str, Any]](), dict[tuple[str, int, str], Path](), list[str]()
    for path in sorted(folder.glob("*/rank-*.json")):
        try:
            manifest = _read(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            # It stays: a living run may be writing it at this moment.
            wrong.append(f"{path.with_suffix('.safetensors')} is damaged ({error})")
            continue
        key, name = _key(manifest), path.with_suffix(".safetensors").name
        _add(copies.setdefault(key, {**manifest, "files": {}}), manifest)
        paths[*key, name] = path
    return Held(folder=folder, copies=tuple(map(encode, copies.values())), wrong=tuple(wrong), paths=paths)


def without(copies: Iterable[str], text: str, names: Collection[str]) -> tuple[str, ...]:
    """`copies` (manifests), where those of the life and step of `text` lose the files `names`."""
    if not names:
        return tuple(copies)
    key, kept = _key(decode(text)), list[str]()
    for manifest in map(decode, copies):
        if _key(manifest) == key:
            manifest["files"] = {name: entry for name, entry in manifest["files"].items() if name not in names}
        kept.append(encode(manifest))
    return tuple(kept)


def newest(texts: Iterable[str], folder: Path) -> Checkpoint | None:
    """The newest copy whose manifests from all hosts together cover all boxes, as a checkpoint in `folder`; or None.

    A step of a later life is newer than any of an earlier one, which a host that was away may still hold.
    """
    copies: dict[tuple[str, int], dict[str, Any]] = {}
    for part in map(decode, texts):
        _add(copies.setdefault((part["life"], part["step"]), {**part, "files": {}}), part)
    for _, manifest in sorted(copies.items(), key=lambda copy: copy[0], reverse=True):
        # A copy that a loss cut short lacks boxes; the one before it is whole.
        with suppress(CheckpointError):
            checkpoint = in_memory(folder, encode(manifest))
            checkpoint.check_pieces()
            return checkpoint
    return None


def in_memory(folder: Path, text: str) -> Checkpoint:
    """The checkpoint of a serialized manifest, whose files are or will be in a subfolder of `folder`.

    Raises `CheckpointError` for a damaged manifest.
    """
    checkpoint = Checkpoint(folder, text)
    checkpoint.folder = folder / f"{decode(text)['life']}.step-{checkpoint.step:08d}"
    return checkpoint


def place(here: Held, text: str) -> Path:
    """Link the files of a copy that this host holds into a checkpoint's folder, and return it. Raises `OSError`.

    The folder may lack files that other hosts hold.
    """
    manifest, folder = decode(text), in_memory(here.folder, text).folder
    make_private(here.folder)
    make_private(folder)
    for name in manifest["files"]:
        path = here.paths.get((*_key(manifest), name))
        # An earlier start may have got as far as this one.
        if path is not None and path.parent != folder:
            for old in (path.with_suffix(".safetensors"), path):
                (folder / old.name).unlink(missing_ok=True)
                os.link(old, folder / old.name, follow_symlinks=False)
    (folder / MANIFEST).unlink(missing_ok=True)
    _write_new(folder / MANIFEST, text.encode())
    return folder


def present(folder: Path) -> list[str]:
    """Files in a checkpoint's memory folder that have a list."""
    return sorted(path.with_suffix(".safetensors").name for path in folder.glob("rank-*.json"))


def clear(folder: Path, keep: Callable[[str], bool] = lambda name: False) -> None:
    """Remove the subfolders of a memory folder except those to `keep`; if none are left, remove it too."""
    with suppress(OSError):
        for path in list(folder.iterdir()):
            if not keep(path.name):
                shutil.rmtree(path, ignore_errors=True)
        folder.rmdir()


def _key(manifest: Mapping[str, Any]) -> tuple[str, int]:
    return manifest["life"], manifest["step"]


def _add(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    whole["files"] |= part["files"]
    # A rank with only frozen parameters has made no updates.
    whole["num_updates"] = max(whole["num_updates"], part["num_updates"])


def _read(path: Path) -> dict[str, Any]:
    manifest = decode(path.read_text(encoding="utf-8"))
    (name, entry), *more = manifest["files"].items()
    is_own = not more and name == path.with_suffix(".safetensors").name
    if not (is_own and _FILE.fullmatch(name) and _LIFE.fullmatch(manifest["life"]) and entry["crc32"]):
        raise ValueError("it is not the list of its file")
    if not all(isinstance(manifest[name], int) for name in ("step", "num_updates")):
        raise ValueError("it does not say its step")
    if path.with_suffix(".safetensors").stat().st_size != entry["num_bytes"]:
        raise ValueError("its size differs")
    return manifest


def _damage(path: Path, entry: Mapping[str, Any]) -> str:
    file = path.with_suffix(".safetensors")
    try:
        # Mapped: copying the bytes would take longer than their checksum.
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as raw:
            return "" if f"{zlib.crc32(raw):08x}" == entry["crc32"] else f"{file} is damaged (its checksum differs)"
    except (OSError, ValueError) as error:
        return f"{file} is damaged ({error})"


def _is_private(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _write_new(path: Path, content: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _PRIVATE_FILE)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
