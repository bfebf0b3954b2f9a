"""Models with one output a token: the scores of `transformers` in both directions, and clear refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from terrace.base.errors import ModelError
from terrace.model.block_operations import SCORE
from terrace.model.config import load_model, parse_model, to_table
from terrace.model.hf.families import FAMILIES
from terrace.model.hf.pretrained import Pretrained
from terrace.model.hf.written import write_pretrained
from terrace.train.trained import load_trained
from tests.support.families import TABLES, TOKENS, our_logits, our_values, randomise, their_model, transformers

NAMES = ["llama", "llama, tied, biases", "mistral", "qwen2, window", "qwen3", "gpt_neox", "gpt2", "qwen3_moe"]
WITHIN = 1e-5


@torch.no_grad()
def their_scores(folder: Path) -> Tensor:
    """The score of each row's last token, (B): all that `transformers` returns."""
    experts = {} if load_model(str(folder)).experts is None else {"experts_implementation": "eager"}
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, **experts)
    # One row at a time needs no padding, before which they would take the score.
    return torch.cat([model.eval()(row[None]).logits for row in TOKENS])[:, 0]


def our_scores(folder: Path) -> Tensor:
    weights = Pretrained(folder)
    weights.check()
    return our_logits(weights.config, weights.value, torch.float32)


def their_scored(folder: Path, table: dict[str, Any], num_labels: int = 1) -> None:
    config = transformers.AutoConfig.for_model(**table, num_labels=num_labels)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    randomise(model.parameters())
    model.save_pretrained(folder)


@pytest.mark.parametrize("name", NAMES)
def test_their_model_has_the_same_scores_here(name: str, tmp_path: Path) -> None:
    their_scored(tmp_path, TABLES[name])
    here, there = our_scores(tmp_path), their_scores(tmp_path)
    assert here.shape == TOKENS.shape
    assert there.std() > 0.05, "the scores tell nothing"
    assert (here[:, -1] - there).abs().max() <= WITHIN * there.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_our_model_has_the_same_scores_there(name: str, tmp_path: Path) -> None:
    config = replace(parse_model(TABLES[name]), scalar_head=True)
    values = our_values(config, torch.float32)
    write_pretrained(tmp_path / "out", config, values, "fp32")
    assert load_model(str(tmp_path / "out")) == config
    here, there = our_logits(config, values, torch.float32), their_scores(tmp_path / "out")
    assert (here[:, -1] - there).abs().max() <= WITHIN * there.abs().max()


def test_a_folder_of_a_causal_model_lacks_the_score_alone(tmp_path: Path) -> None:
    their_model(tmp_path, TABLES["llama"], torch.float32)
    config = replace(load_model(str(tmp_path)), scalar_head=True)
    weights = Pretrained(tmp_path, config)
    weights.check()
    assert weights.lacks_score
    assert torch.equal(weights.value("head", "norm.weight"), Pretrained(tmp_path).value("head", "norm.weight"))
    with pytest.raises(ModelError, match=SCORE):
        weights.value("head", SCORE)
    their_scored(tmp_path / "scored", TABLES["llama"])
    scored = Pretrained(tmp_path / "scored")
    assert not scored.lacks_score
    # A model of tokens cannot begin from it.
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight"):
        Pretrained(tmp_path / "scored", replace(scored.config, scalar_head=False)).check()
    with pytest.raises(ModelError, match="a score, and predicts no token: name a model with an output matrix"):
        load_trained(tmp_path / "scored", tokenizer="bytes")


def test_other_numbers_of_labels_are_refused(tmp_path: Path) -> None:
    their_scored(tmp_path, TABLES["llama"], num_labels=3)
    with pytest.raises(ModelError, match=r"num_labels = 3 is not implemented: a reward model has one; set num_labels"):
        load_model(str(tmp_path))
    table = TABLES["llama"] | {"architectures": ["LlamaForSequenceClassification"]}
    with pytest.raises(ModelError, match=r"num_labels = 2 is not implemented"):
        parse_model(table)
    assert parse_model(table | {"num_labels": 1}).scalar_head
    with pytest.raises(ModelError, match="its score has a bias: save the model as LlamaForSequenceClassification"):
        parse_model(table | {"architectures": ["LlamaForTokenClassification"], "num_labels": 1})


@pytest.mark.parametrize("name", NAMES)
def test_the_table_says_it(name: str) -> None:
    config = replace(parse_model(TABLES[name]), scalar_head=True)
    assert parse_model(to_table(config)) == config
    assert to_table(config)["architectures"] == [FAMILIES[config.family].scored_architecture]


def test_a_family_without_scores_there_is_not_written(tmp_path: Path) -> None:
    config = replace(parse_model(TABLES["glm4_moe"]), scalar_head=True)
    with pytest.raises(ModelError, match="transformers has no Glm4MoeForSequenceClassification: use the run's"):
        write_pretrained(tmp_path / "out", config, our_values(config), "fp32")
