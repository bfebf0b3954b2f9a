"""Models with mixtures of experts, small ones and two published ones."""

from dataclasses import replace

from bench import models
from terrace.model.config import ModelConfig, parse_model
from terrace.model.experts.config import ExpertsConfig
from terrace.model.hf.keys import CLAMPED

PLAIN = ExpertsConfig(num_experts=8, per_token=2, intermediate_size=40)
GROUPED = ExpertsConfig(
    num_experts=8,
    per_token=3,
    intermediate_size=24,
    gate="sigmoid",
    scale=1.5,
    num_groups=4,
    kept_groups=2,
    biased=True,
    shared_size=56,
)
SHARED = ExpertsConfig(
    num_experts=6, per_token=2, intermediate_size=24, normalized=False, shared_size=28, shared_gate=True
)
EXPERTS = {"plain": PLAIN, "grouped": GROUPED, "shared": SHARED}
GATED = {
    "noisy": replace(PLAIN, gate="noisy"),
    "cosine": replace(PLAIN, gate="cosine", router_size=4),
    "expert choice": replace(PLAIN, gate="expert_choice", normalized=False),
    "biases": replace(PLAIN, has_biases=True),
}


def mixture(
    experts: ExpertsConfig = PLAIN, layers: int = 4, dense_layers: tuple[int, ...] = (), **sizes: int
) -> ModelConfig:
    """A small Llama with these experts in all layers but the dense ones; beside biases, also the rest of gpt-oss."""
    table = {
        "model_type": "llama",
        "vocab_size": 101,
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
    }
    model = replace(parse_model(table | sizes), experts=replace(experts, dense_layers=dense_layers))
    return replace(model, activation=CLAMPED, has_sinks=True) if experts.has_biases else model


MIXTRAL, QWEN3_30B = map(parse_model, (models.MIXTRAL, models.QWEN3_30B))
