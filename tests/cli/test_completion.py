"""`terrace completion`: the scripts complete in the shells themselves, where these are installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from terrace.cli.completion import all_words, bash, fish, zsh
from terrace.cli.main import _COMMANDS, main

FOUND = all_words()


def completed(script: Path, *words: str) -> set[str]:
    """Words that bash offers for the last of `words`."""
    given = " ".join(f"'{word}'" for word in words)
    code = f'source {script}; COMP_WORDS=({given}); COMP_CWORD={len(words) - 1}; _terrace; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, timeout=20)
    return set(done.stdout.split())


def test_bash_completes_commands_options_and_values(tmp_path: Path) -> None:
    (tmp_path / "terrace.bash").write_text(bash(FOUND))
    script = tmp_path / "terrace.bash"
    assert completed(script, "terrace", "") >= set(_COMMANDS)
    assert completed(script, "terrace", "exp") == {"explain", "export"}
    assert completed(script, "terrace", "generate", "--ch") == {"--chat"}
    assert completed(script, "terrace", "generate", "--dtype", "") == {"fp32", "bf16", "fp64"}
    assert completed(script, "terrace", "plan", "--allow") == {"--allow", "--allow-rounding"}
    assert "lengths" in completed(script, "terrace", "data", "")
    assert completed(script, "terrace", "data", "lengths", "--dist") == {"--distribution"}
    assert completed(script, "terrace", "completion", "") >= {"bash", "zsh", "fish"}
    assert completed(script, "terrace", "train", "--folder", "runs/export", "--resu") == {"--resume"}
    assert completed(script, "terrace", "rl", "--run.resp") == {"--run.responses"}
    assert completed(script, "terrace", "train", "--optimizer.l") == {"--optimizer.lr"}
    assert completed(script, "terrace", "train", "--run.r") == set()
    assert completed(script, "terrace", "keys", "alg") >= {"algorithm", "algorithm.clip_low"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_script(shell: str, tmp_path: Path) -> None:
    text = {"zsh": zsh, "fish": fish}[shell](FOUND)
    assert all(command in text for command in _COMMANDS)
    for words in FOUND.values():
        assert all(option.lstrip("-") in text for option in words.options)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(text)
    assert subprocess.run([shell, "-n", tmp_path / "script"], check=False, timeout=20).returncode == 0


def test_the_command_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == bash(FOUND)
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
