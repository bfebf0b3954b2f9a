"""The evaluation data of a run, and the mean loss over several passes of the forward-only program."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrace.data.batches import Batches
from terrace.data.eval_batches import EvalBatches, EvalSource, eval_batches
from terrace.model.facts import vocabulary_size
from terrace.runtime.batch import Batch

if TYPE_CHECKING:
    from terrace.runtime.engine import Engine
    from terrace.train.config import RunConfig


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


def eval_batches_of(run: "RunConfig", batches: Batches, sources: tuple[EvalSource, ...]) -> list[EvalBatches]:
    """The evaluation data of a run, in batches of the size of its steps; empty if it does not evaluate."""
    train = run.train
    if not train.eval_every:
        return []
    return eval_batches(batches, sources, run.rows, train.eval_batches, vocabulary_size(run.model))
