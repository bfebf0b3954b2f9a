"""Settings of the runtime that a user writes; pure, so that they are checked before torch is loaded."""

import math
from dataclasses import dataclass

from terrace.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """Hyper-parameters of AdamW (Loshchilov and Hutter, arXiv 1711.05101).

    `clip` bounds the global gradient norm; 0 turns clipping off. Raises `ConfigError` for values outside
    their range.
    """

    lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise ConfigError(f"optimizer.eps = {self.eps} must be positive: it divides where a gradient is zero")
        for name in ("lr", "eps", "weight_decay", "clip"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"optimizer.{name} = {value} must be zero or a positive number")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optimizer.{name} = {getattr(self, name)} must be at least 0 and below 1")
