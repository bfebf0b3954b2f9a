"""First mistakes of new users: wrong folders, files and words, each refused with the right one."""

import shutil
from pathlib import Path

import pytest

from terrace.cli import worker
from tests.support.command_line import CommandLine, leave_launcher
from tests.support.hf_folder import write_folder
from tests.support.tiny_runs import write_run

_NO_RUN = "is not a run folder: it has no config.toml; did you mean 'run'?"
_CHECKPOINT = "run/checkpoints/step-00000002"
CASES = (
    ("train --config run.toml --data https://example.org/a.txt", "data https:/example.org/a.txt is a URL"),
    (
        "data lengths hf://datasets/a",
        "hf:/datasets/a is a URL, which is not read: download it first",
    ),
    (
        "train --config run.toml --data.eval text.txt",
        "data.eval = 'text.txt' must be a table: give data.eval.NAME = VALUE",
    ),
    (f"train --resume {_CHECKPOINT}", _NO_RUN),
    ("train --resume run/config.toml", _NO_RUN),
    (f"generate {_CHECKPOINT} --prompt a", _NO_RUN),
    ("eval run/config.toml --data text.txt", _NO_RUN),
    (f"export {_CHECKPOINT} out", _NO_RUN),
    (f"replay {_CHECKPOINT} --step 1", _NO_RUN),
    ("rl --resume run/checkpoints", _NO_RUN),
    (
        "train --config run.toml --plan run/config.toml",
        "is the file of a run, not of a plan alone: give it as --config run/config.toml",
    ),
    (
        "plan --scale --plan run/config.toml --model config.json --cluster lab --batch 8 --sequence 8",
        "give it as --config run/",
    ),
    ("simulate run", "run is a folder, not a plan: name a preset or a file"),
    ("report run --out page.pdf", "--out page.pdf: a page is written as HTML; name a file that ends in .html"),
    ("simulate --config run.toml --page step.png", "--page step.png: a page is written as HTML"),
    ("data lengths text.txt --sequence 0", "--sequence 0 must be at least 1"),
    ("data lengths text.txt --batch -1", "--batch -1 must be at least 1"),
    ("generate run hello", "unknown argument 'hello'; if it is the text: --prompt hello"),
    ("trian", "there is no command 'trian'; did you mean 'train'?"),
    ("help train", "write terrace COMMAND --help"),
    ("--plan zero3", "--plan comes after a command, as in terrace train --plan"),
    ("train --model hf/model-00001-of-00004.safetensors", "is a file of weights: give its folder, which also has the"),
    (
        "plan --model hf/model-00001-of-00004.safetensors --cluster lab --batch 8 --sequence 8",
        "is not a model: give a config.json or a folder",
    ),
    ("rl --config run.toml", "unknown section 'data'; that is a section of terrace train"),
    ("rl --task sort --model hf", "task 'sort' has a tokenizer of its own, of 12 tokens, and the model would write 96"),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's file, a model's folder, and as much of a run folder as these commands look at."""
    folder = tmp_path_factory.mktemp("strange")
    write_run(folder, 2, 1, plan="zero3")
    (folder / "hf").mkdir()
    write_folder(folder / "hf")
    (folder / _CHECKPOINT).mkdir(parents=True)
    (folder / "run" / "config.toml").write_text('[plan]\npreset = "zero3"\n')
    (folder / "run" / "metrics.jsonl").write_text("")
    return folder


@pytest.mark.parametrize(("line", "said"), CASES, ids=[line for line, _ in CASES])
def test_a_near_miss_is_told_what_was_meant(
    line: str,
    said: str,
    written: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(worker, "launch_local", lambda *_, **__: pytest.fail("a rank was started"))
    leave_launcher(monkeypatch)
    assert said in CommandLine(tmp_path, capsys).refusal(*line.split())
