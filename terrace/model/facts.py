"""Properties of a whole model, for the packages outside terrace.model. Needs no torch.

No code outside terrace.model reads a field of `ModelConfig`. What a block computes is described by its operations
(terrace.model.operations); everything about the model as a whole is a function here.
"""

from dataclasses import replace

from terrace.base.errors import ModelError
from terrace.model.config import ModelConfig


def family_of(config: ModelConfig) -> str:
    """Family that defines the layout of the model's files."""
    return config.family


def layers_of(config: ModelConfig) -> int:
    return config.num_layers


def vocabulary_size(config: ModelConfig) -> int:
    return config.vocab_size


def has_scalar_head(config: ModelConfig) -> bool:
    """Whether the model gives one number per token instead of logits: a reward model or a critic."""
    return config.scalar_head


def with_scalar_head(config: ModelConfig) -> ModelConfig:
    """This model with one output number per token instead of logits."""
    return replace(config, scalar_head=True, num_mtp_layers=0)


def num_further_tokens(config: ModelConfig) -> int:
    """How many tokens after the next one the model predicts, each with a layer of its own."""
    return config.num_mtp_layers


def next_token_alone(config: ModelConfig) -> ModelConfig:
    """This model without the layers that predict further tokens."""
    return replace(config, num_mtp_layers=0)


def initial_std(config: ModelConfig) -> float:
    return config.init_std


def positions_of(config: ModelConfig) -> int:
    """`max_positions` of the configuration, which is a limit only if `longest_row` is not 0."""
    return config.max_positions


def longest_row(config: ModelConfig) -> int:
    """Largest row length with learned positions; 0: no limit."""
    return config.max_positions if config.learned_positions else 0


def longest_text(config: ModelConfig) -> int:
    """Largest number of positions of a sequence that is being generated (`ModelConfig.most_positions`); 0: no limit."""
    return config.most_positions


def rope_limit(config: ModelConfig) -> int:
    """Largest row length up to which RoPE frequencies do not depend on the length; 0: no limit."""
    return config.rope_limit


def layer_windows(config: ModelConfig) -> tuple[int, ...]:
    """Distinct sliding windows of the layers, ascending; 0: none."""
    return config.windows


def route_width(config: ModelConfig) -> tuple[int, int]:
    """(Experts that a token passes in all layers together, experts of a layer); (0, 0) without experts."""
    if config.experts is None:
        return 0, 0
    layers = config.num_layers - len(config.experts.dense_layers)
    return layers * config.experts.per_token, config.experts.num_experts


LOOKS_AHEAD = "the experts of a token depend on later tokens"  # why a model is not causal


def is_dense(config: ModelConfig) -> bool:
    return config.experts is None


def has_linear_layers(config: ModelConfig) -> bool:
    """Whether some layers have the gated delta rule in place of attention."""
    return config.is_linear or any(kind.is_linear for kind in config.kinds)


def has_attention(config: ModelConfig) -> bool:
    """Whether some layer has attention."""
    return not all(config.of_layer(layer).is_linear for layer in range(config.num_layers))


def is_causal(config: ModelConfig) -> bool:
    """Whether no token depends on later ones; false with expert-choice gates."""
    return config.experts is None or not config.experts.is_noncausal


def refuse_non_causal(config: ModelConfig) -> None:
    if config.experts is not None and config.experts.is_noncausal:
        raise ModelError(
            f"gate = {config.experts.gate!r}: {LOOKS_AHEAD}, so the model can neither "
            "be sampled from nor be evaluated: use another gate; the run's metrics.jsonl has its loss"
        )


def changed_by_rounding(config: ModelConfig) -> list[str]:
    """Discrete decisions of the model that rounding may change, described in words."""
    return [] if config.experts is None else ["routers that choose other experts"]


def one_layer(config: ModelConfig) -> ModelConfig:
    """This model with one layer (the widest window; a mixture if any layer has one) and a vocabulary of 1."""
    experts = None if config.experts is None else replace(config.experts, dense_layers=())
    return replace(config, num_layers=1, vocab_size=1, kinds=(), experts=experts, num_mtp_layers=0)


def refuse_unpublished_gate(config: ModelConfig, weights: str) -> None:
    """Raise `ModelError` for a gate whose parameters are in no published weights; `weights` is the folder to load."""
    experts = config.experts
    if experts is not None and experts.gate in ("noisy", "cosine"):
        raise ModelError(
            f"train.weights = {weights!r} has no router for gate = {experts.gate!r}: leave the gate out, "
            'or begin from scratch with --train.weights ""'
        )
