"""The command without words, and commands without the packages that they need."""

from pathlib import Path

import pytest
import tomli_w

from terrace import __version__
from terrace.cli.main import main
from terrace.train.config import resolve_table
from tests.support.command_line import without_torch
from tests.support.tiny_runs import one_line


def test_terrace_alone_shows_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"]):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 0
        assert "find the fastest plan" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["-V"])
    assert capsys.readouterr().out == f"terrace {__version__}\n"


@pytest.mark.parametrize(
    "words",
    [
        ("train",),
        ("rl", "--task", "sort"),
        ("generate", "run", "--prompt", "x"),
        ("eval", "run", "--data", "run"),
        ("export", "run", "out"),
        ("probe", "--out", "new.toml"),
        ("replay", "run", "--step", "1"),
    ],
    ids=lambda words: words[0],
)
def test_without_the_extras_a_command_says_what_gets_them(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(tomli_w.dumps(resolve_table(None, {}, {})))
    done = without_torch(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert one_line(done.stderr).startswith("terrace: error: ")
    assert done.stderr.rstrip().endswith(": pip install 'terrace-train[train]'"), done.stderr
