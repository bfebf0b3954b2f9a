"""The scale of the loss in fp16, whose gradients would else be zero below 6e-8: dynamic loss scaling.

Backwards begin with the scale in place of one, so every gradient is scaled, and CLIP divides norm and gradients by it.
A step whose gradients are not finite, though its loss is, is skipped: the same sums are on all ranks, so all skip it,
and nothing has been updated. Then the scale is halved; after 2,000 finite steps in a row it is doubled, as by
torch.amp.GradScaler (Micikevicius et al. 1710.03740, section 3.2). Scales are powers of two, so that scaling rounds
nothing that stays in range.

The scaled loss is a sum over tokens, not a mean, so scales are lower than usual by the tokens of a micro-batch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from terrace.plan.plan import Plan

GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000  # the defaults of torch.amp.GradScaler
FIRST = 2.0**10  # 2^16, as there, for the mean of 64 tokens
_LEAST = 2.0**-24  # below it no gradient of a finite loss can be too large: something else is wrong


@dataclass
class LossScale:
    """The scale of the next step, the finite steps since it changed, and all steps that were skipped.

    One that is not `scaling` stays 1, and no step is skipped.
    """

    value: float = FIRST
    finite: int = 0
    skipped: int = 0
    scaling: bool = True

    @staticmethod
    def of(plan: Plan) -> "LossScale":
        """The scale of a new run."""
        return LossScale() if plan.compute == "fp16" else LossScale.one()

    @staticmethod
    def one() -> "LossScale":
        """The scale of gradients that are not scaled."""
        return LossScale(1.0, scaling=False)

    def stepped(self) -> None:
        """After a step that was finite."""
        if not self.scaling:
            return
        self.finite += 1
        if self.finite == INTERVAL:
            self.value, self.finite = self.value * GROWTH, 0

    def skips(self, loss: float) -> bool:
        """After a step that was not: whether it is skipped, rather than an error. The scale is then lower."""
        if not self.scaling or not math.isfinite(loss) or self.value * BACKOFF < _LEAST:
            return False
        self.value, self.finite, self.skipped = self.value * BACKOFF, 0, self.skipped + 1
        return True

    def take(self, other: "LossScale") -> None:
        """Go on as another does, of a checkpoint; begin anew after a run without."""
        if self.scaling:
            begun = other if other.scaling else LossScale()
            self.value, self.finite, self.skipped = begun.value, begun.finite, begun.skipped

    @property
    def table(self) -> dict[str, Any]:
        """For a manifest; empty for a scale that stays 1."""
        return {"value": self.value, "finite": self.finite, "skipped": self.skipped} if self.scaling else {}

    @staticmethod
    def parse(table: Mapping[str, Any]) -> "LossScale":
        """The inverse; raises `ValueError` for a state that no run has."""
        if not table:
            return LossScale.one()
        value, finite, skipped = (table[name] for name in ("value", "finite", "skipped"))
        is_scale = isinstance(value, float) and _LEAST <= value < math.inf and math.frexp(value)[0] == 0.5
        if not is_scale or type(finite) is not int or not 0 <= finite < INTERVAL or type(skipped) is not int:
            raise ValueError(f"loss_scale = {dict(table)} is none")
        if skipped < 0:
            raise ValueError(f"loss_scale.skipped = {skipped} is negative")
        return LossScale(value, finite, skipped)
