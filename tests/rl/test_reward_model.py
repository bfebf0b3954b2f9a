"""Rewards by a model are its output at the last token of each response, computed alone and unpadded."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from terrace.base.errors import ConfigError, ModelError
from terrace.model.config import load_model
from terrace.model.decoder import build_blocks
from terrace.model.hf.pretrained import Pretrained
from terrace.rl.keys import RewardKeys
from terrace.rl.making import reward_settings
from terrace.rl.resolve import resolve
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows
from terrace.rl.workers.reward_model import RewardModel
from tests.support.hf_folder import TABLE, write_folder
from tests.support.toys import cluster_of, run_blocks

SCORED = {**TABLE, "architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}


def alone(folder: Path, text: torch.Tensor) -> float:
    pretrained = Pretrained(folder)
    blocks = build_blocks(pretrained.config, device="cpu", dtype=torch.float32)
    for name, block in zip(("embedding", "layers.0", "layers.1", "layers.2", "head"), blocks, strict=True):
        for parameter, value in block.named_parameters():
            value.data.copy_(pretrained.value(name, parameter))
    with torch.no_grad():
        return float(run_blocks(blocks, text[None])[0, -1])


def test_a_reward_is_the_output_at_the_last_token(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, SCORED)
    config = resolve("sort", None, {}, {"run": {"rows": 1, "start_steps": 0}})
    plan = replace(config.plan, params="device", grads="device", optimizer="device", mapping={}, schedule=None)
    run = replace(config.run, max_prompt=4, max_response=5, mini_batch=4)
    small = replace(config, cluster=cluster_of(1), plan=replace(plan, micro_batch=4), run=run)
    generator = torch.Generator().manual_seed(0)

    def tokens(*lengths: int) -> Ragged:
        return Ragged.of([torch.randint(0, 90, (length,), generator=generator) for length in lengths])

    # The longest of both, and an empty response, whose reward is at the end of its prompt.
    rows = Rows({"prompts": tokens(4, 1, 2, 3), "responses": tokens(5, 3, 0, 1)})
    found = RewardModel(None, settings=reward_settings(small, "reward_0", str(folder))).rewards(rows).tensor("reward")
    texts = [torch.cat(row) for row in zip(rows.ragged("prompts").rows(), rows.ragged("responses").rows(), strict=True)]
    torch.testing.assert_close(found, torch.tensor([alone(folder, text) for text in texts]), rtol=0, atol=1e-5)
    assert len(set(found.tolist())) == 4


def test_another_model_is_no_reward_model(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    assert not load_model(str(folder)).scalar_head
    with pytest.raises(ModelError, match="is no reward model: its head has 96 outputs, and a reward is one"):
        reward_settings(resolve("sort", None, {}, {}), "reward_0", str(folder))
    with pytest.raises(ConfigError, match=r"give one of them, and \[\[reward\]\] again for another"):
        RewardKeys(function="a:b", model="c")
