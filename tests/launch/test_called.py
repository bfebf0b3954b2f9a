"""The name of the command in lines that propose one, and why a fork server ended."""

import signal
import sys
from pathlib import Path

import pytest

from terrace.launch.called import called
from terrace.launch.signals import ended_words


def script(folder: Path) -> Path:
    folder.mkdir(parents=True)
    path = folder / "terrace"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_command_has_the_name_by_which_it_was_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = script(tmp_path / "my venv" / "bin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "argv", ["my venv/bin/terrace", "train"])
    assert called() == "'my venv/bin/terrace'"
    monkeypatch.setattr(sys, "argv", [str(path)])
    assert called() == f"'{path}'"
    monkeypatch.setenv("PATH", str(path.parent))
    assert called() == "terrace"
    other = script(tmp_path / "other")
    monkeypatch.setattr(sys, "argv", [str(other)])
    assert called() == str(other)  # another one stands on the path


@pytest.mark.parametrize("argv", [[], ["/x/terrace/__main__.py"], ["pytest"], ["/nowhere/terrace"]])
def test_without_a_script_it_is_terrace(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert called() == "terrace"


def test_only_a_kill_is_put_down_to_memory() -> None:
    assert "memory runs out" in ended_words(-signal.SIGKILL)
    for code, said in ((1, "exited with code 1"), (-signal.SIGTERM, "SIGTERM"), (-signal.SIGSEGV, "SIGSEGV")):
        assert said in ended_words(code)
        assert "memory" not in ended_words(code)
