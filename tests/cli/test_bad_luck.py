"""Mishaps of a run: a second one in its folder, tokenizers without a token for a text, names that are no text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import terrace
from terrace.base.errors import CheckpointError, ConfigError, DataError, ModelError
from terrace.base.schema import parse_override
from terrace.cli.main import main
from terrace.data.files import find_documents
from terrace.data.pieces import Unit
from terrace.data.text import read_text
from terrace.data.tokenizer import load_tokenizer
from terrace.train.run_folder import LOCK, folder_lock
from tests.support.nightly import nightly
from tests.support.tiny_runs import write_run


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    with (
        folder_lock(tmp_path),
        pytest.raises(CheckpointError, match="another run is writing"),
        folder_lock(tmp_path, wait_s=0),
    ):
        pass
    with folder_lock(tmp_path, wait_s=0):
        assert (tmp_path / LOCK).is_file()


def test_a_folder_that_cannot_be_written_is_not_locked(tmp_path: Path) -> None:
    with folder_lock(tmp_path / "nowhere"):
        assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    "model",
    [
        {"type": "WordLevel", "vocab": {"the": 0}, "unk_token": "[UNK]"},
        {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]], "byte_fallback": False},
    ],
)
def test_a_tokenizer_without_an_unknown_word_is_refused(tmp_path: Path, model: dict[str, object]) -> None:
    path = tmp_path / "tokenizer.json"
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], **empty, "model": model}))
    tokenizer = load_tokenizer(path)
    for encode in (lambda: tokenizer.encode("xyz"), lambda: tokenizer.encode_batch(["the", "xyz"])):
        with pytest.raises(DataError, match=r"cannot encode the text .*--data\.tokenizer"):
            encode()


def test_words_of_a_shell_that_are_no_text_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--train\.prompt .*not UTF-8"):
        parse_override("train.prompt", "caf\udce9")


def test_a_flag_that_is_no_text_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_run(tmp_path, 2)
    assert main(["train", "--config", str(config), "--data", str(tmp_path / "caf\udce9")]) == 2
    assert "not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(("encoding", "named"), [("utf-16", "-f utf-16"), ("latin1", "-f latin1")])
def test_the_encoding_to_convert_from_is_that_of_the_file(tmp_path: Path, encoding: str, named: str) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("é text".encode(encoding))
    assert find_documents(file) == [file]
    unit = Unit(file, "text", 0, file.stat().st_size, True, file.stat().st_size)
    with pytest.raises(DataError, match=named):
        list(read_text(unit))


def _trainer(blocks: list[torch.nn.Module], **given: Any) -> terrace.Trainer:
    loss = torch.nn.CrossEntropyLoss(reduction="sum")
    return terrace.Trainer(blocks, plan="zero3", cluster="local", loss=loss, lr=1e-2, **given)


@pytest.mark.parametrize("name", ["muon", *nightly("lion")])
def test_a_preset_is_for_the_optimizer_that_the_trainer_is_given(name: str) -> None:
    trainer = _trainer([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)], optimizer={"name": name})
    assert trainer.plan.update == name
    inputs, labels = torch.randn(8, 4), torch.arange(8) % 3
    assert trainer.step(inputs, labels).num_tokens == 8
    with pytest.raises(ConfigError, match="lr = nan"):
        trainer.step(inputs, labels, lr=float("nan"))


def test_a_module_that_stands_twice_is_refused() -> None:
    layer = torch.nn.Linear(4, 4)
    with pytest.raises(ModelError, match=r"block\.0 and block\.1 are the same module"):
        _trainer([layer, layer, torch.nn.Linear(4, 3)])


def test_a_prompt_that_is_no_text_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path), "--prompt", "caf\udce9"]) == 2
    assert "not UTF-8" in capsys.readouterr().err
