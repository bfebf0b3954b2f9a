"""Atomic files: the old content or the new one, and nothing left behind."""

import errno
import fcntl
import os
import shutil
import signal
import stat
from pathlib import Path
from typing import NoReturn

import pytest

from terrace.base.files import (
    folder_atomic,
    open_atomic,
    open_own,
    read_bounded,
    remove_abandoned,
    resolved,
    respect_umask,
    sync_folder,
    write_atomic,
)
from terrace.cli.main import main


def _no_space(*_args: object, **_kwargs: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_link_stays_and_a_device_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_atomic(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        write_atomic(tmp_path / "pipe", "new")
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(("content", "raw"), [("caf\u00e9\n", b"caf\xc3\xa9\n"), (b"\x00\r\n", b"\x00\r\n"), ("", b"")])
def test_writes_exactly_the_content(tmp_path: Path, content: str | bytes, raw: bytes) -> None:
    path = tmp_path / "new" / "folder" / "file"
    write_atomic(path, content)
    assert path.read_bytes() == raw
    assert os.listdir(path.parent) == ["file"]


def test_replaces_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("a long old content", encoding="utf-8")
    write_atomic(path, "new")
    assert path.read_text(encoding="utf-8") == "new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("call", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize("old", ["old", None])
def test_failure_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, old: str | None
) -> None:
    path = tmp_path / "file"
    if old is not None:
        path.write_text(old, encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, _no_space)
        with pytest.raises(OSError, match="No space left") as caught:
            write_atomic(path, "new")
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == ([] if old is None else ["file"])
    assert old is None or path.read_text(encoding="utf-8") == old


def test_interrupt_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_handle: int) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_atomic(tmp_path / "file", "new")
    assert os.listdir(tmp_path) == []


def test_content_that_cannot_be_encoded_touches_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_atomic(tmp_path / "new" / "file", "\ud800")
    assert os.listdir(tmp_path) == []


def test_sync_folder(tmp_path: Path) -> None:
    sync_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "missing")


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_have_the_mode_that_the_users_umask_allows(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_atomic(tmp_path / "file", "text")
        (tmp_path / "folder").mkdir(mode=0o700)
        respect_umask(tmp_path / "folder")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o777 & ~mask


def test_nothing_of_ones_own_is_opened_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match="symbolic links"):
        open_own(tmp_path / "link", os.O_RDWR | os.O_CREAT)


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path: Path) -> None:
    killed = os.fork()
    if not killed:
        with open_atomic(tmp_path / "file") as file:
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(killed, 0)
    assert [path.name for path in tmp_path.iterdir()] == [".file.0.new"]
    shutil.copy(tmp_path / ".file.0.new", tmp_path / ".other.0.new")
    with open_atomic(tmp_path / "file") as first:
        first.write(b"first")
        remove_abandoned(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [".file.0.new"]
        with open_atomic(tmp_path / "file") as second:  # of another process: what is being written stays
            assert len(list(tmp_path.iterdir())) == 2
            second.write(b"second")
        assert (tmp_path / "file").read_bytes() == b"second"
    assert (tmp_path / "file").read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failed_write_removes_its_own_file_while_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the lock the name may be another writer's by then."""
    removed: list[bool] = []
    unlink = Path.unlink

    def watched(path: Path, missing_ok: bool = False) -> None:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                removed.append(True)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    with pytest.raises(KeyError), open_atomic(tmp_path / "a"):
        raise KeyError
    assert removed == [True]
    assert not list(tmp_path.iterdir())


def test_a_killed_writer_of_a_folder_leaves_it_to_the_next(tmp_path: Path) -> None:
    killed = os.fork()
    if not killed:
        with folder_atomic(tmp_path / "out") as made:
            (made / "half").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(killed, 0)
    assert (tmp_path / ".out.0.new" / "content" / "half").exists()
    with folder_atomic(tmp_path / "other"):
        assert (tmp_path / ".out.0.new").exists(), "of another target"
    with folder_atomic(tmp_path / "out") as first:
        (first / "a").touch()
        with pytest.raises(KeyError), folder_atomic(tmp_path / "out") as second:
            raise KeyError(second)
        assert [path.name for path in first.iterdir()] == ["a"], "a living writer's stays"
        assert sorted(path.name for path in tmp_path.iterdir()) == [".out.0.new", "other"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out"]


def test_a_folder_where_none_can_be_made_is_refused() -> None:
    with pytest.raises(FileNotFoundError, match="/proc"), folder_atomic(Path("/proc/out")):
        pass


def test_folders_of_others_are_not_taken_for_abandoned(tmp_path: Path) -> None:
    """A folder of the same name is a user's own unless it has what a writer puts there, and that alone."""
    (tmp_path / ".out.0.new").mkdir()
    (tmp_path / ".out.1.new" / "content").mkdir(parents=True)
    (tmp_path / ".out.2.new").mkdir()
    for name in ("writing.lock", "notes"):
        (tmp_path / ".out.2.new" / name).touch()
    (tmp_path / ".out.3.new").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "writing.lock").touch()
    (tmp_path / ".out.4.new").symlink_to(tmp_path / "mine")
    before = set(tmp_path.rglob("*"))
    with folder_atomic(tmp_path / "out"):
        pass
    assert set(tmp_path.rglob("*")) == before | {tmp_path / "out"}


def test_hidden_files_of_others_are_not_taken_for_abandoned(tmp_path: Path) -> None:
    for name in (".my-notes.new", ".a.1.news", "a.1.new", ".a.0.new"):
        (tmp_path / name).touch()
    remove_abandoned(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".my-notes.new", ".a.1.news", "a.1.new"}


def test_a_file_without_end_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="it has more than 1 MB"):
        read_bounded(Path("/dev/zero"), 1 << 20)
    (tmp_path / "a").write_text("x")
    assert read_bounded(tmp_path / "a", 1) == b"x"
    for words in (("--config", "/dev/zero"), ("--data.tokenizer", "/dev/zero"), ("--model", "/dev/zero")):
        assert main(["train", *words]) == 2
        assert "MB, which no such file needs" in capsys.readouterr().err


def test_a_name_that_no_file_can_have_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ("plan", "--model", "x" * 5000, "--cluster", "local", "--batch", "8", "--sequence", "8")
    for words in (plan, ("report", "x" * 300)):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert said.startswith("terrace: error: ")
        assert said.count("\n") == 1
        assert "too long" in said


def test_links_in_a_circle_are_an_error_of_the_system(tmp_path: Path) -> None:
    """On every Python: its own words and classes for them have changed."""
    loop, link, missing = tmp_path / "loop", tmp_path / "link", tmp_path / "missing" / "file"
    loop.symlink_to(loop)
    link.symlink_to(tmp_path / "real")
    for path in (loop, loop / "below"):
        with pytest.raises(OSError, match="Too many levels") as error:
            write_atomic(path, "text")
        assert error.value.errno == errno.ELOOP
    assert resolved(link) == (tmp_path / "real").resolve()
    assert resolved(missing) == missing.resolve()
    write_atomic(link, "text")
    assert (tmp_path / "real").read_text() == "text"
    assert link.is_symlink()
