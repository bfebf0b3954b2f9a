"""Facts of a whole model that the rest of the house asks for. Pure: needs no torch.

Nobody outside terrace.model names a field of `ModelConfig`: what a block computes is asked of its operations
(terrace.model.operations), and what concerns the model as a whole is a function here.
"""

from dataclasses import replace

from terrace.base.errors import ModelError
from terrace.model.config import ModelConfig
from terrace.model.params import ParamSpec


def family_of(config: ModelConfig) -> str:
    """The family whose layout the model's files have."""
    return config.family


def layers_of(config: ModelConfig) -> int:
    """Number of layers."""
    return config.num_layers


def vocabulary_size(config: ModelConfig) -> int:
    """Tokens that the model has rows for."""
    return config.vocab_size


def has_scalar_head(config: ModelConfig) -> bool:
    """Whether it gives one number a token in place of logits: a reward model or a critic."""
    return config.scalar_head


def with_scalar_head(config: ModelConfig) -> ModelConfig:
    """The model with one number a token in place of logits."""
    return replace(config, scalar_head=True)


def initial_std(config: ModelConfig) -> float:
    """Standard deviation of matrices that begin with random values."""
    return config.init_std


def positions_of(config: ModelConfig) -> int:
    """Positions that the model's file names; a limit only where `longest_row` says so."""
    return config.max_positions


def longest_row(config: ModelConfig) -> int:
    """The longest row that has learned positions; 0: rows of any length."""
    return config.max_positions if config.learned_positions else 0


def longest_text(config: ModelConfig) -> int:
    """The longest text whose length is not known yet, as `ModelConfig.most_positions`; 0: texts of any length."""
    return config.most_positions


def rope_limit(config: ModelConfig) -> int:
    """The longest row that has the same RoPE frequencies as all shorter ones; 0: rows of any length."""
    return config.rope_limit


def layer_windows(config: ModelConfig) -> tuple[int, ...]:
    """The sliding windows of its layers, each once, ascending; 0: none."""
    return config.windows


def rolling_window(config: ModelConfig, context: int) -> int:
    """The widest window of its layers, if a text of `context` tokens outgrows it and may go on without end; else 0."""
    window = config.sliding_window
    return window if 0 < window <= context and not config.most_positions else 0


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


def refuse_unpublished_gate(config: ModelConfig, weights: str) -> None:
    """Raise `ModelError` for a gate that initial weights in the folder `weights` cannot have."""
    experts = config.experts
    if experts is not None and experts.gate in ("noisy", "cosine"):
        raise ModelError(
            f"train.weights = {weights!r} has no router for gate = {experts.gate!r}: leave the gate out, "
            'or begin from scratch with --train.weights ""'
        )
