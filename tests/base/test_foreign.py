"""Files that a stranger may have made: read if they are regular, of bounded size, and in their folder."""

import json
import os
import socket
import time
import tomllib
from pathlib import Path

import pytest

from terrace.base import foreign
from terrace.base.errors import ConfigError
from terrace.base.parsing import parse_json, parse_toml
from terrace.base.schema import read_table

pytestmark = pytest.mark.timeout(60)


def lines_of(path: Path) -> list[str]:
    return [*foreign.read_lines(path)]


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "zero").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "socket"))
        for name, kind in (("pipe", "a pipe"), ("folder", "a folder"), ("zero", "a device"), ("socket", "a socket")):
            for read in (
                foreign.read_file,
                foreign.read_text,
                foreign.check_file,
                lambda path: [*foreign.read_lines(path)],
            ):
                with pytest.raises(OSError, match=f"it is {kind}, not a regular file"):
                    read(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        foreign.read_text(tmp_path / "none", tmp_path)


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    for read in (foreign.read_text, lines_of):
        with pytest.raises(OSError, match="more than"):
            read(tmp_path / "sparse")
    monkeypatch.setattr(foreign, "_LINE_BYTES", 10)
    (tmp_path / "lines").write_bytes(b"short\n" + b"x" * 95 + b"\nlast\xff")
    assert [*foreign.read_lines(tmp_path / "lines")] == ["short\n", "x" * 10, "last\ufffd"]


def test_links_out_of_a_folder_are_refused(tmp_path: Path) -> None:
    folder, secret = tmp_path / "model", tmp_path / "key"
    folder.mkdir()
    secret.write_text("secret")
    (folder / "real").write_text("own")
    (folder / "inside").symlink_to("real")
    (folder / "out").symlink_to(secret)
    (folder / "twice").symlink_to("out")
    (folder / "up").symlink_to("..")
    assert foreign.read_text(folder / "inside", folder) == "own"
    for name in ("out", "twice", "up/key", "../key"):
        with pytest.raises(PermissionError, match="it is a link out of"):
            foreign.read_text(folder / name, folder)
        with pytest.raises(ConfigError, match="it is a link out of"):
            read_table(folder / name, folder)
    # The folder itself may be a link, and a file that the user names, too.
    (tmp_path / "linked").symlink_to(folder)
    assert foreign.read_text(tmp_path / "linked" / "real", tmp_path / "linked") == "own"
    assert foreign.read_text(folder / "out") == "secret"


def test_the_cache_of_hugging_face_is_read(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    (folder / "sub").mkdir(parents=True)
    (blobs / "abc").write_text("text")
    (folder / "vocab.txt").symlink_to("../../blobs/abc")
    (folder / "sub" / "vocab.txt").symlink_to("../../../blobs/abc")
    assert foreign.read_text(folder / "vocab.txt", folder) == "text"
    assert foreign.read_text(folder / "sub" / "vocab.txt", folder / "sub") == "text"
    # A folder that only looks like it.
    (tmp_path / "key").write_text("secret")
    (blobs / "evil").symlink_to(tmp_path / "key")
    (folder / "evil.txt").symlink_to("../../blobs/evil")
    other = tmp_path / "other" / "snapshots" / "0123"
    other.mkdir(parents=True)
    (tmp_path / "other" / "blobs").symlink_to(tmp_path)
    (other / "key.txt").symlink_to("../../blobs/key")
    for path in (folder / "evil.txt", other / "key.txt"):
        with pytest.raises(PermissionError, match="it is a link out of"):
            foreign.read_text(path, path.parent)


@pytest.mark.parametrize(
    "text",
    [
        "a." * 500_000 + "b = 1",
        '"a".' * 200_000 + "b = 1",
        "[" + "a . " * 200_000 + "b]",
        "x = {" + "a." * 200_000 + "b = 1}",
        'x = """y"""""\n' + "a." * 200_000 + "b = 1",
        "x = " + "[" * 100_000,
        '"' * 1_000_001,
        '"""\\' * 200_000,
        "a" * 1_000_000,
        "a-" * 500_000,
    ],
    ids=lambda text: text[:6],
)
def test_a_toml_text_is_refused_in_a_time_that_its_size_bounds(text: str) -> None:
    begin_s = time.process_time()
    with pytest.raises(ValueError, match=r"parts|nested|Expected"):
        parse_toml(text)
    assert time.process_time() - begin_s < 5


def test_dots_in_strings_and_comments_are_no_parts() -> None:
    dots = "a." * 100
    lines = (f"# {dots}", f'x = "{dots}"', f"y = '{dots}'", f'z = """{dots}', f'{dots}"""', f"w = '''{dots}'''")
    text = "\n".join([*lines, f"v.{'a.' * 20}b = 1.5"])
    assert parse_toml(text) == tomllib.loads(text)


def test_deep_and_repeated_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)
    names = [f'"key{number}": 1' for number in range(100_000)]
    (tmp_path / "a.json").write_text("{" + ",".join([*names, names[-1]]) + "}")
    begin_s = time.process_time()
    with pytest.raises(ConfigError, match="the key 'key99999' is there twice"):
        read_table(tmp_path / "a.json")
    assert time.process_time() - begin_s < 5
    assert json.loads("[1]") == parse_json("[1]")
