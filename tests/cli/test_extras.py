"""The command without words, and commands without the packages that they need."""

import re
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import tomli_w

from terrace import __version__
from terrace.base.extras import install
from terrace.cli.main import main
from terrace.train.layers import resolve_table
from tests.support.command_line import without_torch
from tests.support.nightly import nightly
from tests.support.tiny_runs import one_line

ROOT = Path(__file__).parents[2]


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
        ("generate", "run", "--prompt", "x"),
        ("probe", "--out", "new.toml"),
        *nightly(
            (("train",),),
            (("rl", "--task", "sort"),),
            (("eval", "run", "--data", "run"),),
            (("export", "run", "out"),),
            (("replay", "run", "--step", "1"),),
        ),
    ],
    ids=lambda words: words[0],
)
def test_without_the_extras_a_command_says_what_gets_them(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(tomli_w.dumps(resolve_table(None, {}, {})))
    done = without_torch(*words, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert one_line(done.stderr).startswith("terrace: error: ")
    assert done.stderr.rstrip().endswith(f": {install('torch')}"), done.stderr
    assert install("torch") == f"pip install -e '{ROOT}[train]'"


_IN_A_WHEEL = [
    "rich>=13",
    'tokenizers>=0.20; extra == "hf"',
    'jinja2>=3.1.6; extra == "hf"',
    'terrace-train[kernels]; extra == "liger"',
    'liger-kernel>=0.8.5; extra == "liger"',
    'triton>=3.6; (sys_platform == "linux" and platform_machine == "x86_64") and extra == "kernels"',
]


def test_the_command_of_an_extra_works_where_terrace_is_not_on_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a wheel it names the packages themselves; those of this distribution are named by no command."""
    monkeypatch.setattr(metadata, "requires", lambda name: _IN_A_WHEEL)
    assert install("jinja2", tmp_path) == "pip install 'tokenizers>=0.20' 'jinja2>=3.1.6'"
    assert install("liger-kernel", tmp_path) == "pip install 'triton>=3.6' 'liger-kernel>=0.8.5'"
    assert install("wandb", tmp_path) == "pip install wandb"

    def none(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", none)
    assert install("ray", tmp_path) == "pip install ray"
    (tmp_path / "pyproject.toml").touch()
    assert install("pyarrow", tmp_path) == f"pip install -e '{tmp_path}[data]'"


def test_nothing_tells_to_install_terrace_from_the_index() -> None:
    """It is not there: a command with the name of the distribution fails, or brings somebody else's package."""
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
    code = [path for folder in ("terrace", "bench", "examples") for path in (ROOT / folder).rglob("*.py")]
    for path in (*texts, *code):
        said = path.read_text(encoding="utf-8")
        assert not re.search(r"pip install[^\n]*terrace-train|pip install ['\"]?terrace\b", said), path
