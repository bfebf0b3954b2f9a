"""Questions about a model as a whole, answered for dense models and mixtures alike. Pure: needs no torch."""

from dataclasses import replace

from terrace.base.errors import ModelError
from terrace.model.config import ModelConfig
from terrace.model.spec import ParamSpec

LOOKS_AHEAD = "the experts of a token depend on later tokens"  # why a model is not causal


def is_dense(config: ModelConfig) -> bool:
    """Whether a token meets every parameter: no layer has a mixture of experts."""
    return config.experts is None


def is_causal(config: ModelConfig) -> bool:
    """Whether no token depends on later ones, as it does where experts choose their tokens."""
    return config.experts is None or not config.experts.looks_ahead


def refuse_non_causal(config: ModelConfig) -> None:
    """Raise `ModelError` for a model that cannot be sampled from, nor predict a token by those before it."""
    if config.experts is not None and config.experts.looks_ahead:
        raise ModelError(
            f"gate = {config.experts.gate!r}: {LOOKS_AHEAD}, so the model can neither "
            "be sampled from nor be evaluated: use another gate; the run's metrics.jsonl has its loss"
        )


def turned_by_rounding(config: ModelConfig) -> list[str]:
    """Choices of the model that rounding may turn, in words."""
    return [] if config.experts is None else ["routers that choose other experts"]


def read_share(config: ModelConfig, param: ParamSpec, num_tokens: int) -> float:
    """Share of a parameter that `num_tokens` tokens read: all of it, but for a stack the experts that some token chose,
    under even routing, which leaves out the fewest.
    """
    if not param.is_stack or config.experts is None:
        return 1.0
    return 1 - (1 - config.experts.per_token / config.experts.num_experts) ** num_tokens


def one_layer(config: ModelConfig) -> ModelConfig:
    """The model with one layer of the widest window, a mixture if any layer is one, and a vocabulary of 1."""
    experts = None if config.experts is None else replace(config.experts, dense_layers=())
    return replace(config, num_layers=1, vocab_size=1, kinds=(), experts=experts)
