"""Dynamic loss scaling for fp16, whose gradients would otherwise underflow to zero below 6e-8.

Backwards start from the scale instead of 1, so every gradient is scaled; CLIP divides norm and gradients by it. A step
with finite loss but non-finite gradients is skipped before any update, on all ranks, since all see the same sums. The
scale is then halved; after 2,000 finite steps in a row it is doubled, as by torch.amp.GradScaler (Micikevicius et al.
1710.03740, section 3.2). Scales are powers of two, so that scaling does not round values that stay in range.

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
    """The scale of the next step, the finite steps since it last changed, and the number of skipped steps.

    Without `scaling` the scale stays 1, and no step is skipped.
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
        """A constant scale of 1."""
        return LossScale(1.0, scaling=False)

    def stepped(self) -> None:
        if not self.scaling:
            return
        self.finite += 1
        if self.finite == INTERVAL:
            self.value, self.finite = self.value * GROWTH, 0

    def skips(self, loss: float) -> bool:
        """After a non-finite step: lower the scale and return True if it is skipped, False if it is an error."""
        if not self.scaling or not math.isfinite(loss) or self.value * BACKOFF < _LEAST:
            return False
        self.value, self.finite, self.skipped = self.value * BACKOFF, 0, self.skipped + 1
        return True

    def take(self, other: "LossScale") -> None:
        """Continue from a checkpoint's loss scale; start anew if its run had none."""
        if self.scaling:
            begun = other if other.scaling else LossScale()
            self.value, self.finite, self.skipped = begun.value, begun.finite, begun.skipped

    @property
    def table(self) -> dict[str, Any]:
        """For a manifest; empty without scaling."""
        return {"value": self.value, "finite": self.finite, "skipped": self.skipped} if self.scaling else {}

    @staticmethod
    def parse(table: Mapping[str, Any]) -> "LossScale":
        """Inverse of `table`. Raises `ValueError` for an invalid state."""
        if not table:
            return LossScale.one()
        value, finite, skipped = (table[name] for name in ("value", "finite", "skipped"))
        is_scale = isinstance(value, float) and _LEAST <= value < math.inf and math.frexp(value)[0] == 0.5
        if not is_scale or type(finite) is not int or not 0 <= finite < INTERVAL or type(skipped) is not int:
            raise ValueError(f"loss_scale = {dict(table)} is none")
        if skipped < 0:
            raise ValueError(f"loss_scale.skipped = {skipped} is negative")
        return LossScale(value, finite, skipped)
