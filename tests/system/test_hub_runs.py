"""A run from ids of the hub, from a mirror that the test serves: fetched once, pinned, resumed without a network."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hf_folder import write_model
from tests.support.hub_mirror import COMMITS, mirror_of
from tests.support.tiny_runs import environment, losses, one_line

pytest.importorskip("huggingface_hub", reason="ids are fetched with it")
SIZES = ("--train.sequence", "16", "--train.batch", "8", "--train.checkpoint_every", "2", "--optimizer.lr", "1e-3")

RANK = ("--cluster", "local", "--ranks", "1")


def terrace(*words: str | Path, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run `terrace` as a shell does: the library reads its environment when it is imported, which a warm start did."""
    command = [sys.executable, "-m", "terrace", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=330)


def write_rows(folder: Path, word: str) -> Path:
    (folder / "data").mkdir(parents=True)
    rows = [json.dumps({"text": f"The fox of line {number} {word} over the dog."}) for number in range(60)]
    (folder / "data" / "train.jsonl").write_text("\n".join(rows))
    return folder


@pytest.mark.nightly
def test_a_run_by_ids_goes_on_at_its_commits_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model")
    (model / "onnx").mkdir()
    (model / "onnx" / "model.safetensors").write_bytes(b"another form")
    rows = [write_rows(tmp_path / word, word) for word in ("jumps", "sleeps")]
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with mirror_of({"models/org/tiny-0.1B": [model], "datasets/org/rows": rows[:1]}) as (address, mirror):
        monkeypatch.setenv("HF_ENDPOINT", address)
        words = ("--model", "org/tiny-0.1B", "--data", "org/rows", *SIZES)
        said = terrace("simulate", *words[:2], "--train.batch", "8", cwd=tmp_path)
        assert said.returncode == 0, said.stderr
        assert not [path for path in mirror.fetched if path.endswith(".safetensors")], "a shape needs no weights"
        ran = terrace("train", *words, *RANK, "--train.steps", "2", "--folder", "run", cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        assert len(mirror.fetched) == len(set(mirror.fetched)), "nothing is fetched twice"
        assert not [path for path in mirror.fetched if "onnx" in path]
        mirror.repositories["datasets/org/rows"] = rows  # main moves on
        missing = terrace("train", "--model", "org/none", "--folder", "other", cwd=tmp_path)
        assert "org/none does not exist here, and could not be fetched as a model of the hub" in one_line(
            missing.stderr
        )
    config = (tmp_path / "run" / "config.toml").read_text()
    assert f"models--org--tiny-0.1B/snapshots/{COMMITS[0]}" in config
    assert f"datasets--org--rows/snapshots/{COMMITS[0]}" in config
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.rmtree(tmp_path / ".terrace-cache")
    resumed = terrace("train", "--resume", "run", "--train.steps", "4", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert len(losses(tmp_path / "run")) == 4


def test_a_cache_that_was_emptied_is_filled_at_the_same_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [write_rows(tmp_path / word, word) for word in ("jumps", "sleeps")]
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with mirror_of({"datasets/org/rows": rows[:1]}) as (address, mirror):
        monkeypatch.setenv("HF_ENDPOINT", address)
        first = terrace("data", "prepare", "--data", "org/rows", *SIZES[:4], cwd=tmp_path)
        assert first.returncode == 0, first.stderr
        mirror.repositories["datasets/org/rows"] = rows
        pinned = next((tmp_path / "home" / "hub" / "datasets--org--rows" / "snapshots").iterdir())
        shutil.rmtree(pinned.parents[1])
        again = terrace("data", "prepare", "--data", pinned, *SIZES[:4], cwd=tmp_path)
        assert again.returncode == 0, again.stderr
        assert [each.name for each in pinned.parent.iterdir()] == [COMMITS[0]]
        newest = terrace("data", "prepare", "--data", "org/rows", *SIZES[:4], cwd=tmp_path)
        assert newest.returncode == 0, newest.stderr
        assert {each.name for each in pinned.parent.iterdir()} == set(COMMITS)
