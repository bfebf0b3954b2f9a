"""A folder with a GPT, and `terrace plan` and `terrace plan --scale` called in it."""

import json
from pathlib import Path

import pytest

from tests.support.command_line import CommandLine, Said

GPT = {
    "model_type": "gpt2",
    "vocab_size": 1000,
    "n_embd": 512,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 512,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


class Planning(CommandLine):
    """A folder with a model, and the command line called in this process."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(folder, capsys)
        self.model = folder / "config.json"
        self.model.write_text(json.dumps(GPT))

    def task(self, cluster: str = "frontier", batch: int = 16) -> list[object]:
        return ["--model", self.model, "--cluster", cluster, "--batch", batch, "--sequence", 256]

    def say(self, command: str, *words: str | Path, cluster: str = "frontier", batch: int = 16) -> Said:
        return self.call(command, *self.task(cluster, batch), *words)

    def refused(self, command: str, *words: str | Path, cluster: str = "frontier", batch: int = 16) -> str:
        return self.refusal(command, *self.task(cluster, batch), *words)

    def out(self) -> str:
        return self._capsys.readouterr().out

    def error(self) -> str:
        return self._capsys.readouterr().err


@pytest.fixture
def here(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Planning:
    monkeypatch.chdir(tmp_path)
    return Planning(tmp_path, capsys)
