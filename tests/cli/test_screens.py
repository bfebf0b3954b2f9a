"""Standard output that is full, closed or gone: one line from a short command, and a run that goes on."""

import errno
import io
import json
import os
import sys
from pathlib import Path

import pytest

from terrace.cli.main import main
from terrace.cli.output import outlive_output, printable_output
from tests.support import warm
from tests.support.tiny_runs import environment, write_run

SHORT = ("--help", "--version", "keys", "train --help", "simulate --config run.toml", "data lengths --data text.txt")


def test_a_full_disk_is_one_line_in_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, 2)
    monkeypatch.chdir(tmp_path)
    for words in SHORT:
        with open("/dev/full", "w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            assert _code(words) == 1, words
            full.flush()  # as the interpreter does at exit
        said = capsys.readouterr().err
        assert said.startswith("terrace: error: cannot write standard output: No space left on device: "), words
        assert said.count("\n") == 1, words


def test_a_closed_output_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["keys"]) == 1
    assert capsys.readouterr().err.startswith("terrace: error: cannot write standard output: it is closed: ")


@pytest.mark.parametrize("kind", ["full", "closed"])
def test_errors_that_cannot_be_said_keep_their_code(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full if kind == "full" else None)
        assert main(["train", "--nothing"]) == 2


def test_an_error_of_the_command_comes_before_that_of_the_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["plan", "--model", "nowhere"]) == 2
    assert "standard output" not in capsys.readouterr().err


def test_a_working_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for words in ("keys", "train", "report x", "generate x --prompt a"):
        assert _code(words) == 2
        assert capsys.readouterr().err.startswith("terrace: error: the working folder is gone (")


def test_an_error_of_the_machine_names_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/a\nb")

    monkeypatch.setattr("terrace.cli.keys.run", full)
    assert main(["keys"]) == 1
    assert capsys.readouterr().err.startswith("terrace: error: /tmp/a b: No space left on device; free space there; ")


def test_an_error_without_a_file_proposes_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object) -> int:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    monkeypatch.setattr("terrace.cli.keys.run", refused)
    assert main(["keys"]) == 1
    assert capsys.readouterr().err == "terrace: error: Connection refused\n"


class _Filling(io.StringIO):
    # A disk with room for one line.
    def write(self, text: str) -> int:
        if self.getvalue():
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_a_run_goes_on_without_its_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(sys, "stdout", stream := _Filling())
    with printable_output():
        outlive_output(said.append)
        for number in range(5):
            print(f"step {number}", end="", flush=True)
    assert stream.getvalue() == "step 0"
    assert said == ["standard output cannot be written (No space left on device): the run goes on without its screen"]


def test_a_screen_that_was_lost_before_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(sys, "stdout", None)
    with printable_output():
        outlive_output(lambda words: None)
        print("lost")
        outlive_output(said.append)
    assert len(said) == 1


@pytest.mark.timeout(120)
def test_training_ends_well_on_a_full_screen_disk(tmp_path: Path) -> None:
    write_run(tmp_path, 1, steps=3, log_every=1)
    words = ["train", "--config", "run.toml", "--folder", "run"]
    training = warm.Command(words, tmp_path, environment(), screen="/dev/full")
    _, errors = training.communicate(100.0)
    assert training.returncode == 0, errors
    assert errors.count("goes on without its screen\n") == 1
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "finished"
    assert sum("goes on without its screen" in str(each.get("text")) for each in events) == 1


def _code(words: str) -> object:
    try:
        return main(words.split())
    except SystemExit as leaving:
        return leaving.code
