"""What a linear layer keeps, exactly, and the bounds of its peaks; a gate of attention to the byte."""

from dataclasses import replace

import pytest

from terrace.model.config import ModelConfig, parse_model
from tests.simulate import test_activations
from tests.support.activations import MODELS
from tests.support.nightly import nightly

_SIZES = {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
_SIZES |= {"num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 24, "full_attention_interval": 1}
_GATED = parse_model(_SIZES | {"model_type": "qwen3_5_text", "linear_num_key_heads": 2, "linear_num_value_heads": 4})
_LINEAR = replace(_GATED, is_linear=True)
OF_HEADS = {"small": (2, 8, 8), "long keys": (2, 64, 32), "long values": (4, 16, 64)}


def measured(name: str, model: ModelConfig, compute: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    monkeypatch.setitem(MODELS, name, model)
    saved, forward, backward, predicted = test_activations.run_block(name, compute, 256, 1)
    assert sum(predicted.saved.values()) == saved
    return forward, predicted.forward_peak_bytes, backward, predicted.backward_peak_bytes


def test_a_gate_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, of_forward, backward, of_backward = measured("gated", _GATED, "fp32", monkeypatch)
    assert (of_forward, of_backward) == (forward, backward)


@pytest.mark.parametrize("compute", ["bf16", *nightly("fp32", "fp64")])
@pytest.mark.parametrize("name", OF_HEADS)
def test_a_linear_layer(name: str, compute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key_heads, key_dim, value_dim = OF_HEADS[name]
    sizes = replace(_LINEAR.delta, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim)
    found = measured(name, replace(_LINEAR, delta=sizes), compute, monkeypatch)
    for peak, bound in (found[:2], found[2:]):
        assert peak <= bound <= 1.2 * peak
