"""Files and folders that commands write have the mode that the user's umask allows."""

import stat
from pathlib import Path

import pytest

from tests.support.hf_folder import write_folder
from tests.support.nightly import nightly
from tests.support.tiny_runs import terrace

_COMMANDS = (
    "train --model base --data text.txt --data.cache cache --folder run --ranks 1 --plan ddp --lora.rank 2 "
    "--train.steps 2 --train.batch 2 --train.sequence 16 --train.warmup_steps 1 --train.rank_logs true "
    "--train.profile 2-2",
    "export run whole",
    "export run adapter --adapter",
    "report run",
    "data prepare --data text.txt --data.tokenizer base/tokenizer.json --data.cache prepared",
    "plan --model base --cluster dgx-a100 --nodes 1 --batch 8 --sequence 32 --axes data",
    "plan --scale --plan plan.toml --picture scale.svg",
    "simulate plan.toml --page step.html --trace trace.json",
)


@pytest.mark.parametrize("umask", [*nightly(0o002), 0o027])
def test_files_and_folders_have_the_mode_of_the_umask(umask: int, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    write_folder(base)
    for path in base.iterdir():  # as some downloads are: what is carried along must not keep it
        path.chmod(0o400)
    (tmp_path / "text.txt").write_text("The fox jumps over the lazy dog.\n" * 200)
    before = set(tmp_path.rglob("*"))
    for words in _COMMANDS:
        done = terrace(*words.split(), cwd=tmp_path, umask=umask)
        assert done.returncode == 0, f"{words}\n{done.stderr}"
    made = set(tmp_path.rglob("*")) - before
    assert {"plan.toml", "report.html", "model.safetensors", "adapter_model.safetensors", "config.toml"} <= {
        path.name for path in made
    }
    wrong = [
        f"{path.relative_to(tmp_path)}: {stat.S_IMODE(path.stat().st_mode):o}"
        for path in sorted(made)
        if stat.S_IMODE(path.stat().st_mode) != (0o777 if path.is_dir() else 0o666) & ~umask
    ]
    assert not wrong, "\n".join(wrong)
