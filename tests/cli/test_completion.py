"""`terrace completion`: the script completes in the shells themselves, where these are installed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from terrace.cli.completion import parser_for
from terrace.cli.main import all_help, main
from tests.support.nightly import every
from tests.support.tiny_runs import environment

ASK = """
export PATH={bin}:$PATH
source {script}
COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}; COMP_TYPE=9
_python_argcomplete terrace "" ""
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "terrace.bash"
    done = subprocess.run(
        [sys.executable, "-m", "terrace", "completion", "bash"],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    path.write_text(done.stdout)
    return path


@pytest.mark.parametrize(
    ("line", "words"),
    every(
        3,
        [
            ("terrace ", {"-h", "--help", "-V", "--version", *all_help()}),
            ("terrace exp", {"export"}),
            ("terrace generate --ch", {"--chat"}),
            ("terrace generate --dtype ", {"fp32", "bf16", "fp64"}),
            ("terrace data lengths --dist", {"--distribution"}),
            ("terrace completion ", {"bash", "zsh", "fish", "-h", "--help"}),
            ("terrace train --folder runs/export --resu", {"--resume"}),
            ("terrace train --optimizer.l", {"--optimizer.lr"}),
            ("terrace rl --run.resp", {"--run.responses"}),
            ("terrace train --run.r", set()),
            ("terrace keys algorithm.na", {"algorithm.name"}),
        ],
    ),
)
def test_bash_completes_commands_options_keys_and_values(line: str, words: set[str], script: Path) -> None:
    code = ASK.format(bin=Path(sys.executable).parent, script=script, line=line)
    done = subprocess.run(
        ["bash", "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert {word.strip() for word in done.stdout.splitlines() if word} == words


def test_a_line_needs_the_options_of_its_own_command_alone() -> None:
    (commands,) = (each for each in parser_for("terrace generate --t")._actions if each.dest == "command")
    assert list(commands.choices or ()) == ["generate"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_reads_its_script(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "terrace" in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(text)
    assert subprocess.run([shell, "-n", tmp_path / "script"], check=False, timeout=20).returncode == 0


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
