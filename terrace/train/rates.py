"""Learning rates for loaded weights: defaults, and the limit above which training would destroy them.

The default of a run from scratch is a hundred times too high for pretrained weights. Peak rates of AdamW:

- 2e-5 for a whole model: supervised fine-tuning of Llama 2 (Touvron et al. 2307.09288, section 3.1).
- 1e-5 for a reward model: the same paper, section 3.2.2, all sizes but the largest.
- 1e-6 for DPO: Rafailov et al. 2305.18290, appendix B.
- ten times these with adapters: 2e-4 is QLoRA's rate for models of up to 13 B parameters (Dettmers et al. 2305.14314).

Lion takes a third to a tenth of AdamW's rate (Chen et al. 2302.06675, section 5); a fifth is used here. Muon's update
has the size of AdamW's (Liu et al. 2502.16982, section 2.2), so its rate is the same. An update of sgd is as large as
the gradient, those of galore and lsp depend on their rank and scale: none has a usual rate, and a run keeps its own.
Needs no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from terrace.base.errors import ConfigError
from terrace.train.config import RunConfig

ADAMW = {"next-token": 2e-5, "distill": 2e-5, "reward": 1e-5, "dpo": 1e-6}  # by objective, for a whole model
_ADAPTERS = 10.0
_OF_OPTIMIZER = {"adamw": 1.0, "muon": 1.0, "lion": 0.2}
# Guesses, as multiples of the usual rate: above _HIGH the run warns, above _MOST it is refused. For a whole model _MOST
# means 1e-3, above the peak rates for training models of a billion parameters and more from scratch.
_HIGH, _MOST = 5.0, 50.0


def usual_rate(optimizer: str, adamw: float | None, adapters: bool = False) -> float | None:
    """Usual peak rate for loaded weights, from that of AdamW for a whole model; None if there is none."""
    if optimizer not in _OF_OPTIMIZER or adamw is None:
        return None
    rate = adamw * _OF_OPTIMIZER[optimizer] * (_ADAPTERS if adapters else 1.0)
    return float(f"{rate:.6g}")  # as a user would write it


@dataclass(frozen=True, kw_only=True)
class LoadedRate:
    """The peak learning rate of loaded weights; `key` is the setting that holds it, `adamw` AdamW's usual rate."""

    key: str
    lr: float
    optimizer: str
    adamw: float | None
    adapters: bool = False
    of: str = ""  # which of the rates of a run, in words

    @property
    def usual(self) -> float | None:
        return usual_rate(self.optimizer, self.adamw, self.adapters)

    @property
    def is_high(self) -> bool:
        """Whether the rate would destroy the weights."""
        return self.usual is not None and self.lr > _MOST * self.usual * (1 + 1e-9)

    @property
    def words(self) -> str:
        """The rate compared with the usual one, in words; "" if there is no usual rate."""
        usual, kind = self.usual, self.kind
        if usual is None:
            return ""
        rate = f"peak learning rate{self.of} {self.lr:g}"
        if self.lr == usual:
            return f"{rate}, usual for loaded weights {kind} (--{self.key})"
        times = self.lr / usual
        warning = ", which may undo what they have learned" if times > _HIGH else ""
        return f"{rate}: {times:.3g} times the usual {usual:g} for loaded weights {kind}{warning}"

    @property
    def kind(self) -> str:
        return f"under {self.optimizer}" + (" with adapters" if self.adapters else "")


def check_rates(rates: Sequence[LoadedRate], flag: str, *, is_allowed: bool, lr: float) -> None:
    """Raises `ConfigError` for a rate that would destroy loaded weights unless `flag` is set, and for a `flag` without
    effect.

    `rates` is empty if no weights are loaded; the error then shows `lr`.
    """
    high = [each for each in rates if each.is_high]
    if high and not is_allowed:
        raise ConfigError(
            f"{high[0].key} = {high[0].lr:g} would destroy the loaded weights, which train at about "
            f"{high[0].usual:g} {high[0].kind}: leave it out, or ask for it with --{flag} true"
        )
    if is_allowed and not high:
        why = "no weights are loaded" if not rates else f"{rates[0].key} = {lr:g} is not high"
        raise ConfigError(f"{flag} = true has no effect: {why}; leave it out")


def with_rate(table: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The run's table with the usual rate for loaded weights, if it loads weights and none of `layers` sets a rate."""
    optimizer, train = table.get("optimizer", {}), table.get("train", {})
    if not isinstance(optimizer, Mapping) or not isinstance(train, Mapping) or not train.get("weights"):
        return dict(table)
    if any("lr" in own for layer in layers if isinstance(own := layer.get("optimizer"), Mapping)):
        return dict(table)
    adamw = ADAMW.get(str(train.get("objective", "next-token")))
    rate = usual_rate(str(optimizer.get("name", "adamw")), adamw, table.get("lora") is not None)
    return dict(table) if rate is None else {**table, "optimizer": {**optimizer, "lr": rate}}


def check_rate(run: RunConfig) -> None:
    """Raises `ConfigError` for a rate that would destroy loaded weights, or for `train.high_lr` without effect."""
    check_rates(_rates(run), "train.high_lr", is_allowed=run.train.high_lr, lr=run.optimizer.lr)


def rate_words(run: RunConfig) -> str:
    """A line on the peak rate of a run with loaded weights, compared with the usual one; "" if there is none."""
    return "".join(each.words for each in _rates(run))


def _rates(run: RunConfig) -> list[LoadedRate]:
    if not run.train.weights:
        return []
    return [
        LoadedRate(
            key="optimizer.lr",
            lr=run.optimizer.lr,
            optimizer=run.optimizer.name,
            adamw=ADAMW.get(run.train.objective),
            adapters=run.lora is not None,
        )
    ]
