"""The loss over the micro-batches of several passes of the program of forwards."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from terrace.runtime.batch import Batch
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


def evaluated(engine: Engine, passes: Sequence[Callable[[], Sequence[Batch]]]) -> Evaluated:
    """The loss over the micro-batches of several passes, each made when it is due. Every rank calls this.

    Of islands, each has evaluated its rows with its own parameters.
    """
    total, num_tokens = 0.0, 0
    for micros in passes:
        result = engine.evaluate(micros())
        total, num_tokens = total + result.loss * result.num_tokens, num_tokens + result.num_tokens
    if engine.island is not None:
        # The ranks of an island have the same sums.
        of_islands = dict(engine.comm.exchange((engine.island.numbers.island, [total, num_tokens])))
        total, num_tokens = (sum(each) for each in zip(*of_islands.values(), strict=True))
    return Evaluated(loss=total / max(1, num_tokens), num_tokens=int(num_tokens))
