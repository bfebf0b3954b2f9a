"""Mean loss over several passes of the forward-only program."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrace.runtime.batch import Batch

if TYPE_CHECKING:
    from terrace.runtime.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """Mean loss over `num_tokens` predicted tokens."""

    loss: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite beyond the range of a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def evaluated(engine: "Engine", passes: Sequence[Callable[[], Sequence[Batch]]]) -> Evaluated:
    """Mean loss over several passes, whose micro-batches are made when the pass begins. Every rank calls this.

    With islands, each evaluates its own rows with its own parameters, and sums are taken over all islands.
    """
    total, num_tokens = 0.0, 0
    for micros in passes:
        result = engine.evaluate(micros())
        total, num_tokens = total + result.loss * result.num_tokens, num_tokens + result.num_tokens
    return Evaluated(loss=total / max(1, num_tokens), num_tokens=num_tokens)
