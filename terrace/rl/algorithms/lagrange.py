"""Safe RLHF: maximise reward under a bound on mean cost, by a Lagrange multiplier (Dai et al., 2310.12773, eq. 31)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from terrace.base.errors import ConfigError
from terrace.rl.values.ragged import Ragged, check_rows


@dataclass(frozen=True, kw_only=True)
class Multiplier:
    """lambda of the Lagrangian to maximise, reward - lambda (cost - threshold).

    `threshold` is the largest allowed mean cost, -d in the paper. `costs` are those of the last `window` responses.
    Updates apply to ln lambda, so that lambda stays above 0. Their size grows with lambda, so `largest` bounds it, as
    in the authors' code. Raises `ConfigError` for values outside their range.
    """

    threshold: float
    rate: float
    window: int
    largest: float
    log_value: float = 0.0
    costs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rate <= 0 or self.window < 1 or self.largest <= 0:
            raise ConfigError(
                f"rate {self.rate:g}, window {self.window} and largest {self.largest:g} of the multiplier: must be "
                "above 0"
            )
        if self.log_value > math.log(self.largest):
            raise ConfigError(f"multiplier of {self.value:g}: must be at most largest = {self.largest:g}")

    @property
    def value(self) -> float:
        return math.exp(self.log_value)

    def updated(self, costs: Sequence[float]) -> "Multiplier":
        """The multiplier after responses with `costs`: ln lambda += rate lambda (moving mean cost - threshold)."""
        kept = (*self.costs, *costs)[-self.window :]
        if not kept:
            return self
        violation = sum(kept) / len(kept) - self.threshold
        log_value = min(self.log_value + self.rate * self.value * violation, math.log(self.largest))
        return replace(self, log_value=log_value, costs=kept)


def mixed(of_reward: Ragged, of_cost: Ragged, multiplier: float) -> Ragged:
    """(A^R - lambda A^C) / (1 + lambda), from the reward's and the cost's advantages, each from its own critic."""
    check_rows(of_reward=of_reward, of_cost=of_cost)
    return of_reward.with_values((of_reward.values - multiplier * of_cost.values) / (1 + multiplier))
