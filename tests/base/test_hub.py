"""Ids of the hub: never a path of this machine, in every place that names a model or data, refused in one line."""

import sys
from pathlib import Path
from typing import Any

import pytest

from terrace.base import hub
from terrace.base.errors import ConfigError
from terrace.data.files import find_data

SNAPSHOT = "hub/models--org--tiny/snapshots/" + "1" * 40


@pytest.mark.parametrize(
    ("name", "can_be"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("org/name@v1.0", True),
        ("org/name@refs/pr/1", True),
        ("gpt2", False),
        ("data/train.jsonl", False),
        ("here/other", False),  # of a folder that is there
        ("beside/other", False),
        ("./org/name", False),
        ("/org/name", False),
        ("org/na me", False),
        ("org/../name", False),
        ("a/b/c", False),
        ("", False),
    ],
)
def test_a_path_is_no_id(name: str, can_be: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "of" / "beside").mkdir(parents=True)
    assert hub.is_id(name, Path("of")) == can_be


def test_every_place_of_a_configuration_takes_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_fetched", lambda name, kind, *_: f"/{kind}/{name}")
    table: dict[str, Any] = {
        "model": "org/m",
        "weights": "org/m",
        "data": {
            "path": "org/d",
            "tokenizer": "org/m",
            "mixture": [{"path": "org/d", "weight": 2}, {"path": "web", "name": "w"}],
            "eval": {"one": "org/d", "two": {"path": "org/d", "split": "test"}, "three": "wiki.txt"},
        },
        "train": {"weights": "org/m", "steps": 3},
        "teacher": {"model": "org/m"},
        "reward": [{"model": "org/m"}, {"name": "length"}],
    }
    assert hub.with_folders(table, Path()) == {
        "model": "/model/org/m",
        "weights": "/model/org/m",
        "data": {
            "path": "/dataset/org/d",
            "tokenizer": "/model/org/m",
            "mixture": [{"path": "/dataset/org/d", "name": "org/d", "weight": 2}, {"path": "web", "name": "w"}],
            "eval": {"one": "/dataset/org/d", "two": {"path": "/dataset/org/d", "split": "test"}, "three": "wiki.txt"},
        },
        "train": {"weights": "/model/org/m", "steps": 3},
        "teacher": {"model": "/model/org/m"},
        "reward": [{"model": "/model/org/m"}, {"name": "length"}],
    }
    odd = {"data": 5, "train": None, "reward": {}, "model": {"model_type": "llama"}}
    assert hub.with_folders(odd, Path()) == odd


def test_without_the_library_a_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for ask in (hub.model_folder, hub.data_folder):
        with pytest.raises(ConfigError, match=r"org/name does not exist here; .* the package 'huggingface_hub': pip"):
            ask("org/name")
    with pytest.raises(ConfigError, match=r"org/tiny does not exist here; .* needs the package"):
        find_data(f"/nowhere/{SNAPSHOT}")
    assert not hub.fetch_again("/nowhere/else")
