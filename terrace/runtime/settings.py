"""Runtime settings that users write. No torch here: they are checked before it is imported."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, get_args

from terrace.base.errors import ConfigError, did_you_mean
from terrace.plan.update import EVERY, GALORE, LSP, OWN, QK_CLIP, Update, UpdateRule, wrong_numbers

LARGEST = 1e6  # limit of a rate or a coefficient; a guess
Name = Literal["adamw", "lion", "muon", "galore", "lsp", "sgd"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its hyper-parameters.

    `name` is adamw (Loshchilov and Hutter, arXiv 1711.05101), lion (Chen et al., arXiv 2302.06675), muon (Jordan 2024;
    Liu et al., arXiv 2502.16982), galore (Zhao et al., arXiv 2403.03507), lsp (Chen et al., arXiv 2406.10181), sgd, or
    `module:Class` of the user (terrace.runtime.own_rule). Muon, GaLore and LSP update the matrices of layers and leave
    the rest to AdamW, whose rate is `adamw_lr`, by default `lr`, the peak learning rate. `clip` bounds the global
    gradient norm; 0 turns clipping off. Raises `ConfigError` for values out of range, and for options without effect.
    """

    name: Name | str = "adamw"  # the rule of an update, or module:Class of a torch.optim.Optimizer
    lr: float = 3e-3  # peak learning rate
    beta1: float = 0.9  # of AdamW and Lion: decay of the mean of gradients
    beta2: float = 0.95  # of AdamW and Lion: decay of the second mean
    eps: float = 1e-8  # of AdamW: added to the root of the mean square
    weight_decay: float = 0.1  # decoupled, times the learning rate
    clip: float = 1.0  # largest global gradient norm; 0: not clipped
    qk_clip: float = 0.0  # largest attention score of a head (Kimi K2, arXiv 2507.20534, section 2.1); 0: not bounded
    momentum: float | None = None  # of muon, 0.95 by default, and of sgd, 0 by default
    newton_schulz_steps: int = 5  # of muon
    adamw_lr: float | None = (
        None  # learning rate of the parameters that muon, galore and lsp leave to AdamW; none: `lr`
    )
    rank: int = 128  # of galore and lsp: width of the space that gradients are projected into
    density: int = 4  # of lsp: non-zeros in a row of a projector
    check_every: int = EVERY  # of galore and lsp: steps between checks, in which projectors may change
    alpha: float = 0.5  # of lsp: relative bias above which projectors are learned anew
    scale: float | None = None  # factor of an update of galore, 0.25 by default, and of lsp, 1 by default
    arguments: Mapping[str, Any] = field(  # of module:Class, but for lr
        default_factory=dict, hash=False, metadata={"absent": {}}
    )
    states: tuple[str, ...] = field(default=(), metadata={"absent": ()})  # of module:Class: names of its states
    given: tuple[type[Any], ...] = field(default=(), metadata={"key": False})  # the class, where a script has given it

    def __post_init__(self) -> None:
        if not self.is_own and self.name not in get_args(Name):
            raise ConfigError(
                f"optimizer.name = {self.name!r} is not one of its values{did_you_mean(self.name, get_args(Name))}"
            )
        if "lr" in self.arguments:
            raise ConfigError("optimizer.arguments has an lr: write optimizer.lr, which the schedule follows")
        if not self.eps > 0:
            raise ConfigError(f"optimizer.eps = {self.eps} must be positive: it divides where a gradient is zero")
        for name in ("lr", "eps", "weight_decay", "clip", "qk_clip", "adamw_lr", "scale"):
            value = getattr(self, name)
            if name in ("adamw_lr", "scale") and value is None:
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
        self._check_projection()
        if self.adamw_lr is not None and not self.lr:
            raise ConfigError(f"optimizer.adamw_lr = {self.adamw_lr}: the schedule is of optimizer.lr, which is 0")
        # An option without effect is refused rather than ignored.
        for item in fields(self):
            default = item.default if item.default_factory is MISSING else item.default_factory()
            without_effect = _WITHOUT_EFFECT.get(self.name, _OF_OURS)
            if item.name in without_effect and getattr(self, item.name) != default:
                raise ConfigError(
                    f"optimizer.{item.name} = {getattr(self, item.name)} has no effect under optimizer.name = "
                    f"{self.name!r}: leave it out" + ", or write it into optimizer.arguments" * self.is_own
                )

    def _check_projection(self) -> None:
        if why := wrong_numbers(UpdateRule(self.name, self.rank, self.density)):
            raise ConfigError(f"optimizer.{why}")
        if self.check_every < 1:
            raise ConfigError(f"optimizer.check_every = {self.check_every} must be at least 1: it counts steps")
        if not 0 < self.alpha < 1:
            raise ConfigError(
                f"optimizer.alpha = {self.alpha} must be above 0 and below 1: it bounds the relative bias, which is 1 "
                "for a projection to zero"
            )
        if self.scale == 0:
            raise ConfigError("optimizer.scale = 0 would leave every matrix as it is: use a positive number")

    @property
    def is_own(self) -> bool:
        return ":" in self.name

    @property
    def update(self) -> Update:
        """The update as `plan.update` names it: the rule, and whether the step ends with QK-clip."""
        return self.group + QK_CLIP * (self.qk_clip > 0)

    @property
    def group(self) -> Update:
        """The update rule alone, which determines the states of a parameter."""
        numbers = {GALORE: (self.rank,), LSP: (self.rank, self.density)}.get(self.name, ())
        if numbers:
            return ":".join(map(str, (self.name, *numbers)))
        if self.is_own:
            return ":".join((OWN, self.name.replace(":", "."), *sorted(self.states)))
        return "sgd+momentum" if self.name == "sgd" and self.momentum else self.name

    @property
    def momentum_or_default(self) -> float:
        if self.momentum is not None:
            return self.momentum
        return 0.0 if self.name == "sgd" else 0.95

    @property
    def scale_or_default(self) -> float:
        if self.scale is not None:
            return self.scale
        return 0.25 if self.name == GALORE else 1.0

    @property
    def adamw_share(self) -> float:
        """AdamW's learning rate as a multiple of the step's."""
        return 1.0 if self.adamw_lr is None else self.adamw_lr / self.lr


_OF_OWN = ("arguments", "states", "given")
_OF_LSP = ("density", "alpha")
_OF_PROJECTED = ("rank", "check_every", "scale", *_OF_LSP)
_OF_WHOLE = ("newton_schulz_steps", "adamw_lr", *_OF_PROJECTED)
_OF_OURS = ("momentum", *_OF_WHOLE, "beta1", "beta2", "eps", "weight_decay")
_WITHOUT_EFFECT = {
    "adamw": ("momentum", *_OF_WHOLE, *_OF_OWN),
    "lion": ("momentum", *_OF_WHOLE, "eps", *_OF_OWN),
    "muon": (*_OF_PROJECTED, *_OF_OWN),
    "galore": ("momentum", "newton_schulz_steps", *_OF_LSP, *_OF_OWN),
    "lsp": ("momentum", "newton_schulz_steps", *_OF_OWN),
    "sgd": (*_OF_WHOLE, "beta1", "beta2", "eps", *_OF_OWN),
}
