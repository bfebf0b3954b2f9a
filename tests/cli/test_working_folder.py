"""A working folder with files that are named as modules of Python, of torch and of Terrace: none is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from terrace.base import own_path
from tests.support.nightly import nightly
from tests.support.tiny_runs import environment, write_run

# Of the main process, the fork server and its tracker, ranks, replay and the generation of text.
SHADOWS = ["socket", "torch", "sympy", "queue", "types", "functools", "numpy", "selectors", "signal", "json", "enum"]
SHADOWS += ["copyreg", "struct", "tempfile", "typing", "random", "pandas", "yaml", "terrace/__init__"]
# As pip writes it; its own folder is the first that Python looks into.
SCRIPT = """import sys
from terrace.__main__ import main
if __name__ == "__main__":
    sys.exit(main())
"""
# One after the other, so that torch is imported once.
SEVERAL = """import sys
from terrace.__main__ import main
if __name__ == "__main__":
    for command in sys.argv[1:]:
        sys.argv[1:] = command.split()
        if code := main():
            sys.exit(code)
"""
REWARD = """import helper
def score(samples):
    return [helper.one(each.response) for each in samples]
"""
RL = ["--cluster.tiers.package.size", "2", "--cluster.tiers.node.size", "1", "--cluster.tiers.system.size", "1"]
RL += ["--plan", "ddp", "--plan.micro_batch", "8", "--run.rows", "1", "--model.hidden_size", "32", "--run.steps", "1"]
RL += ["--model.num_hidden_layers", "1", "--run.prompts", "4", "--run.mini_batch", "16", "--run.start_steps", "0"]


@pytest.fixture
def shadowed(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "terrace").mkdir(parents=True)
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + ' ')\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "terrace").write_text(SCRIPT)
    (tmp_path / "bin" / "several").write_text(SEVERAL)
    return folder


def call(folder: Path, *words: str, script: str = "terrace", **variables: str) -> str:
    line = [sys.executable, str(folder.parent / "bin" / script), *words]
    done = subprocess.run(
        line, cwd=folder, env=environment() | variables, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    ran = folder.parent / "ran"
    assert not ran.exists(), f"{words[0]} ran {ran.read_text()}"
    return done.stdout


@pytest.mark.timeout(350)
@pytest.mark.parametrize("more", [(), *nightly((("replay run --step 1", "generate run --prompt fox --tokens 2"),))])
def test_no_command_imports_a_module_of_the_working_folder(shadowed: Path, more: tuple[str, ...]) -> None:
    write_run(shadowed, 2, plan="ddp", steps=2)
    call(shadowed, "train --config run.toml --folder run", *more, script="several")


@pytest.mark.nightly  # learning from feedback is a module of its own, and its start as long as those above
@pytest.mark.timeout(350)
def test_learning_from_feedback_imports_its_reward_alone(shadowed: Path) -> None:
    (shadowed / "my_reward.py").write_text(REWARD)
    (shadowed / "helper.py").write_text("def one(text):\n    return float(len(text))\n")
    (shadowed / "rl.toml").write_text('[[reward]]\nfunction = "my_reward:score"\n')
    assert "reward" in call(shadowed, "rl", "--task", "sort", "--config", "rl.toml", *RL, "--folder", "learned")


def test_an_empty_part_of_pythonpath_is_not_the_working_folder(shadowed: Path) -> None:
    # Python itself imports these before any line of Terrace.
    for name in ("types", "functools", "signal", "enum", "typing", "copyreg", "terrace/__init__"):
        (shadowed / f"{name}.py").unlink()
    (shadowed / "terrace").rmdir()
    call(shadowed, "keys", PYTHONPATH=os.pathsep + environment()["PYTHONPATH"])


def test_the_path_keeps_what_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), "/elsewhere"])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    own_path.leave_working_folder()
    assert sys.path == ["/elsewhere"]
    assert own_path.safe_flags() == ("-P",)
    # A checkout that is not installed is found through the working folder alone.
    monkeypatch.chdir(Path(own_path.__file__).parents[2])
    monkeypatch.setattr(sys, "path", ["", "/elsewhere"])
    own_path.leave_working_folder()
    assert (sys.path, own_path.safe_flags()) == (["", "/elsewhere"], ())
    # The user has named it.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    own_path.leave_working_folder()
    assert (sys.path, own_path.safe_environment()) == (["", "/elsewhere"], {})
