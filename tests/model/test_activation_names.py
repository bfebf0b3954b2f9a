"""Names of activations: each that `transformers` has for a function built here gives the logits of `transformers`."""

from pathlib import Path

import pytest
import torch

from terrace.base.errors import ModelError
from terrace.model.config import parse_model
from terrace.model.hf.keys import ACTIVATIONS
from terrace.model.hf.pretrained import Pretrained
from terrace.model.layers import ACTIVATIONS as FUNCTIONS
from tests.support.families import TABLES, WITHIN, our_logits, their_logits, their_model, transformers

KEYS = {"llama": "hidden_act", "gpt2": "activation_function"}


@pytest.mark.parametrize("family", KEYS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_model_with_an_activation_has_the_logits_of_transformers(family: str, name: str, tmp_path: Path) -> None:
    their_model(tmp_path, TABLES[family] | {KEYS[family]: name})
    pretrained = Pretrained(tmp_path)
    assert pretrained.config.activation == ACTIVATIONS[name]
    here = our_logits(pretrained.config, pretrained.value, torch.float64)
    there = their_logits(tmp_path, torch.float64)
    assert (here - there).abs().max() <= WITHIN[torch.float64] * there.abs().max()


def test_every_name_of_a_function_that_is_built_is_known() -> None:
    """Functions of `transformers` that equal one of these everywhere, to rounding, have their names here."""
    values = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    for name in _without_parameters():
        theirs = transformers.activations.ACT2FN[name](values)
        alike = [ours for ours, function in FUNCTIONS.items() if torch.allclose(function(values), theirs, 1e-9, 1e-9)]
        assert alike == ([ACTIVATIONS[name]] if name in ACTIVATIONS else []), name


@pytest.mark.parametrize("name", ["quick_gelu", "gelu_10", "relu2", "gelu_fats"])
def test_other_functions_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"hidden_act = '{name}' is not implemented"):
        parse_model(TABLES["llama"] | {"hidden_act": name})


def _without_parameters() -> list[str]:
    return [name for name in transformers.activations.ACT2CLS if name not in ("prelu", "xielu")]
