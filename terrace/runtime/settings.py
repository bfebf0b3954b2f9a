"""Runtime settings that users write. No torch here: they are checked before it is imported."""

from dataclasses import dataclass, fields
from typing import Literal

from terrace.base.errors import ConfigError
from terrace.plan.update import Update

LARGEST = 1e6  # limit of a rate or a coefficient; a guess


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its hyper-parameters.

    `name` is adamw (Loshchilov and Hutter, arXiv 1711.05101), lion (Chen et al., arXiv 2302.06675), muon (Jordan
    2024; Liu et al., arXiv 2502.16982), which updates the matrices of layers and leaves the rest to AdamW, or sgd.
    `lr` is the peak learning rate; under muon `adamw_lr` is AdamW's, by default the same. `clip` bounds the global
    gradient norm; 0 turns clipping off. Raises `ConfigError` for values out of range, and for options without effect.
    """

    name: Literal["adamw", "lion", "muon", "sgd"] = "adamw"  # the rule of an update
    lr: float = 3e-3  # peak learning rate
    beta1: float = 0.9  # of AdamW and Lion: decay of the mean of gradients
    beta2: float = 0.95  # of AdamW and Lion: decay of the second mean
    eps: float = 1e-8  # of AdamW: added to the root of the mean square
    weight_decay: float = 0.1  # decoupled, times the learning rate
    clip: float = 1.0  # largest global gradient norm; 0: not clipped
    momentum: float | None = None  # of muon, 0.95 by default, and of sgd, 0 by default
    newton_schulz_steps: int = 5  # of muon
    adamw_lr: float | None = None  # of what muon leaves to AdamW; none: `lr`

    def __post_init__(self) -> None:
        if not self.eps > 0:
            raise ConfigError(f"optimizer.eps = {self.eps} must be positive: it divides where a gradient is zero")
        for name in ("lr", "eps", "weight_decay", "clip", "adamw_lr"):
            value = getattr(self, name)
            if name == "adamw_lr" and value is None:
                continue
            if not 0 <= value <= LARGEST:
                raise ConfigError(
                    f"optimizer.{name} = {value} must be zero or a positive number of at most {LARGEST:g}"
                    + "; 0 turns clipping off" * (name == "clip" and value > LARGEST)
                )
        for name in ("beta1", "beta2", "momentum"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ConfigError(f"optimizer.{name} = {value} must be at least 0 and below 1")
        if self.newton_schulz_steps < 1:
            raise ConfigError(f"optimizer.newton_schulz_steps = {self.newton_schulz_steps} must be at least 1")
        if self.adamw_lr is not None and not self.lr:
            raise ConfigError(f"optimizer.adamw_lr = {self.adamw_lr}: the schedule is of optimizer.lr, which is 0")
        # An option without effect is refused rather than ignored.
        for item in fields(self):
            if item.name in _WITHOUT_EFFECT[self.name] and getattr(self, item.name) != item.default:
                raise ConfigError(
                    f"optimizer.{item.name} = {getattr(self, item.name)} has no effect under optimizer.name = "
                    f"{self.name!r}: leave it out"
                )

    @property
    def update(self) -> Update:
        """The update rule as `plan.update` names it; it determines which states a parameter has."""
        return "sgd+momentum" if self.name == "sgd" and self.momentum else self.name

    @property
    def momentum_or_default(self) -> float:
        if self.momentum is not None:
            return self.momentum
        return 0.0 if self.name == "sgd" else 0.95

    @property
    def adamw_share(self) -> float:
        """AdamW's learning rate as a multiple of the step's."""
        return 1.0 if self.adamw_lr is None else self.adamw_lr / self.lr


_OF_MUON = ("newton_schulz_steps", "adamw_lr")
_WITHOUT_EFFECT = {
    "adamw": ("momentum", *_OF_MUON),
    "lion": ("momentum", *_OF_MUON, "eps"),
    "muon": (),
    "sgd": (*_OF_MUON, "beta1", "beta2", "eps"),
}
