"""A tiny DeepSeek-V3 that predicts further tokens, as a user has it: train, resume, generate, export, adapters."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_folder import TEXT, write_folder
from tests.support.tiny_runs import losses, metrics, terrace

safetensors = pytest.importorskip("safetensors")
pytestmark = pytest.mark.timeout(360)

TABLE: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 96,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 6,
    "intermediate_size": 30,
    "moe_intermediate_size": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 128,
}
DATA = ("--data", "text.txt", "--train.sequence", "32", "--train.batch", "4")
TRAIN = ("train", "--ranks", "1", *DATA, "--train.schedule", "constant")
CLIPPED = ("--model", "model", "--optimizer.name", "muon", "--optimizer.qk_clip", "0.05")


def names(folder: Path) -> set[str]:
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safetensors.safe_open(path, "pt") as file:
            found |= set(file.keys())
    return found


@pytest.mark.nightly
def test_every_command_takes_the_layers(tmp_path: Path) -> None:
    def call(*words: str) -> str:
        done = terrace(*words, cwd=tmp_path)
        assert not done.returncode, done.stderr
        return done.stdout

    write_folder(tmp_path / "model", TABLE)
    (tmp_path / "text.txt").write_text(TEXT * 200)
    call(*TRAIN, *CLIPPED, "--train.steps", "4", "--folder", "whole")
    call(*TRAIN, *CLIPPED, "--train.steps", "2", "--folder", "parts", "--train.mtp_loss_weight", "0.3")
    call("train", "--resume", "parts", "--train.steps", "4")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert all(metrics(tmp_path / run)[-1]["further_tokens"] for run in ("parts", "whole"))  # means of other steps
    assert call("generate", "whole", "--prompt", "The ", "--tokens", "4") == call(
        "generate", "parts", "--prompt", "The ", "--tokens", "4"
    )
    call("export", "whole", "out")
    assert names(tmp_path / "out") == names(tmp_path / "model")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1

    adapted = ("--lora.rank", "4", "--lora.targets", "layers.*.attention.*")
    call(*TRAIN, "--model", "out", *adapted, "--train.steps", "2", "--folder", "adapted")
    call("train", "--resume", "adapted", "--train.steps", "3")
    assert metrics(tmp_path / "adapted")[-1]["further_tokens"]["cross_entropy"] > 0
    assert call("generate", "adapted", "--prompt", "The ", "--tokens", "4")
    call("export", "adapted", "merged")
    assert names(tmp_path / "merged") == names(tmp_path / "out")
    call("export", "adapted", "adapters", "--adapter")
    assert any(".layers.2.self_attn." in name for name in names(tmp_path / "adapters"))
