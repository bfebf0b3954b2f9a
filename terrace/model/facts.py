"""Facts of a whole model that the rest of the house asks for. Pure: needs no torch.

Nobody outside terrace.model names a field of `ModelConfig`: what a block computes is asked of its operations
(terrace.model.operations), and what concerns the model as a whole is a function here.
"""

from dataclasses import replace

from terrace.model.block_operations import layer_operations
from terrace.model.config import ModelConfig
from terrace.model.experts import config as experts_config


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


def has_experts(config: ModelConfig) -> bool:
    """Whether any of its layers has a mixture of experts."""
    return config.experts is not None


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


def widest_layer(config: ModelConfig) -> ModelConfig:
    """A model of one layer and one token: with experts if any layer has them, and the widest window of all layers."""
    experts = None if config.experts is None else replace(config.experts, dense_layers=())
    return replace(config, num_layers=1, vocab_size=1, kinds=(), experts=experts)


def looks_ahead(config: ModelConfig) -> bool:
    """Whether the experts of a token depend on later tokens."""
    return layer_operations(config).mixture.experts.looks_ahead


def refuse_looking_ahead(config: ModelConfig) -> None:
    """Raise `ModelError` for a model that cannot be sampled from, nor predict a token by those before it."""
    experts_config.refuse_looking_ahead(layer_operations(config).mixture.experts)
