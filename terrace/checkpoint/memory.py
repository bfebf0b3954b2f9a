"""Checkpoint files in the memory of machines (/dev/shm), which outlives the processes of a run.

    /dev/shm/terrace-1000-5ad8c23cc2f59a10/     of one user, run and host; mode 0700
        00000003.0/  00000003.1/                slots of a life of the run, its third, written in turn
            rank-00003.safetensors              a rank's part, as on disk
            rank-00003.json                     its list: the manifest of a checkpoint with this file alone
        00000002.step-00000012/                 a checkpoint that a later life goes on from: all lists in one manifest

A file without its list does not count, so a list is removed before its file is overwritten and written after it.
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
_ID = ".memory"  # in the run folder: an id that a new folder of the same name does not have, and the newest life
_FILE = re.compile(r"rank-\d{5,}\.safetensors")
_LIFE = re.compile(r"[0-9a-f]{8}")
_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600
_NUM_READERS = 8


def run_id(run_folder: Path) -> str:
    """Id by which a run finds its memory folders: empty for a run that never had one."""
    return _id_and_life(run_folder)[0]


def new_life(run_folder: Path) -> tuple[str, str]:
    """A run's id, and the name of a new life of it, behind all earlier ones in order. Raises `OSError`."""
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
    """Memory folder on a host of the run with this id."""
    # With the path, so that a copy of the run folder is another run.
    name = "\0".join([run, os.path.realpath(run_folder), host])
    return ROOT / f"terrace-{os.getuid()}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"


def make_private(folder: Path) -> None:
    """Make a folder for this user alone, or take an earlier one. Raises `OSError` for one that others may use."""
    with suppress(FileExistsError):
        folder.mkdir(mode=_PRIVATE_FOLDER)
    if not _is_private(folder):
        raise PermissionError(0, f"{folder} is not a folder of this user alone")


class MemoryFile:
    """A new file of a part with its memory taken at once; `data` are its bytes after `header`, shared with the file."""

    def __init__(self, path: Path, header: bytes, num_bytes: int) -> None:
        """Raises `OSError` where there is no room."""
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
    """Bytes of a file in memory, not copied. Raises `OSError`."""
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


def write_list(file: Path, manifest: Mapping[str, Any]) -> None:
    """Write the list of a file, which then counts. Raises `OSError`."""
    path = file.with_suffix(".json")
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    _write_new(temporary, encode(manifest).encode())
    temporary.rename(path)


@dataclass(frozen=True, kw_only=True)
class Held:
    """Contents of a memory folder by their lists: a manifest for each copy, and a line for each damaged list.

    `paths` has the lists, by life, step and file. A file is believed after `check` alone.
    """

    folder: Path
    copies: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    paths: dict[tuple[str, int, str], Path] = field(default_factory=dict)

    def check(self, text: str) -> dict[str, str]:
        """Check the files of a copy against their checksums. Damaged ones are forgotten: name -> a line about it."""
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
    """The copies in a memory folder, by their lists: no file is read."""
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
    """Manifests of `copies`, without these files in those of the life and step of `text`."""
    if not names:
        return tuple(copies)
    key, kept = _key(decode(text)), list[str]()
    for manifest in map(decode, copies):
        if _key(manifest) == key:
            manifest["files"] = {name: entry for name, entry in manifest["files"].items() if name not in names}
        kept.append(encode(manifest))
    return tuple(kept)


def newest(texts: Iterable[str], folder: Path) -> Checkpoint | None:
    """The newest copy of which hosts' manifests together have all boxes, as a checkpoint in `folder`; None without.

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
    """Checkpoint of a manifest's text, whose files are in a folder of `folder` or will be.

    Raises `CheckpointError` for a damaged manifest.
    """
    checkpoint = Checkpoint(folder, text)
    checkpoint.folder = folder / f"{decode(text)['life']}.step-{checkpoint.step:08d}"
    return checkpoint


def place(here: Held, text: str) -> Path:
    """Put the files of a copy that this host holds into a checkpoint's folder; returns it. Raises `OSError`.

    Files are linked, not copied. The folder may lack files that other hosts hold.
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
    """Files in a checkpoint's folder in memory that count."""
    return sorted(path.with_suffix(".safetensors").name for path in folder.glob("rank-*.json"))


def clear(folder: Path, keep: Callable[[str], bool] = lambda name: False) -> None:
    """Remove from a memory folder all folders but those whose names are to `keep`; without any left, itself."""
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
